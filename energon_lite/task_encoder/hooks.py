"""Builds stages from the hooks of a task encoder: cooking, encoding, batches, loss weights."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from energon_lite import stages  # those that few pipelines have are imported on first use
from energon_lite.batching.rules import Buckets, ModalitySplit, Packing
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.file_store import DecodeFileStore, FileStore
from energon_lite.core.samples import CrudeSample, SourceInfo, add_source_info, field_of
from energon_lite.core.state import JSON
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.sources.source_factory import BaseCoreDatasetFactory
from energon_lite.stages.batching import BatchDataset, BucketBatchDataset, GroupBatchDataset
from energon_lite.stages.loss_weights import LossWeightDataset
from energon_lite.stages.map import MapDataset, WrappedFunction
from energon_lite.stages.model_inputs import NOT_APPLIED
from energon_lite.stages.token_lengths import MeasureDataset
from energon_lite.task_encoder.cooking import Cooker, check_takes, find_cooker

if TYPE_CHECKING:
    from energon_lite.task_encoder.base import AnyTaskEncoder

logger = logging.getLogger(__name__)
_NO_LENGTH = (
    "does not say how long a sample is: add a method sample_length(self, sample) -> int (or a "
    "dict of resources)"
)


def fingerprint(encoder: Any) -> str:
    """Returns the name of a task encoder with a hash of its code, where the source is available.

    The code is that of the class and of its bases, without the functions that they call.
    """
    measures: Any = getattr(encoder, "_length_function", type(encoder))
    code = blake2b(digest_size=8)
    for part in getattr(measures, "__mro__", (measures,)):
        if part.__module__.partition(".")[0] not in ("energon_lite", "builtins", "typing"):
            with suppress(OSError, TypeError):
                code.update(inspect.getsource(part).encode())
    if hasattr(encoder, "_task_encoder"):  # the hooks of an AugmentTaskEncoder
        code.update(fingerprint(encoder._task_encoder).encode())
    return f"{measures.__module__}:{measures.__qualname__}:{code.hexdigest()}"


class Batching(NamedTuple):
    """The arguments of the user that define batches."""

    batch_size: int | None
    batch_drop_last: bool = False
    packing_buffer_size: int | None = None


class Hooks:
    """Builds the stages for the hooks of a task encoder that differ from the default.

    Args:
        encoder: has the hooks.
        config: seed and error handlers.
    """

    def __init__(self, encoder: AnyTaskEncoder, config: WorkerConfig | None) -> None:
        self.encoder = encoder
        self.config = config

    def hook(self, name: str, function: Any = None) -> UserFunction:
        """Returns the hook `name` as a `UserFunction`."""
        return UserFunction(
            function or getattr(self.encoder, name),
            name=name,
            seed=self.config.seed_offset if self.config else 0,
            config=self.config,
            failure_tolerance=self.encoder.__default_failure_tolerance__,
            takes_columns=name == "batch" and self.encoder._takes_columns,
        )

    def check_index(self, source: Any, index: str) -> None:
        """Warns if an older version of the encoder measured the length index of a source.

        An index of another encoder counts as valid: several encoders may share a tokenizer.
        """
        # The last word of "media metadata, module:Encoder:hash".
        measured_by = str(source.stored_facts(index).get("encoder")).rpartition(" ")[2]
        now = fingerprint(self.encoder)
        if measured_by.rpartition(":")[0] == now.rpartition(":")[0] and measured_by != now:
            logger.warning(
                "%s: the code of the task encoder changed since length index %r was written. "
                "Measure it again with `energon-lite lengths`, unless lengths are the same.",
                source.reader.root,
                index,
            )

    def cooked(
        self,
        source: SavableDataset[Any],
        factory: BaseCoreDatasetFactory[Any],
        aux: Mapping[str, FileStore[Any]] | None = None,
    ) -> SavableDataset[Any]:
        """Puts the cooker over a crude source, with the file stores that it gets."""
        if not factory.is_crude:
            return source
        return self.encoder.build_cook_crude_sample(
            source,
            worker_config=self.config,
            subflavors=factory.subflavors,
            get_primary_aux=factory.as_file_store,
            aux=aux or {},
        )

    def cook(
        self,
        source: SavableDataset[Any],
        subflavors: Mapping[str, Any],
        get_primary: Callable[[], FileStore[Any]],
        aux: Mapping[str, FileStore[Any]],
    ) -> SavableDataset[Any]:
        """Puts the first cooker that matches the subflavors over crude samples.

        Args:
            source: the crude samples.
            subflavors: of the dataset.
            get_primary: returns the file store of the dataset.
            aux: its other file stores, by name.
        """
        names = ", ".join(facts.name for facts in source.sources())
        cooker = find_cooker(self.encoder.cookers, subflavors, names)
        stores = dict(aux)
        config: dict[str, JSON] = {name: dict(store.config()) for name, store in stores.items()}
        if cooker.need_primary:
            stores["primary"] = get_primary()
        if not self.encoder.overrides("cook_crude_sample"):
            arguments = [*stores, "cache"] if cooker.need_cache else list(stores)
            check_takes(cooker, arguments, names)
        if self.encoder.decoder is not None:
            stores = {
                name: DecodeFileStore(store, decoder=self.encoder.decoder)
                for name, store in stores.items()
            }
        cook = self.hook("cook", CookFunction(self.encoder, cooker, stores))
        return MapDataset(source, cook, map_fn_config={"aux": config} if config else None)

    def measured(self, dataset: SavableDataset[Any]) -> MeasureDataset[Any]:
        """Puts the hooks up to `sample_length` over cooked samples.

        Raises:
            ValueError: The encoder has no `sample_length`.
        """
        encoder = self.encoder
        if not encoder.overrides("sample_length"):
            raise ValueError(f"{type(encoder).__name__} {_NO_LENGTH}")
        dataset = encoder.build_encode_sample(dataset, worker_config=self.config)
        if encoder.overrides("postencode_sample") and encoder.packing is None:
            dataset = MapDataset(dataset, self.hook("postencode_sample"))
        return MeasureDataset(dataset, self.hook("sample_length"))

    def build(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        """Puts all hooks over cooked samples, through the builders of the task encoder."""
        encoder = self.encoder
        built = encoder.build_batch(
            encoder.build_encode_sample(dataset, worker_config=self.config),
            worker_config=self.config,
            **batching._asdict(),
        )
        for source, index in built.planned_by():
            self.check_index(source, index)
        # The source itself sets the loss weights of its samples.
        return built if built is dataset else self.weighed(built)

    def weighed(self, dataset: SavableDataset[Any]) -> SavableDataset[Any]:
        """Puts the loss weights over batches.

        Raises:
            ValueError: Packs become arguments of a model, whose own loss does not know the weights.
        """
        packing, asked = self.encoder.packing, self.encoder.add_loss_weights
        if packing is not None and packing.output == "huggingface" and asked is None:
            found = {facts.loss_weight for facts in dataset.sources()} - {0, 1}
            if found or packing.loss != "token":
                text = f"loss={packing.loss!r:.80}, weights of sources: {sorted(found)!s:.200}"
                raise ValueError(f"There are loss weights besides 0 and 1 ({text}), {NOT_APPLIED}")
        return LossWeightDataset(dataset, asked)

    def encoded(self, dataset: SavableDataset[Any]) -> SavableDataset[Any]:
        """Puts `preencode_sample` or `encode_sample` over cooked samples.

        Raises:
            ValueError: The encoder has both.
        """
        encoder = self.encoder
        names = [name for name in ("preencode_sample", "encode_sample") if encoder.overrides(name)]
        # A `DefaultTaskEncoder` with an `encoded_sample_type` has an encode_sample of the library.
        module = str(getattr(encoder.encode_sample, "__module__", ""))
        if len(names) == 2 and not module.startswith("energon_lite."):
            raise ValueError(
                f"{type(encoder).__name__} has both encode_sample and preencode_sample; write the "
                "first part of encode_sample as preencode_sample and the rest as postencode_sample"
            )
        return MapDataset(dataset, self.hook(names[0])) if names else dataset

    def batched(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        """Puts packing and batching, with the hooks from there on, over encoded samples."""
        has = self.encoder.overrides
        packs = self.encoder.packing is not None or batching.packing_buffer_size is not None
        self._check(dataset, batching)
        if has("postencode_sample") and not packs:
            dataset = MapDataset(dataset, self.hook("postencode_sample"))
        # Packing and `batching` measure the samples themselves.
        is_measured = self.encoder.packing is not None or self.encoder.batching is not None
        if has("sample_length") and not is_measured:
            dataset = MeasureDataset(dataset, self.hook("sample_length"))
        if packs:
            dataset = self._packed(dataset, batching)
        batches = self._batches(dataset, batching)
        if batches is None:
            return dataset
        return MapDataset(batches, self.hook("encode_batch")) if has("encode_batch") else batches

    def _check(self, dataset: SavableDataset[Any], batching: Batching) -> None:
        """Checks that packing and batching have what they need, and do not contradict."""
        encoder, name, has = self.encoder, type(self.encoder).__name__, self.encoder.overrides
        packing, lists = encoder.packing, encoder.batching
        batch_size, drop_last, buffer = batching
        for setting, value, kinds, example in (
            ("packing", packing, Packing, "Packing(capacity=...)"),
            ("batching", lists, (Buckets, ModalitySplit), "Buckets(max_tokens=...), or "
             "ModalitySplit(group_by, shares=...)"),
        ):  # fmt: skip
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"{name}.{setting}={value!r}; make it {example}")
        problems: dict[str, bool] = {}
        if packing is not None:
            problems = {
                f"{name} has `packing`, but {_NO_LENGTH}": not has("sample_length"),
                f"{name} has both `packing` and select_samples_to_pack; remove one of them": has(
                    "select_samples_to_pack"
                ),
                'output="huggingface" makes a dict of a batch of packs; pass batch_size, the '
                "number of packs": packing.output == "huggingface" and batch_size is None,
            }
        elif buffer is not None:
            problems = {
                f"packing_buffer_size={buffer}, but {name} has no {hook}. Give it one, or `packing "
                "= Packing(capacity=...)` and sample_length(sample)": not has(hook)
                for hook in ("select_samples_to_pack", "pack_selected_samples")
            }
        if lists is not None:
            problems |= {
                f"{name} has `batching`, but {_NO_LENGTH}": not has("sample_length"),
                f"{name} has both `batching` and packing; remove one of them": buffer is not None
                or packing is not None,
                f"{name} has both `batching` and batch_group_criterion; set the group by "
                f"{type(lists).__name__}(group_by=...)": has("batch_group_criterion"),
            }
        if isinstance(lists, ModalitySplit):
            makes_several = has("encode_batch") and self.hook("encode_batch").is_generator
            problems |= {
                f"{name} has batching=ModalitySplit(...), but the pipeline has no batch_size; pass "
                "the number of samples of a batch": batch_size is None,
                f"{name}.encode_batch is a generator; with ModalitySplit a batch must stay one "
                "batch, or ranks come out of step": makes_several,
                'batch_drop_last=True contradicts end="pad"; remove one of them': drop_last
                and lists.end == "pad",
            }
        if dataset.traits.measures:
            problems[
                f"a blend has `unit: tokens`, but {name} {_NO_LENGTH}, or name a stored index with "
                "`lengths` in the blend"
            ] = not has("sample_length")
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(problem)

    def _packed(self, dataset: SavableDataset[Any], batching: Batching) -> SavableDataset[Any]:
        encoder, packing = self.encoder, self.encoder.packing
        # Which of a sample's tokens count, and how much, changes what a resumed run returns.
        loss = packing.loss if packing and isinstance(packing.loss, str) else "function"
        encodes = encoder.overrides("postencode_sample")
        return stages.packing_stage.PackingDataset(
            dataset,
            batching.packing_buffer_size,
            packing or self.hook("select_samples_to_pack"),
            self.hook("pack_selected_samples"),
            sample_length=self.hook("sample_length") if packing else None,
            sample_encoder=self.hook("postencode_sample") if encodes else None,
            slicer=encoder.slice_sample,
            packer_config={"loss": loss} if packing else None,
            pack_columns=encoder._pack_columns if batching.batch_size else None,
            packs_per_batch=batching.batch_size or 1,
            worker_config=self.config,
        )

    def _batches(
        self, dataset: SavableDataset[Any], batching: Batching
    ) -> SavableDataset[Any] | None:
        """Returns the stage that batches samples; None for single samples."""
        batch_size, drop_last, _ = batching
        lists, batch = self.encoder.batching, self.hook("batch")
        if isinstance(lists, Buckets):
            return BucketBatchDataset(
                dataset, lists, batch, sample_length=self.hook("sample_length"),
                batch_size=batch_size, drop_last=drop_last,
            )  # fmt: skip
        if lists is not None:
            assert batch_size is not None
            split = replace(lists, end="drop") if drop_last else lists
            return stages.modality_batches.SplitModalityBatchDataset(
                dataset, split, batch_size, batch, sample_length=self.hook("sample_length")
            )
        if self.encoder.overrides("batch_group_criterion"):
            group = self.hook("batch_group_criterion")
            return GroupBatchDataset(dataset, batch_size, group, batch, drop_last=drop_last)
        if batch_size is None:
            return None
        return BatchDataset(dataset, batch_size, batch, drop_last=drop_last)

    def decoder(self, kwargs: dict[str, Any]) -> SampleDecoder | None:
        """Returns the decoder of the encoder, or the one that Energon's old keywords describe."""
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


