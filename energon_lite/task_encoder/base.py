"""Task encoders: the user's hooks on samples and batches."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from energon_lite.batching.rules import Buckets, ModalitySplit, Packing
from energon_lite.core.cache_pool import CachePool, current_cache_pool
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.file_store import PrimaryFileStore
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.samples import CrudeSample
from energon_lite.core.stacking import LOSS_WEIGHT, SERVICE_FIELDS, Layout, generic_batch, layout_of
from energon_lite.core.stream_context import current_batch_index, current_sample_index
from energon_lite.core.user_function import DEFAULT_FAILURE_TOLERANCE, stateless
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.names.energon_modules import energon_names
from energon_lite.stages.model_inputs import model_inputs
from energon_lite.stages.packed_sample import (
    PackColumns,
    PackedBatch,
    PackedSample,
    pack_samples,
    slice_sample,
)
from energon_lite.task_encoder.builders import PipelineBuilders
from energon_lite.task_encoder.cooking import Cooker

if TYPE_CHECKING:
    from energon_lite.stages.pack_lists import PackedSamplesOutput

T_sample = TypeVar("T_sample")
T_encoded_sample = TypeVar("T_encoded_sample")
T_raw_batch = TypeVar("T_raw_batch")
T_batch = TypeVar("T_batch")

__getattr__ = energon_names(__name__)


class _LoaderPool:
    """The cache pool of the loader that runs the hook; a `NoCachePool` where it has none.

    An instance may have an attribute of the same name.
    """

    def __get__(self, instance: object, owner: type) -> CachePool:
        return current_cache_pool()


class TaskEncoder(PipelineBuilders, Generic[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """The processing of samples for a task. Override the hooks that you need.

    Any hook may raise `SkipSample`. `encode_sample`, `preencode_sample`, `batch` and `encode_batch`
    may be generator functions and yield any number of items. Mark a hook `@stateless` if its result
    depends only on its input: then its items can be re-created, which `restore_sample` and batches
    by group need. A marked hook takes random numbers from `sample_rng()`, or is marked
    `@stateless(restore_seeds=True)`. Hooks that are not marked may draw from the global random
    generators, which are seeded so that streams differ and a resumed run draws the same numbers.

    Attributes:
        cookers: convert crude samples to typed samples; a dataset uses the first that matches.
        decoder: decodes the parts of samples; None leaves them as bytes.
        packing: how encoded samples are packed into sequences, by their `sample_length`; None for
            no packing.
        batching: how samples are batched by their `sample_length`; None for `batch_size`
            consecutive samples.
        add_loss_weights: whether batches that are dicts get an entry `loss_weight`, and the labels
            of packs for a Hugging Face model carry the loss weights. False for no weights in both.
            By default neither has them, with a warning where there are weights other than 1, or an
            error for a Hugging Face model.
    """

    cookers: ClassVar[Sequence[Cooker[Any]]] = ()
    decoder: SampleDecoder | None = SampleDecoder()
    packing: Packing | None = None
    batching: Buckets | ModalitySplit | None = None
    add_loss_weights: bool | None = None

    __default_failure_tolerance__: ClassVar[int] = DEFAULT_FAILURE_TOLERANCE

    @stateless
    def cook_crude_sample(
        self, sample: CrudeSample, cooker: Cooker[Any], aux: dict[str, Any]
    ) -> T_sample:
        """Converts a crude sample to a typed sample.

        Args:
            sample: the crude sample.
            cooker: the cooker of its dataset.
            aux: the file stores that the cooker gets, by name; `primary` if it needs that one.
                With `need_cache` the cooker also gets `cache`.
        """
        if "primary" in aux:
            primary = PrimaryFileStore(aux["primary"], current_key=sample["__key__"])
            aux = {**aux, "primary": primary}
        if cooker.need_cache:
            aux = {**aux, "cache": current_cache_pool()}
        cooked: T_sample = cooker.cook(sample, **aux)
        return cooked

    @stateless
    def preencode_sample(self, sample: T_sample) -> Any:
        """Replaces `encode_sample` for the part that is needed before samples are packed."""
        return sample

    @stateless
    def encode_sample(self, sample: T_sample) -> Any:
        """Encodes a sample, so that it can be batched."""
        return sample

    @stateless
    def postencode_sample(self, sample: Any) -> T_encoded_sample:
        """Completes the encoding of the samples of a pack, or right before batching."""
        return sample  # type: ignore[no-any-return]

    def sample_length(self, sample: T_encoded_sample) -> int | dict[str, int]:
        """Returns the tokens of an encoded sample, or a dict of resources with an entry "tokens".

        Packing, `batching`, blends with `unit: tokens` and the token counts of `loader.stats()`
        call it. With `preencode_sample` it gets the result of that hook, as the length must be
        known before the rest is loaded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sample_length")

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]] | PackedSamplesOutput:
        """Selects packs from a full buffer, if `packing` is None.

        Drops samples that are in no pack, nor in the `pushback` of a `PackedSamplesOutput`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no select_samples_to_pack")

    @stateless
    def pack_selected_samples(self, samples: list[T_encoded_sample]) -> Any:
        """Joins the samples of a pack into one `PackedSample`."""
        if self.packing is None:
            raise NotImplementedError(f"{type(self).__name__} has no pack_selected_samples")
        return pack_samples(samples, self.packing)

    def slice_sample(self, sample: T_encoded_sample, start: int, stop: int) -> T_encoded_sample:
        """Returns tokens `start` to `stop` of a sample that is too long for a pack."""
        cut: T_encoded_sample = slice_sample(sample, start, stop)
        return cut

    @stateless
    def batch_group_criterion(self, sample: T_encoded_sample) -> tuple[Hashable, int | None]:
        """Returns the group of a sample, and the group's batch size or None."""
        del sample
        return None, None

    @stateless
    def batch(self, samples: list[T_encoded_sample]) -> T_raw_batch:
        """Collates samples: pads and stacks tensors, lists other values; packs become rows."""
        batched: T_raw_batch = self._batched(samples)
        return batched

    def _batched(self, samples: list[Any] | Columns) -> Any:
        if isinstance(samples, Columns):
            batch = samples.batch()
        elif isinstance(samples[0], PackedSample):
            batch = PackedBatch.from_packs(samples, self.packing)
        else:
            return generic_batch(samples)
        if self.packing is None or self.packing.output != "huggingface":
            return batch
        try:
            return model_inputs(batch, add_loss_weights=self.add_loss_weights)
        except ValueError as error:  # of settings, not of these samples
            raise FatalSampleError(str(error)) from error

    @stateless
    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Encodes a batch for the training loop."""
        return batch  # type: ignore[return-value]

    @property
    def current_batch_index(self) -> int:
        """The number of the current batch in the whole run; the same on any topology."""
        return current_batch_index()

    @property
    def current_sample_index(self) -> int:
        """The number of the current sample in the whole run; the same on any topology."""
        return current_sample_index()

    cache = _LoaderPool()

    def overrides(self, hook: str) -> bool:
        """Returns whether a hook differs from the default, in the class or on the instance."""
        return _function_of(self, hook) is not getattr(TaskEncoder, hook)

    @property
    def _takes_columns(self) -> bool:
        """Whether `batch` is the library's own, which takes `Columns`, too."""
        return _function_of(self, "batch") in (TaskEncoder.batch, DefaultTaskEncoder.batch)

    @property
    def _pack_columns(self) -> Callable[[list[list[Any]]], PackColumns] | None:
        """Makes several packs at once, if `pack_selected_samples` is the library's own."""
        hook: Any = self.pack_selected_samples
        is_own = _function_of(self, "pack_selected_samples") is TaskEncoder.pack_selected_samples
        return functools.partial(PackColumns, packing=hook.__self__.packing) if is_own else None


AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]

# The methods that a pipeline calls on samples and batches, and the settings beside them.
HOOKS = frozenset(
    name
    for name, value in vars(TaskEncoder).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "overrides"
)
SETTINGS = frozenset({"cookers", "decoder", "packing", "batching", "add_loss_weights"})


class DefaultTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """Returns samples unchanged, or converted to other types by field names.

    Args:
        encoded_sample_type: dataclass, NamedTuple or `dict` for encoded samples.
        raw_batch_type: the same for the result of `batch`; by default `batch_type`.
        batch_type: the same for the result of `encode_batch`.
    """

    # Class attributes, as the `__init__` of a subclass may not call this one.
    _encoded_sample_type: type[Any] | None = None
    _raw_batch_type: type[Any] | None = None
    _batch_type: type[Any] | None = None

    def __init__(
        self,
        *,
        encoded_sample_type: type[T_encoded_sample] | None = None,
        raw_batch_type: type[T_raw_batch] | None = None,
        batch_type: type[T_batch] | None = None,
    ) -> None:
        self._encoded_sample_type = encoded_sample_type
        self._raw_batch_type = raw_batch_type or batch_type
        self._batch_type = batch_type

    @stateless
    def encode_sample(self, sample: T_sample) -> Any:
        """Converts a sample to `encoded_sample_type`."""
        return as_type(sample, self._encoded_sample_type)

    @stateless
    def batch(self, samples: list[T_encoded_sample]) -> T_raw_batch:
        """Collates samples to a batch of their type, or of `raw_batch_type`."""
        kind: Any = self._raw_batch_type
        has_own = hasattr(kind, "from_samples")
        if has_own:
            samples = samples_of(samples)
        if has_own and not isinstance(samples[0], PackedSample):
            batched: T_raw_batch = kind.from_samples(samples)
        else:
            batched = as_type(self._batched(samples), kind)
        return batched

    @stateless
    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Converts a batch to `batch_type`."""
        encoded: T_batch = as_type(batch, self._batch_type)
        return encoded

    def overrides(self, hook: str) -> bool:
        """Returns whether a hook differs from the default: by a subclass, or by a type."""
        types = {"encode_sample": self._encoded_sample_type, "encode_batch": self._batch_type}
        if hook in types and _function_of(self, hook) is getattr(DefaultTaskEncoder, hook):
            return types[hook] is not None
        return super().overrides(hook)


class AugmentTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """Wraps another task encoder; a subclass overrides the hooks that it changes.

    In an override, `super()` calls the hook of the wrapped encoder. Hooks of the wrapped encoder
    that are marked `@stateless` are so here; an override must be marked again.

    Args:
        task_encoder: the encoder to wrap.

    Raises:
        TypeError: The encoder overrides a builder of pipelines, which would ignore the wrapper.
    """

    def __init__(self, task_encoder: AnyTaskEncoder) -> None:
        self._task_encoder = task_encoder
        for name in sorted(name for name in vars(PipelineBuilders) if name.startswith("build_")):
            if task_encoder.overrides(name):
                raise TypeError(
                    f"{type(task_encoder).__name__} overrides {name}, which cannot be augmented: "
                    f"derive {type(self).__name__} from it instead"
                )
        for name in sorted({*HOOKS, *SETTINGS, "__default_failure_tolerance__"}):
            if getattr(type(self), name) is getattr(AugmentTaskEncoder, name):
                setattr(self, name, getattr(task_encoder, name))

    def overrides(self, hook: str) -> bool:
        """Returns whether a hook differs from the default, here or in the wrapped encoder."""
        if getattr(self, hook) == getattr(self._task_encoder, hook):
            return self._task_encoder.overrides(hook)
        return hook in vars(self) or (
            getattr(type(self), hook) is not getattr(AugmentTaskEncoder, hook)
        )


def _of_wrapped(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(TaskEncoder, name))
    def hook(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self._task_encoder, name)(*arguments, **named)

    hook.__doc__ = f"Calls `{name}` of the wrapped task encoder."
    return hook


for _name in HOOKS:
    setattr(AugmentTaskEncoder, _name, _of_wrapped(_name))


def _function_of(encoder: AnyTaskEncoder, hook: str) -> Any:
    """Returns the function of a hook, not bound to its encoder."""
    found = getattr(encoder, hook)
    return getattr(found, "__func__", found)


def as_type(value: Any, target: type[Any] | None) -> Any:
    """Converts a value to another type by field names; returns it if it has that type already.

    Args:
        value: dataclass, NamedTuple or dict.
        target: dataclass, NamedTuple or `dict`, which takes all fields; None for no conversion.

    Raises:
        TypeError: `value` lacks a field that `target` requires; names the field.
    """
    if target is None or isinstance(value, target):
        return value
    fields = value
    if not isinstance(value, dict):
        fields = {name: getattr(value, name) for name in _names_of(type(value))}
    if issubclass(target, dict):
        found = fields.get(LOSS_WEIGHT)
        weights = found if isinstance(found, list) else [found]
        is_one = all(weight in (None, 1.0) for weight in weights)
        return target({k: v for k, v in fields.items() if k != LOSS_WEIGHT or not is_one})
    names = _names_of(target)
    wanted = {name: fields[name] for name in names if name in fields}
    try:
        return target(**wanted)
    except TypeError as error:
        missing = [name for name in names if name not in fields and name not in SERVICE_FIELDS]
        raise TypeError(
            f"{type(value).__name__} does not fill {target.__name__} ({error}); it has "
            f"{', '.join(fields)}" + (f" and lacks {', '.join(missing)}" if missing else "")
        ) from None


def _names_of(kind: type[Any]) -> tuple[str, ...]:
    layout, names = layout_of(kind)
    if layout in (Layout.TENSOR, Layout.VALUE):
        raise TypeError(f"{kind.__name__} has no fields; make it a dataclass, a NamedTuple or dict")
    return names


_METHODS = HOOKS | {name for name in vars(PipelineBuilders) if name.startswith("build_")}

# `encode_samples` is similar to `encode_sample`, `encode_image` is not.
_SIMILAR = 0.9
# Energon calls these methods; this library does not, so an override would have no effect.
_NOT_CALLED = {
    "_load_dataset": "override build_cook_crude_sample, or build_train_datasets",
    "_is_overridden": "override `overrides`",
    "cache": "pass cache_pool to the loader",
}


def checked_encoder(encoder: AnyTaskEncoder | None) -> AnyTaskEncoder:
    """Returns the task encoder, by default `DefaultTaskEncoder()`; warns of misspelt hooks.

    Raises:
        TypeError: The object is no task encoder, or overrides a method that is never called.
    """
    value: Any = encoder
    if value is None:
        return DefaultTaskEncoder()
    if isinstance(value, type):
        raise TypeError(
            f"task_encoder={value.__name__} is a class; pass an instance: {value.__name__}()"
        )
    if not isinstance(value, TaskEncoder):
        raise TypeError(
            f"task_encoder={value!r:.80} is no task encoder; derive {type(value).__name__} from "
            "DefaultTaskEncoder"
        )
    own = {
        name: attribute
        for cls in reversed(type(value).__mro__)
        if not cls.__module__.startswith("energon_lite.")
        for name, attribute in vars(cls).items()
    }
    for name, instead in _NOT_CALLED.items():
        if name in own:
            raise TypeError(f"{type(value).__name__} has {name}, which is not called: {instead}")
    for name, attribute in own.items():
        if name.startswith("_") or name in _METHODS or name in SETTINGS:
            continue
        known = sorted((_METHODS if callable(attribute) else SETTINGS) - own.keys())
        for meant in difflib.get_close_matches(name.lower(), known, n=1, cutoff=_SIMILAR):
            warnings.warn(
                f"{type(value).__name__} has {name!r}, which is not called; did you mean "
                f"{meant!r}?",
                UserWarning,
                stacklevel=4,
            )
    return value
