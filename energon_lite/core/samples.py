"""Types of samples and batches, and the service fields that travel with each."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from os import PathLike
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import Self

from energon_lite.core.edataclass import (
    ExtendableDataclassMixin,
    PinMemoryMixin,
    edataclass,
    has_own,
)
from energon_lite.core.keys import leaves
from energon_lite.core.stacking import SERVICE_FIELDS, batch_column, hide_field, layout_of
from energon_lite.core.state import RestoreKey
from energon_lite.names.energon_modules import Described

T = TypeVar("T")

# The first of these that an encoded sample has holds its images.
IMAGE_FIELDS = ("images", "image", "pixel_values")


class SourceInfo(NamedTuple):
    """The place from which the bytes of a sample come.

    A NamedTuple, because one is made for each sample read: immutable, hashable, 0.3 µs.

    Attributes:
        dataset_path: Folder or file of the dataset.
        index: Position of the sample in the dataset (or the entry's name in a file store).
        shard_name: The tar file, relative to `dataset_path`; empty where there is none.
        file_names: Names of the members that were read.
    """

    dataset_path: str | PathLike[str]
    index: int | str | None  # type: ignore[assignment]
    shard_name: str
    file_names: tuple[str, ...]


# First entry of the restore key of a batch that only fills a step of its rank.
PADDING = "padding"


def _flat(value: Any) -> Any:
    """Takes lists out of a list: batches that were mixed into one have a list for each."""
    if not isinstance(value, list) or not any(isinstance(entry, list) for entry in value):
        return value
    entries = (entry if isinstance(entry, list) else [entry] for entry in value)
    return _flat([inner for entry in entries for inner in entry])


class RowWeightsMixin:
    """Provides `loss_weight`, `valid` and `source_names`; own fields of these names win.

    Service fields of a batch may be made when the first of them is looked at, by a function that
    returns them. So most training loops do not wait for them.
    """

    __slots__ = ("_later",)
    _later: Callable[[], Mapping[str, Any]]

    def __getattr__(self, name: str) -> Any:
        """Returns `loss_weight`, float32, or `valid`, bool: (n,) for a batch, () for a sample.

        It is on the device of the first tensor among the fields. `source_names` is a list: the
        name of the source of each sample, by the restore key.
        """
        if name in SERVICE_FIELDS:
            _make_rest(self)
            return object.__getattribute__(self, name)
        # No property: a subclass with a field of this name would take it for the field's default.
        if name == "loss_weight":
            weights = getattr(self, "__loss_weight__", None)
            if weights is None:
                keys = self.__key__
                weights = [1.0] * len(keys) if isinstance(keys, list) else 1.0
            return torch.tensor(_flat(weights), dtype=torch.float32, device=_tensor_device(self))
        if name == "valid":
            shape = (len(self.__key__),) if isinstance(self.__key__, list) else ()
            is_valid = self.__restore_key__[:1] != (PADDING,)
            return torch.full(shape, is_valid, device=_tensor_device(self))
        if name == "source_names":
            return [leaf[0] if leaf else "" for leaf in leaves(self.__restore_key__)]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute, also a field that was left for later."""
        if name in SERVICE_FIELDS:
            _make_rest(self)
        object.__delattr__(self, name)


def _tensor_device(value: Any) -> torch.device | str:
    """Returns the device of the first tensor among the fields; the CPU without any."""
    names = [name for name in type(value).__dataclass_fields__ if name not in SERVICE_FIELDS]
    parts = (object.__getattribute__(value, name) for name in names if has_own(value, name))
    return next((part.device for part in parts if isinstance(part, torch.Tensor)), "cpu")


def _make_rest(value: Any) -> None:
    """Makes the service fields that were left for later, but for those that were set since."""
    later = getattr(value, "_later", dict)
    for field, found in later().items():
        if not has_own(value, field):
            object.__setattr__(value, field, found)
    with suppress(AttributeError):  # there is none, or another thread did the same
        del value._later


def _service_fields(value: Any) -> dict[str, Any]:
    """Returns the service fields of a sample or batch by name."""
    return {name: getattr(value, name) for name in SERVICE_FIELDS}


@edataclass
class Sample(RowWeightsMixin, PinMemoryMixin, ExtendableDataclassMixin):
    """One training item. Subclass it with `edataclass` and add fields.

    Attributes:
        __key__: Name of the sample in its dataset.
        __restore_key__: From this the pipeline can re-create the sample.
        __subflavors__: Tags of the dataset.
        __sources__: Where its bytes come from; several for a joined sample.
        __loss_weight__: Factor for the loss of this sample, from the metadataset; `loss_weight`
            returns it as a tensor.
    """

    __key__: str
    __restore_key__: RestoreKey
    __subflavors__: dict[str, Any] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None
    __loss_weight__: float = 1.0

    @classmethod
    def derive_from(cls, base_sample: Sample, **kwargs: Any) -> Self:
        """Makes a sample with the service fields of another one.

        Args:
            base_sample: The sample with key, restore key, subflavors, sources and loss weight.
            kwargs: The other fields; service fields given here win.
        """
        return cls(**{**_service_fields(base_sample), **kwargs})

    @classmethod
    def from_joined(cls, *args: Sample | None, **kwargs: Sample | None) -> Self:
        """Makes one sample of a row of a join; override it to choose how.

        All fields of the primary are taken, fields of later samples replace those of the same
        name, and all sources are listed. Key, restore key, subflavors and loss weight are the
        primary's.

        Args:
            args: The primary, then the others in the order of the join; None where a member with
                `nonmatch: none` has no match.
            kwargs: The same, where the members of the join have names.

        Raises:
            TypeError: There is no primary, or the fields are not those of this class.
        """
        samples = (*args, *kwargs.values())
        if not samples or samples[0] is None:
            raise TypeError(
                f"{cls.__qualname__}.from_joined: the first (primary) sample is missing."
            )
        primary = samples[0]
        values: dict[str, Any] = {}
        sources: tuple[SourceInfo, ...] = ()
        for sample in samples:
            if sample is not None:
                names = layout_of(type(sample))[1]
                values.update({n: getattr(sample, n) for n in names if n not in SERVICE_FIELDS})
                sources += sample.__sources__ or ()
        unknown = sorted(values.keys() - set(layout_of(cls)[1]))
        if unknown:
            raise TypeError(
                f"{cls.__qualname__}.from_joined: no field for {', '.join(unknown)} of the joined "
                f"samples. Add the fields to {cls.__qualname__}, or override from_joined."
            )
        return cls.derive_from(primary, __sources__=sources or None, **values)


# Energon's samples and batches have four fields; code that lists them sees those.
hide_field(Sample, "__loss_weight__")


@edataclass
class TextSample(Sample):
    """A text."""

    text: str


@edataclass
class ImageSample(Sample):
    """An image (C, H, W)."""

    image: torch.Tensor


@edataclass
class CaptioningSample(Sample):
    """An image (C, H, W) and its caption."""

    image: torch.Tensor
    caption: str


@edataclass
class ImageClassificationSample(Sample):
    """An image (C, H, W) and its class, as a number, a name or both."""

    image: torch.Tensor
    label: int | None = None
    label_name: str | None = None


@edataclass
class InterleavedSample(Sample):
    """Texts and images (C, H, W) in reading order."""

    sequence: list[torch.Tensor | str]


@edataclass
class SimilarityInterleavedSample(Sample):
    """Images (C, H, W) and texts, with the similarity of each pair."""

    images: list[torch.Tensor]
    texts: list[str]
    audio: list[torch.Tensor] | None = None
    video: list[torch.Tensor] | None = None
    similarity_matrix: torch.Tensor | None = None
    matched_text_indices: list[int] | None = None


@edataclass
class VQASample(Sample):
    """A question (`context`) about an image (C, H, W), with answers and their weights."""

    image: torch.Tensor
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class MultiChoiceVQASample(Sample):
    """A question (`context`) about an image (C, H, W), with choices of which one is correct."""

    image: torch.Tensor
    context: str
    choices: list[str] | None = None
    correct_choice_idx: int = 0


@edataclass
class VidQASample(Sample):
    """A question (`context`) about a video. The video is `bytes` as long as nothing decodes it."""

    video: Any
    context: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None


@edataclass
class OCRSample(Sample):
    """An image (C, H, W) and its text, with boxes.

    Boxes have the shape (N, 4) or (N, 5): x, y, width, height and, with five, confidence.
    """

    image: torch.Tensor
    text: str
    block_boxes: torch.Tensor | None = None
    block_classes: list[str] | torch.Tensor | None = None
    block_text: list[str] | None = None
    lines_boxes: torch.Tensor | None = None
    lines_text: list[str] | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None
    chars_boxes: torch.Tensor | None = None
    chars_text: list[str] | None = None


@edataclass
class VQAOCRSample(Sample):
    """A question (`context`) about an image (C, H, W) with text, with answers and word boxes."""

    image: torch.Tensor
    context: str
    text: str
    answers: list[str] | None = None
    answer_weights: torch.Tensor | None = None
    words_boxes: torch.Tensor | None = None
    words_text: list[str] | None = None


class NestedTags(dict[str, Any]):
    """Subflavors with values that may change, such as lists: a copy has copies of them."""

    def copy(self) -> dict[str, Any]:
        """Returns a deep copy, a plain dict."""
        return copy.deepcopy(dict(self))


def tags_of_source(subflavors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns subflavors of which each sample gets a copy, apart from those of the caller."""
    tags = NestedTags(subflavors)
    is_flat = {*map(type, tags.values())} <= {str, int, float, bool, type(None)}
    return dict(tags) if is_flat else NestedTags(tags.copy())


class CrudeSample(Described, dict[str, Any]):
    """The parts of a sample by name, with its service fields; a cooker makes a `Sample` of it."""

    __slots__ = ()

    def __missing__(self, part: Any) -> Any:
        """Returns a part that is asked for in capitals; the names of parts have small letters."""
        lower = str(part).lower()
        if lower not in self:
            raise KeyError(part)
        return self[lower]


def make_crude(parts: dict[str, Any], service: dict[str, Any]) -> CrudeSample:
    """Makes a crude sample: a dict of the parts with the service fields."""
    sample = CrudeSample(service)
    sample["__shard__"] = service["__sources__"][0].shard_name
    sample.update(parts)
    return sample


SAMPLE_TYPES: dict[str, type[Sample]] = {
    name: kind
    for name, kind in vars().items()
    if isinstance(kind, type) and issubclass(kind, Sample) and kind is not Sample
}


@edataclass
class Batch(RowWeightsMixin, PinMemoryMixin, ExtendableDataclassMixin):
    """Several samples in one. Subclass it with `edataclass` and add fields.

    Attributes:
        __key__: One entry per sample.
        __restore_key__: From this the pipeline can re-create the batch.
        __subflavors__: One entry per sample.
        __sources__: The sources of all samples, one after the other.
        __loss_weight__: One entry per sample; `loss_weight` returns them as a tensor (n,).
    """

    __key__: list[str]
    __restore_key__: RestoreKey
    __subflavors__: list[dict[str, Any] | None] | None = None
    __sources__: tuple[SourceInfo, ...] | None = None
    __loss_weight__: list[float] | None = None

    @classmethod
    def derive_from(cls, base_batch: Batch, **kwargs: Any) -> Self:
        """Makes a batch with the service fields of another one.

        Args:
            base_batch: The batch with keys, restore key, subflavors, sources and loss weights.
            kwargs: The other fields.

        Raises:
            TypeError: A service field is given again.
        """
        return cls(**_service_fields(base_batch), **kwargs)

    @classmethod
    def from_samples(cls, samples: Sequence[Any], **kwargs: Any) -> Self:
        """Makes a batch as `generic_batch` does: tensors padded and stacked, other fields listed.

        Args:
            samples: Samples (or dicts) that have the fields of this class.
            kwargs: Fields with another value than the samples'; service fields too.

        Raises:
            ValueError: There is no sample, or tensors do not fit.
            TypeError: A sample lacks a field that has no default; names it.
        """
        if not samples:
            raise ValueError(f"{cls.__qualname__}.from_samples: there is no sample.")
        values, missing = {**_batched_service_fields(samples), **kwargs}, dataclasses.MISSING
        for field in dataclasses.fields(cls):
            name = field.name
            if not field.init or name in values or name in SERVICE_FIELDS:
                continue
            try:
                column = [s[name] if isinstance(s, Mapping) else getattr(s, name) for s in samples]
            except (AttributeError, KeyError) as error:
                if field.default is not missing or field.default_factory is not missing:
                    continue
                raise TypeError(
                    f"{cls.__qualname__}.from_samples: field {name!r} is not in every "
                    f"{type(samples[0]).__qualname__}. Give it: from_samples(samples, {name}=...)."
                ) from error
            try:
                values[name] = batch_column(name, column)
            except (TypeError, ValueError) as error:
                error.args = (f"{cls.__qualname__}, field {name!r}: {error}",)
                raise
        return cls(**values)


hide_field(Batch, "__loss_weight__")


def _batched_service_fields(samples: Sequence[Any]) -> dict[str, Any]:
    """Returns the service fields of a batch: lists with one entry per sample, sources in a row."""

    def column(name: str, default: Any) -> list[Any]:
        if isinstance(samples[0], Mapping):
            return [sample.get(name, default) for sample in samples]
        return [getattr(sample, name, default) for sample in samples]

    sources = tuple(source for row in column("__sources__", None) for source in row or ())
    subflavors = column("__subflavors__", None)
    return {
        "__key__": column("__key__", ""),
        "__restore_key__": tuple(column("__restore_key__", ())),
        "__subflavors__": None if all(tags is None for tags in subflavors) else subflavors,
        "__sources__": sources or None,
        "__loss_weight__": column("__loss_weight__", 1.0),
    }


def images_of(sample: Any) -> list[Any]:
    """Returns the images of an encoded sample or dict."""
    for name in IMAGE_FIELDS:
        value = field_of(sample, name)
        if value is not None:
            is_one = name == "image" and getattr(value, "ndim", 3) == 3
            return [value] if is_one else list(value)
    return []


def add_source_info(sample: T, *source_infos: Any) -> T:
    """Appends to the sources of a sample or dict, in place.

    Returns:
        The sample itself.
    """
    return with_entry(
        sample, "__sources__", (*(field_of(sample, "__sources__") or ()), *source_infos)
    )


def field_of(sample: Any, name: str) -> Any:
    """Returns a field of a sample or dict; None where it has none."""
    return sample.get(name) if isinstance(sample, (dict, UserDict)) else getattr(sample, name, None)


def sources_of(item: Any) -> Sequence[SourceInfo]:
    """Returns the sources of a sample or dict; those of all samples of a batch, in a row."""
    found = field_of(item, "__sources__") or ()
    rows = (own if type(own) is tuple else (own,) for own in found if own is not None)
    return [*chain.from_iterable(rows)]


def with_entry(sample: T, name: str, value: Any) -> T:
    """Sets a field of a sample or dict, in place; returns the sample itself."""
    if isinstance(sample, dict):
        sample[name] = value
    else:
        setattr(sample, name, value)
    return sample