class CookFunction(WrappedFunction):
    """A cooker, bound to its task encoder, as a function of one crude sample."""

    def __init__(
        self, encoder: AnyTaskEncoder, cooker: Cooker[Any], stores: dict[str, FileStore[Any]]
    ) -> None:
        super().__init__(cooker.cook)
        self.encoder = encoder
        self.cooker = cooker
        self.stores = stores
        called = (cooker.cook, encoder.cook_crude_sample)
        self.__may_draw__ = not all(getattr(f, "__stateless__", False) for f in called)
        self.__stateless__ = True
        self._is_generator = inspect.isgeneratorfunction(inspect.unwrap(cooker.cook))

    def __call__(self, sample: CrudeSample) -> Any:
        """Cooks one sample; a generator of several has the same sources as one sample would."""
        before = sample.get("__sources__") or ()
        cooked = self.encoder.cook_crude_sample(sample, self.cooker, self.stores)
        if self._is_generator:
            return map(partial(_with_late_sources, sample, before), cooked)
        return _with_late_sources(sample, before, cooked)


def _with_late_sources(crude: CrudeSample, before: tuple[SourceInfo, ...], cooked: Any) -> Any:
    """Appends what `store.get(key, crude)` added after the cooker had copied the sources.

    So `Sample(**basic_sample_keys(crude), image=store.get(key, crude))` has the source of its
    image, too. A cooked sample without sources stays so.
    """
    after, found = crude.get("__sources__") or (), field_of(cooked, "__sources__")
    if after is before or after is found or found is None:
        return cooked
    return add_source_info(cooked, *[s for s in after[len(before) :] if s not in found])
