"""The task encoder's hooks as stages: cooking per source, then encoding, batches, loss weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from energon_lite.batching.rules import Buckets, ModalitySplit, Packing
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.samples import CrudeSample, Sample
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.metadataset.open import warn_outdated
from energon_lite.sources.webdataset import BaseCoreDatasetFactory
from energon_lite.stages.batching import BatchDataset, GroupBatchDataset
from energon_lite.stages.bucket_batches import BucketBatchDataset
from energon_lite.stages.loss_weights import LossWeightDataset
from energon_lite.stages.map import MapDataset
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.modality.batches import SplitModalityBatchDataset
from energon_lite.stages.packing.dataset import PackingDataset
from energon_lite.stages.planned.lists import PlannedLists
from energon_lite.storage.decoding import SampleDecoder
from energon_lite.task_encoder.cooking import Cooker, find_cooker
from energon_lite.task_encoder.fingerprint import is_outdated

if TYPE_CHECKING:
    from energon_lite.task_encoder.base import AnyTaskEncoder


class Batching(NamedTuple):
    """How samples become batches, as the user asked for it."""

    batch_size: int | None
    batch_drop_last: bool = False
    packing_buffer_size: int | None = None


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
        """Returns the hook `name`, as what runs it."""
        return UserFunction(
            function or getattr(self.encoder, name),
            name=name,
            seed=self.config.seed_offset if self.config else 0,
            config=self.config,
            failure_tolerance=self.encoder.__default_failure_tolerance__,
        )

    def is_outdated(self, measured_by: str) -> bool:
        """Returns whether the encoder's code changed since it measured a length index."""
        return is_outdated(measured_by, self.encoder)

    def _check_index(self, dataset: SavableDataset[Any]) -> None:
        """Warns if what is planned goes by an index that an older encoder measured."""
        lists: Any = dataset
        while lists.children and not isinstance(lists, PlannedLists):
            lists = lists.children[0]
        if isinstance(lists, PlannedLists):
            for source in lists.plannable.sources.values():
                measured_by = source.stored_facts(lists.measured.index).get("encoder")
                if self.is_outdated(str(measured_by)):
                    warn_outdated(source.reader.root, lists.measured.index)

    def cooked(
        self, source: SavableDataset[Any], factory: BaseCoreDatasetFactory[Any]
    ) -> SavableDataset[Any]:
        """Puts the cooker of a crude source over it."""
        if not issubclass(factory.__sample_type__ or Sample, CrudeSample):
            return source
        return self.encoder.build_cook_crude_sample(
            source,
            worker_config=self.config,
            subflavors=factory.subflavors,
            get_primary_aux=_no_file_store,
            aux={},
        )

    def cook(
        self, source: SavableDataset[Any], subflavors: Mapping[str, Any]
    ) -> SavableDataset[Any]:
        """Puts the first cooker that fits subflavors over crude samples."""
        names = ", ".join(facts.name for facts in source.sources())
        cooker = find_cooker(self.encoder.cookers, subflavors, names)
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
        dataset = encoder.build_encode_sample(dataset, worker_config=self.config)
        if encoder.overrides("postencode_sample") and encoder.packing is None:
            dataset = MapDataset(dataset, self.hook("postencode_sample"))
        return MeasureDataset(dataset, self.hook("sample_length"))

    def build(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        """Puts all hooks over cooked samples, by the builders of the task encoder."""
        encoder = self.encoder
        built = encoder.build_batch(
            encoder.build_encode_sample(dataset, worker_config=self.config),
            worker_config=self.config,
            **batching._asdict(),
        )
        self._check_index(built)
        # Samples as they come from their source have their loss weight.
        return built if built is dataset else LossWeightDataset(built)

    def encoded(self, dataset: SavableDataset[Any]) -> SavableDataset[Any]:
        """Puts `preencode_sample` or `encode_sample` over cooked samples.

        Raises:
            ValueError: The user wrote both.
        """
        encoder = self.encoder
        names = [name for name in ("preencode_sample", "encode_sample") if encoder.overrides(name)]
        if len(names) == 2 and encoder.has_own_encode_sample:
            raise ValueError(
                f"{type(encoder).__name__} has both encode_sample and preencode_sample; write the "
                "first part of encode_sample as preencode_sample and the rest as postencode_sample"
            )
        return MapDataset(dataset, self.hook(names[0])) if names else dataset

    def batched(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        """Puts packing and batching, with the hooks from there on, over encoded samples."""
        encoder = self.encoder
        packs = self._packs(batching)
        self._check_batching(packs)
        if encoder.overrides("postencode_sample") and not packs:
            dataset = MapDataset(dataset, self.hook("postencode_sample"))
        # Where samples are packed or batched by their length, that measures them.
        is_measured = encoder.packing is not None or encoder.batching is not None
        if encoder.overrides("sample_length") and not is_measured:
            dataset = MeasureDataset(dataset, self.hook("sample_length"))
        elif not encoder.overrides("sample_length") and dataset.traits.measures:
            raise ValueError(
                f"a blend has `unit: tokens`, but {type(encoder).__name__} does not say how long a "
                "sample is: give it a method sample_length(self, sample) -> int, or name a stored "
                "index with `lengths` in the blend"
            )
        if packs:
            dataset = self._packed(dataset, batching)
        return self._batched(dataset, batching)

    def _packs(self, batching: Batching) -> bool:
        """Returns whether samples are packed, and checks that what it needs is there."""
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
            packs_per_batch=batching.batch_size or 1,
            worker_config=self.config,
        )

    def _batched(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        encoder, (batch_size, drop_last, _) = self.encoder, batching
        if encoder.batching is not None:
            dataset = self._batched_by_length(dataset, encoder.batching, batching)
        elif encoder.overrides("batch_group_criterion"):
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

    def _check_batching(self, packs: bool) -> None:
        """Checks that `batching` has what it needs, and nothing else makes batches."""
        encoder, name = self.encoder, type(self.encoder).__name__
        if encoder.batching is None:
            return
        if not isinstance(encoder.batching, (Buckets, ModalitySplit)):
            raise TypeError(
                f"{name}.batching={encoder.batching!r}; make it Buckets(max_tokens=...), or "
                "ModalitySplit(group_by, shares=...)"
            )
        if not encoder.overrides("sample_length"):
            raise ValueError(
                f"{name} has `batching`, but does not say how long a sample is: give it a method "
                "sample_length(self, sample) -> int (or a dict of resources)"
            )
        if packs:
            raise ValueError(f"{name} has both `batching` and packing; leave one of them out")
        if encoder.overrides("batch_group_criterion"):
            raise ValueError(
                f"{name} has both `batching` and batch_group_criterion; give the group as "
                f"{type(encoder.batching).__name__}(group_by=...)"
            )

    def _batched_by_length(
        self, dataset: SavableDataset[Any], settings: Buckets | ModalitySplit, batching: Batching
    ) -> SavableDataset[Any]:
        """Puts the stage over samples that `batching` of the encoder asks for."""
        if isinstance(settings, ModalitySplit):
            return self._split(dataset, settings, batching)
        return BucketBatchDataset(
            dataset,
            settings,
            self.hook("batch"),
            sample_length=self.hook("sample_length"),
            batch_size=batching.batch_size,
            drop_last=batching.batch_drop_last,
        )

    def _split(
        self, dataset: SavableDataset[Any], split: ModalitySplit, batching: Batching
    ) -> SavableDataset[Any]:
        if batching.batch_size is None:
            raise ValueError(
                f"{type(self.encoder).__name__} has batching=ModalitySplit(...), but the pipeline "
                "has no batch_size; give the samples of a batch"
            )
        if self.encoder.overrides("encode_batch") and self.hook("encode_batch").is_generator:
            raise ValueError(
                f"{type(self.encoder).__name__}.encode_batch is a generator; with ModalitySplit a "
                "batch must stay one batch, or ranks come out of step"
            )
        if batching.batch_drop_last:
            if split.end == "pad":
                raise ValueError('batch_drop_last=True contradicts end="pad"; give one')
            split = replace(split, end="drop")
        return SplitModalityBatchDataset(
            dataset,
            split,
            batching.batch_size,
            self.hook("batch"),
            sample_length=self.hook("sample_length"),
        )

    def decoder(self, kwargs: dict[str, Any]) -> SampleDecoder | None:
        """Returns the encoder's decoder, or the one that Energon's old keywords describe."""
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


class CookFunction:
    """A cooker bound to its task encoder, as a function of one crude sample."""

    __stateless__ = True

    def __init__(self, encoder: AnyTaskEncoder, cooker: Cooker[Any]) -> None:
        self.encoder = encoder
        self.cooker = cooker
        self.__restore_seeds__ = getattr(cooker.cook, "__restore_seeds__", False)
        self.__failure_tolerance__ = getattr(cooker.cook, "__failure_tolerance__", None)
        called = (cooker.cook, encoder.cook_crude_sample)
        self.__may_draw__ = not all(getattr(f, "__stateless__", False) for f in called)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The user's function, for messages."""
        return self.cooker.cook

    def __call__(self, sample: CrudeSample) -> Sample:
        """Cooks one sample."""
        cooked: Sample = self.encoder.cook_crude_sample(sample, self.cooker, {})
        return cooked


def _no_file_store() -> Any:
    raise NotImplementedError("this version has no file stores: there is no primary one")
