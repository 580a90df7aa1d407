"""The user's hooks: what happens to a sample, and to a batch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from energon_lite.batching.rules import Buckets, ModalitySplit, Packing
from energon_lite.core.hidden_fields import constructor_names
from energon_lite.core.samples import CrudeSample
from energon_lite.core.stacking import LOSS_WEIGHT, SERVICE_FIELDS, generic_batch
from energon_lite.core.stream_context import current_batch_index, current_sample_index
from energon_lite.core.user_function import DEFAULT_FAILURE_TOLERANCE, stateless
from energon_lite.names.energon_modules import energon_names
from energon_lite.stages.packing.pack_samples import pack_samples, slice_sample
from energon_lite.stages.packing.packed_sample import PackedBatch, PackedSample
from energon_lite.stages.packing.selected import PackedSamplesOutput
from energon_lite.storage.decoding import SampleDecoder
from energon_lite.task_encoder.builders import PipelineBuilders
from energon_lite.task_encoder.cooking import Cooker

T_sample = TypeVar("T_sample")
T_encoded_sample = TypeVar("T_encoded_sample")
T_raw_batch = TypeVar("T_raw_batch")
T_batch = TypeVar("T_batch")

__getattr__ = energon_names(__name__)


class TaskEncoder(PipelineBuilders, Generic[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """What a task does to its samples. Override the hooks that you need.

    Any hook may raise `SkipSample`. `encode_sample`, `preencode_sample`, `batch` and `encode_batch`
    may be generator functions and give any number of items. Mark a hook `@stateless` if its result
    depends on its input only: then its items can be made again, which `restore_sample` and batches
    by group need. A marked hook takes random numbers from `sample_rng()`, or is marked
    `@stateless(restore_seeds=True)`. Hooks that are not marked may draw from the global generators:
    these are seeded for them, so that streams differ and a resumed run draws the same.

    Attributes:
        cookers: make typed samples of crude ones; the first that matches a dataset is used.
        decoder: how the parts of samples become values; None leaves bytes.
        packing: how encoded samples share a sequence, by their `sample_length`; None for not.
        batching: how samples share a batch, by their `sample_length`; None for `batch_size` samples
            that follow each other.
    """

    cookers: ClassVar[Sequence[Cooker[Any]]] = ()
    decoder: SampleDecoder | None = SampleDecoder()
    packing: Packing | None = None
    batching: Buckets | ModalitySplit | None = None

    __default_failure_tolerance__: ClassVar[int] = DEFAULT_FAILURE_TOLERANCE

    @stateless
    def cook_crude_sample(
        self, sample: CrudeSample, cooker: Cooker[Any], aux: dict[str, Any]
    ) -> T_sample:
        """Makes a typed sample of a crude one."""
        cooked: T_sample = cooker.cook(sample, **aux)
        return cooked

    @stateless
    def preencode_sample(self, sample: T_sample) -> Any:
        """Does, instead of `encode_sample`, what is needed before samples are chosen for a pack."""
        return sample

    @stateless
    def encode_sample(self, sample: T_sample) -> Any:
        """Makes a sample that can be batched."""
        return sample

    @stateless
    def postencode_sample(self, sample: Any) -> T_encoded_sample:
        """Does the rest of the encoding, of samples in a pack, or right before batching."""
        return sample  # type: ignore[no-any-return]

    def sample_length(self, sample: T_encoded_sample) -> int | dict[str, int]:
        """Returns the tokens of an encoded sample, or a dict of resources with an entry "tokens".

        It is asked by packing, by `batching`, by blends with `unit: tokens`, and for the tokens in
        `loader.stats()`. With `preencode_sample` it gets what that gave: the length must be known
        before the rest is loaded.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sample_length")

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]] | PackedSamplesOutput:
        """Chooses packs from a full buffer, if `packing` does not say how.

        Samples that are in no pack, nor in the `pushback` of a `PackedSamplesOutput`, are left out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no select_samples_to_pack")

    @stateless
    def pack_selected_samples(self, samples: list[T_encoded_sample]) -> Any:
        """Makes one sample of those in a pack: a `PackedSample`."""
        if self.packing is None:
            raise NotImplementedError(f"{type(self).__name__} has no pack_selected_samples")
        return pack_samples(samples, self.packing)

    def slice_sample(self, sample: T_encoded_sample, start: int, stop: int) -> T_encoded_sample:
        """Cuts tokens `start` to `stop` out of a sample that is too long for a pack."""
        cut: T_encoded_sample = slice_sample(sample, start, stop)
        return cut

    @stateless
    def batch_group_criterion(self, sample: T_encoded_sample) -> tuple[Hashable, int | None]:
        """Returns the group of a sample, and the group's batch size or None."""
        del sample
        return None, None

    @stateless
    def batch(self, samples: list[T_encoded_sample]) -> T_raw_batch:
        """Makes a batch: tensors are padded and stacked, the rest is listed; packs are rows."""
        batched: T_raw_batch = self._batched(samples)
        return batched

    def _batched(self, samples: list[Any]) -> Any:
        if isinstance(samples[0], PackedSample):
            return PackedBatch.from_packs(samples, self.packing)
        return generic_batch(samples)

    @stateless
    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Makes of a batch what the training loop gets."""
        return batch  # type: ignore[return-value]

    @property
    def current_batch_index(self) -> int:
        """The number of the batch being made, over the whole run; the same on any topology."""
        return current_batch_index()

    @property
    def current_sample_index(self) -> int:
        """The number of the current sample, over the whole run; the same on any topology."""
        return current_sample_index()

    def overrides(self, hook: str) -> bool:
        """Whether a hook does more than the default; also one that is set on the instance."""
        return _function_of(self, hook) is not getattr(TaskEncoder, hook)

    @property
    def has_own_encode_sample(self) -> bool:
        """Whether the user wrote an `encode_sample`, beside that of `DefaultTaskEncoder`."""
        return _function_of(self, "encode_sample") is not TaskEncoder.encode_sample


AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]

# The methods that a pipeline calls on samples and batches, and the settings beside them.
HOOKS = frozenset(
    name
    for name, value in vars(TaskEncoder).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "overrides"
)
SETTINGS = frozenset({"cookers", "decoder", "packing", "batching"})


class DefaultTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """Passes samples on as they are, or as instances of the given types, by field names.

    Args:
        encoded_sample_type: dataclass, NamedTuple or `dict` for encoded samples.
        raw_batch_type: the same for what `batch` gives.
        batch_type: the same for what `encode_batch` gives; without `raw_batch_type` it serves for
            that as well.
    """

    # Also of a subclass whose `__init__` does not call this one.
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
        """Makes an `encoded_sample_type` of a sample."""
        return as_type(sample, self._encoded_sample_type)

    @stateless
    def batch(self, samples: list[T_encoded_sample]) -> T_raw_batch:
        """Makes a batch of the samples' type, or a `raw_batch_type`."""
        kind: Any = self._raw_batch_type
        is_packed = isinstance(samples[0], PackedSample)
        if hasattr(kind, "from_samples") and not is_packed:
            batched: T_raw_batch = kind.from_samples(samples)
        else:
            batched = as_type(self._batched(samples), kind)
        return batched

    @stateless
    def encode_batch(self, batch: T_raw_batch) -> T_batch:
        """Makes a `batch_type` of a batch."""
        encoded: T_batch = as_type(batch, self._batch_type)
        return encoded

    def overrides(self, hook: str) -> bool:
        """Whether a hook does more than the default: a subclass has its own, or a type is set."""
        types = {"encode_sample": self._encoded_sample_type, "encode_batch": self._batch_type}
        if hook in types and _function_of(self, hook) is getattr(DefaultTaskEncoder, hook):
            return types[hook] is not None
        return super().overrides(hook)

    @property
    def has_own_encode_sample(self) -> bool:
        """Whether the user wrote an `encode_sample`."""
        return _function_of(self, "encode_sample") is not DefaultTaskEncoder.encode_sample


class AugmentTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """Has all hooks and settings of another task encoder; a subclass overrides what it changes.

    In an override `super()` calls the hook of the other one. What the other one marks `@stateless`
    is so here; an own override is marked anew.

    Args:
        task_encoder: the other one.

    Raises:
        TypeError: The other one overrides a builder of pipelines, which would build its own.
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
        """Whether a hook does more than the default, here or in the other task encoder."""
        if getattr(self, hook) == getattr(self._task_encoder, hook):
            return self._task_encoder.overrides(hook)
        return hook in vars(self) or (
            getattr(type(self), hook) is not getattr(AugmentTaskEncoder, hook)
        )

    @property
    def has_own_encode_sample(self) -> bool:
        """Whether the user wrote an `encode_sample`, here or in the other task encoder."""
        other = self._task_encoder
        return self.encode_sample != other.encode_sample or other.has_own_encode_sample


def _of_the_other(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(TaskEncoder, name))
    def hook(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self._task_encoder, name)(*arguments, **named)

    hook.__doc__ = f"Calls `{name}` of the other task encoder."
    return hook


for _name in HOOKS:
    setattr(AugmentTaskEncoder, _name, _of_the_other(_name))


def _function_of(encoder: AnyTaskEncoder, hook: str) -> Any:
    """Returns what is called for a hook, without the encoder that it is bound to."""
    found = getattr(encoder, hook)
    return getattr(found, "__func__", found)


def as_type(value: Any, target: type[Any] | None) -> Any:
    """Makes a `target` of the fields of `value`; the value itself for None, or if it is one.

    Args:
        value: dataclass, NamedTuple or dict.
        target: dataclass, NamedTuple or `dict`; gets the fields that it has, or all if a dict.

    Raises:
        TypeError: `value` lacks a field that `target` needs; names it.
    """
    if target is None or isinstance(value, target):
        return value
    fields = _fields_of(value)
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


def _fields_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in constructor_names(type(value))}
    raise TypeError(f"{type(value).__name__} has no fields; it must be dataclass, NamedTuple, dict")


def _names_of(target: type[Any]) -> tuple[str, ...]:
    if dataclasses.is_dataclass(target):
        return constructor_names(target)
    if hasattr(target, "_fields"):
        return tuple(target._fields)
    raise TypeError(f"{target.__name__} must be a dataclass, a NamedTuple or dict")
