"""The task encoder's hooks as stages: cooking per source, then encoding, batches, loss weights."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.packing.settings import Packing
from energon_lite.sources.webdataset import BaseWebdatasetFactory, CrudeWebdataset
from energon_lite.stages.batching import BatchDataset, GroupBatchDataset
from energon_lite.stages.mapping import MapDataset
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.packing import PackingDataset
from energon_lite.stages.weighing import LossWeightDataset
from energon_lite.storage.decoding import SampleDecoder
from energon_lite.task_encoder.base import CookFunction, DefaultTaskEncoder, TaskEncoder
from energon_lite.task_encoder.cooking import find_cooker
from energon_lite.task_encoder.fingerprint import is_outdated

AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]


class Batching(NamedTuple):
    """How samples become batches, as the user asked for it."""

    batch_size: int | None
    drop_last: bool
    packing_buffer_size: int | None


class Hooks:
    """Puts the hooks of a task encoder over datasets, each that does something as a stage.

    Args:
        encoder: the hooks.
        config: seed and error handlers.
    """

    def __init__(self, encoder: AnyTaskEncoder, config: WorkerConfig | None) -> None:
        self.encoder = encoder
        self.config = config

    def hook(self, name: str, function: Any = None) -> UserFunction:
        """Gives the hook `name`, as what runs it."""
        return UserFunction(
            function or getattr(self.encoder, name),
            name=name,
            seed=self.config.seed_offset if self.config else 0,
            config=self.config,
            failure_tolerance=self.encoder.__default_failure_tolerance__,
        )

    def is_outdated(self, measured_by: str) -> bool:
        """Tells whether the encoder's code changed since it measured a length index."""
        return is_outdated(measured_by, self.encoder)

    def cooked(
        self, source: SavableDataset[Any], factory: BaseWebdatasetFactory[Any]
    ) -> SavableDataset[Any]:
        """Puts the cooker of a crude source over it."""
        if not isinstance(factory, CrudeWebdataset):
            return source
        cooker = find_cooker(self.encoder.cookers, factory.subflavors, str(factory.path))
        if cooker.need_cache or cooker.need_primary:
            raise ValueError(
                f"{factory.path}: cooker {cooker.cook.__name__} asks for a cache or the primary "
                "file store, which this version does not have"
            )
        return MapDataset(source, self.hook("cook", CookFunction(self.encoder, cooker)))

    def measured(self, dataset: SavableDataset[Any]) -> MeasureDataset[Any]:
        """Puts the hooks up to `sample_length` over cooked samples.

        Raises:
            ValueError: The encoder does not say how long a sample is.
        """
        encoder = self.encoder
        if not encoder.overrides("sample_length"):
            raise ValueError(
                f"{type(encoder).__name__} does not say how long a sample is: give it a method "
                "sample_length(self, sample) -> int (or a dict of resources)"
            )
        for name in _encoding_hooks(encoder):
            if not (encoder.packing is not None and name == "postencode_sample"):
                dataset = MapDataset(dataset, self.hook(name))
        return MeasureDataset(dataset, self.hook("sample_length"))

    def encoded(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        """Puts the hooks from `encode_sample` to `encode_batch` over cooked samples."""
        encoder = self.encoder
        packs = self._packs(batching)
        for name in _encoding_hooks(encoder):
            if not (packs and name == "postencode_sample"):
                dataset = MapDataset(dataset, self.hook(name))
        if encoder.overrides("sample_length") and encoder.packing is None:  # else packing measures
            dataset = MeasureDataset(dataset, self.hook("sample_length"))
        elif (
            not encoder.overrides("sample_length")
            and dataset.share_unit == "tokens"
            and not _has_index(dataset)
        ):
            raise ValueError(
                f"a blend has `unit: tokens`, but {type(encoder).__name__} does not say how long a "
                "sample is: give it a method sample_length(self, sample) -> int, or name a stored "
                "index with `lengths` in the blend"
            )
        if packs:
            dataset = self._packed(dataset, batching)
        batched = self._batched(dataset, batching)
        # Samples as they come from their source have their loss weight.
        is_own = batched is dataset and not _encoding_hooks(encoder) and not packs
        return batched if is_own else LossWeightDataset(batched)

    def _packs(self, batching: Batching) -> bool:
        """Tells whether samples are packed, and checks that what it needs is there."""
        encoder, name = self.encoder, type(self.encoder).__name__
        if encoder.packing is not None:
            if not isinstance(encoder.packing, Packing):
                raise TypeError(
                    f"{name}.packing={encoder.packing!r}; make it Packing(capacity=...)"
                )
            if not encoder.overrides("sample_length"):
                raise ValueError(
                    f"{name} has `packing`, but does not say how long a sample is: give it a "
                    "method sample_length(self, sample) -> int (or a dict of resources)"
                )
            if encoder.overrides("select_samples_to_pack"):
                raise ValueError(
                    f"{name} has both `packing` and select_samples_to_pack; leave one of them out"
                )
            return True
        if batching.packing_buffer_size is None:
            return False
        for hook in ("select_samples_to_pack", "pack_selected_samples"):
            if not encoder.overrides(hook):
                raise ValueError(
                    f"packing_buffer_size={batching.packing_buffer_size}, but {name} has no "
                    f"{hook}. Give it one, or `packing = Packing(capacity=...)` and "
                    "sample_length(sample)"
                )
        return True

    def _packed(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        encoder, packing = self.encoder, self.encoder.packing
        # Which of a sample's tokens count, and how much, changes what a resumed run gives.
        loss = packing.loss if packing and isinstance(packing.loss, str) else "function"
        return PackingDataset(
            dataset,
            batching.packing_buffer_size,
            packing or self.hook("select_samples_to_pack"),
            self.hook("pack_selected_samples"),
            sample_length=self.hook("sample_length") if packing else None,
            sample_encoder=self.hook("postencode_sample")
            if encoder.overrides("postencode_sample")
            else None,
            slicer=encoder.slice_sample,
            packer_config={"loss": loss} if packing else None,
            drop_last=False,
            worker_config=self.config,
        )

    def _batched(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        encoder, (batch_size, drop_last, _) = self.encoder, batching
        if encoder.overrides("batch_group_criterion"):
            criterion = self.hook("batch_group_criterion")
            dataset = GroupBatchDataset(
                dataset, batch_size, criterion, self.hook("batch"), drop_last=drop_last
            )
        elif batch_size is not None:
            dataset = BatchDataset(dataset, batch_size, self.hook("batch"), drop_last=drop_last)
        else:
            return dataset
        if encoder.overrides("encode_batch"):
            dataset = MapDataset(dataset, self.hook("encode_batch"))
        return dataset

    def decoder(self, kwargs: dict[str, Any]) -> SampleDecoder | None:
        """Gives the encoder's decoder, or the one that Energon's old keywords describe."""
        auto_decode = kwargs.pop("auto_decode", True)
        old = {
            name: kwargs.pop(name)
            for name in ("image_decode", "av_decode", "video_decode_audio")
            if name in kwargs
        }
        if kwargs.pop("handler", None) is not None:
            warnings.warn(
                "handler is ignored; set WorkerConfig.global_error_handler", FutureWarning, 4
            )
        if old:
            warnings.warn(
                f"{', '.join(old)}: set `decoder = SampleDecoder(...)` on the task encoder instead",
                FutureWarning,
                stacklevel=4,
            )
            return SampleDecoder(**old)
        return self.encoder.decoder if auto_decode else None


def _has_index(dataset: Any) -> bool:
    """Whether all blends by tokens know their lengths from an index."""
    own = getattr(dataset, "lengths", True) is not None
    return own and all(_has_index(child) for child in dataset.children)


def _encoding_hooks(encoder: AnyTaskEncoder) -> list[str]:
    """Lists the per-sample hooks that do something, in their order."""
    hooks = [name for name in ("preencode_sample", "encode_sample") if encoder.overrides(name)]
    if len(hooks) == 2:
        if type(encoder).encode_sample is not DefaultTaskEncoder.encode_sample:
            raise ValueError(
                f"{type(encoder).__name__} has both encode_sample and preencode_sample; write the "
                "first part of encode_sample as preencode_sample and the rest as postencode_sample"
            )
        hooks.remove("encode_sample")
    return hooks + ["postencode_sample"] * encoder.overrides("postencode_sample")
