"""Several encoded samples in one sequence, and batches of such sequences."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.batching.rules import Packing
from energon_lite.core.arrays import Int32Array, Int64Array
from energon_lite.core.edataclass import edataclass
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.sample_columns import Columns
from energon_lite.core.samples import (
    IMAGE_FIELDS,
    Batch,
    Sample,
    SourceInfo,
    field_of,
    images_of,
)
from energon_lite.core.stacking import SERVICE_FIELDS, layout_of
from energon_lite.loss.means import token_weight

# Masks and weights of answers, as chat templates, TRL and others call them: an entry per token.
LOSS_MASKS = (
    "loss_mask", "loss_weights", "assistant_masks", "assistant_mask", "completion_mask",
    "response_mask", "answer_mask", "label_mask",
)  # fmt: skip
# Tensors of processors with a row per image or video, or per patch.
IMAGE_ROWS = (
    "image_grid_thw", "video_grid_thw", "pixel_values_videos", "second_per_grid_ts", "image_sizes",
)  # fmt: skip
_LOSS_WEIGHTS = ("__loss_weight__", "loss_weight")
# Fields of samples that a pack uses; all others are joined or listed.
_USED = {
    "input_ids", "labels", "position_ids", "attention_mask", "loss_weight", *LOSS_MASKS,
    *IMAGE_FIELDS,
}  # fmt: skip
_NUM_VALUES = torch.Tensor.numel  # half of the time of `len`
_NUM_DIMENSIONS, _DTYPE = attrgetter("ndim"), attrgetter("dtype")
_INTEGERS = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *map(np.dtype, "bBhHiIlLqQ"),
}  # fmt: skip


T = TypeVar("T", bound="PackedSample | PackedBatch")


@dataclass(kw_only=True)
class _PackFields:
    """The fields that packs and batches of them have."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    loss_weights: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    max_seqlen: int
    images: list[torch.Tensor]
    image_segments: torch.Tensor


@edataclass
class PackedSample(_PackFields, Sample):
    """n samples, one after the other, in one sequence of T tokens.

    Attributes:
        input_ids: (T,) int64.
        labels: (T,) int64; `ignore_index` where `loss_weights` is 0, as where `loss_mask` is.
        position_ids: (T,) int64; 0, 1, 2, ... in each sample, or those of the samples: (R, T) if
            they have R rows.
        segment_ids: (T,) int64; 1 for the tokens of the first sample, 2 for those of the second;
            0 for padding. Attention must not reach from one to another.
        loss_weights: (T,) float32; what each token's loss counts, with the loss weight of the
            sample's source. 0 for padding and labels without loss.
        cu_seqlens: (n + 1,) int32; the samples' tokens summed up, from 0, without padding.
        cu_seqlens_padded: (n + 1,) int32; where each sample starts in the sequence. As
            `cu_seqlens` where nothing is aligned.
        max_seqlen: tokens of the longest sample, with its padding if it is aligned.
        images: the images of all samples, in their order.
        image_segments: (number of images,) int64; which segment each belongs to.
        __keys__: the key of each sample.
        __sources__: the sources of each sample, a tuple for each; `()` if it carries none.
        __subflavors__: those of each sample; None if it carries none.
    """

    __keys__: list[str]
    __sources__: list[tuple[SourceInfo, ...]] | None = None  # type: ignore[assignment]
    __subflavors__: list[dict[str, Any] | None] | None = None  # type: ignore[assignment]

    @classmethod
    def from_samples(cls, packs: Sequence[PackedSample]) -> PackedBatch:
        """Makes a batch of packs, a row for each; what `generic_batch` calls."""
        return PackedBatch.from_packs(packs)


@edataclass
class PackedBatch(_PackFields, Batch):
    """B rows of L tokens, each a pack; or one row with all packs (`layout="thd"`).

    Attributes:
        input_ids: (B, L) int64.
        labels: (B, L) int64; `ignore_index` where `loss_weights` is 0.
        position_ids: (B, L) int64; (R, B, L) if samples have R rows of positions.
        segment_ids: (B, L) int64; counted from 1 in each row, 0 for padding.
        loss_weights: (B, L) float32; what `weighted_sum` and `weight_total` want.
        cu_seqlens: (B, S + 1) int32; rows with fewer than S samples repeat their last value, which
            is to say samples of no tokens.
        cu_seqlens_padded: (B, S + 1) int32.
        max_seqlen: tokens of the longest sample, with its padding if it is aligned.
        images: the images of all packs, in their order.
        image_segments: (number of images, 2) int64; row and segment of each.
        __key__: the key of each sample of all packs.
        __restore_key__: with the key of each sample, in the same order; `source_names` has the
            names of their sources.
        __sources__: the sources of each sample, a tuple for each; `()` if it carries none.
        __subflavors__: those of each sample; None if it carries none.
    """

    __sources__: list[tuple[SourceInfo, ...]] | None = None  # type: ignore[assignment]

    @property
    def efficiency(self) -> float:
        """The share of the batch that is no padding, in 0..1."""
        return float((self.segment_ids > 0).float().mean())

    @classmethod
    def from_packs(
        cls, packs: Sequence[PackedSample], packing: Packing | None = None
    ) -> PackedBatch:
        """Makes a batch of packs.

        Args:
            packs: at least one.
            packing: the shape of the rows; by default a row for each, as long as the longest.

        Raises:
            ValueError: There is no pack.
        """
        if not packs:
            raise ValueError("PackedBatch.from_packs: there is no pack")
        members = [_members(pack) for pack in packs]
        columns = _Columns([*chain.from_iterable(members)])
        columns.aligned = [num for p in packs for num in p.cu_seqlens_padded.diff().tolist()]
        fields = _joined_fields(columns, [*map(len, members)], packing or _AS_NEEDED, is_batch=True)
        restore_keys = tuple(pack.__restore_key__ for pack in packs)
        return _with_others(cls(__restore_key__=restore_keys, **fields), columns.others())


_PER_TOKEN = ("input_ids", "labels", "position_ids", "segment_ids", "loss_weights")
_PER_SAMPLE = ("cu_seqlens", "cu_seqlens_padded")
_AS_NEEDED = Packing(1, pad_to_capacity=False)


def sample_bounds(item: PackedSample | PackedBatch) -> Int64Array:
    """Returns where samples start in all rows, one after the other, and the end of the rows."""
    rows = np.arange(0, item.input_ids.numel(), item.input_ids.shape[-1])
    starts = item.cu_seqlens_padded.numpy().reshape(len(rows), -1) + rows[:, None]
    return np.unique(np.append(starts, item.input_ids.numel()))


def counted_positions(item: PackedSample | PackedBatch) -> torch.Tensor:
    """Returns 0, 1, 2, ... for the tokens of each sample, and 0 for padding."""
    bounds = sample_bounds(item)
    counted = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    return torch.from_numpy(counted).reshape(item.input_ids.shape) * (item.segment_ids > 0)


def _members(pack: PackedSample) -> list[dict[str, Any]]:
    """Returns the samples of a pack, with what the pack has of each."""
    starts, sizes = pack.cu_seqlens_padded.tolist(), pack.cu_seqlens.diff().tolist()
    images: list[list[Any]] = [[] for _ in sizes]
    for image, segment in zip(pack.images, pack.image_segments.tolist(), strict=True):
        images[segment - 1].append(image)
    columns: dict[str, list[Any]] = {"__key__": pack.__keys__, "images": images}
    for name in ("input_ids", "labels", "loss_weights"):
        array = getattr(pack, name).numpy()
        columns[name] = [array[a : a + num] for a, num in zip(starts, sizes, strict=False)]
    names = ["__sources__", "__subflavors__", *vars(pack)]
    if not torch.equal(pack.position_ids, counted_positions(pack)):
        names.append("position_ids")
    for name in names:
        value = getattr(pack, name)
        if isinstance(value, torch.Tensor) and name not in IMAGE_ROWS:
            dim = -1 if name == "position_ids" else 0
            value = [value.narrow(dim, *place) for place in zip(starts, sizes, strict=False)]
        is_each = isinstance(value, list)
        columns[name] = value if is_each else [value, *[None] * (len(sizes) - 1)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _with_others(item: T, values: dict[str, list[Any]]) -> T:
    """Sets further fields of a pack or a batch of packs.

    An entry per token is joined, rows of images are concatenated; anything else is a list with an
    entry per sample.

    Args:
        item: the pack or batch.
        values: by name, what each sample has; None for nothing.
    """
    if not values:
        return item
    lengths = item.cu_seqlens.diff().flatten()
    sizes = lengths[lengths > 0].tolist()
    for name, column in values.items():
        tensors = list(map(_tensor, column))
        own = [tensor for tensor in tensors if tensor is not None]
        made: Any = column
        if name in IMAGE_ROWS:
            made = torch.cat(own)
        elif len({tensor.shape[1:] for tensor in own}) == 1 and all(
            value is None or (tensor is not None and tensor.shape[:1] == (size,))
            for value, tensor, size in zip(column, tensors, sizes, strict=True)
        ):
            tail = own[0].shape[1:]
            missing = own[0].new_zeros
            joined = torch.cat(
                [
                    missing((size, *tail)) if tensor is None else tensor
                    for tensor, size in zip(tensors, sizes, strict=True)
                ]
            )
            made = joined.new_zeros((*item.segment_ids.shape, *tail))
            made[item.segment_ids > 0] = joined
        if name == "position_ids" and made.ndim > item.segment_ids.ndim:
            made = made.movedim(-1, 0).contiguous()
        setattr(item, name, made)
    return item


def _tensor(value: Any) -> torch.Tensor | None:
    """Returns numbers as a tensor; None for other values."""
    if isinstance(value, torch.Tensor):
        return value if value.ndim else None
    with suppress(ValueError, TypeError):  # texts, lists of several lengths
        if isinstance(value, (list, tuple, np.ndarray)):
            return torch.tensor(np.asarray(value))
    return None


def pack_samples(samples: Sequence[Any], packing: Packing) -> PackedSample:
    """Puts encoded samples into one sequence.

    Args:
        samples: dataclasses, dicts or NamedTuples with `input_ids` (t,), and if they like `labels`
            (t,), `loss_mask` (t,) and images: `images` (a list, or (n, C, H, W)), `image` or
            `pixel_values`. Without labels all tokens but the first are predicted. A `loss_mask`
            multiplies the loss weight of each label; a label of weight 0 becomes `ignore_index`.
            Further fields become attributes: joined if they have an entry per token, else a list
            with an entry per sample.
        packing: alignment, loss mode, labels, and the capacity that must not be exceeded.

    Returns:
        The pack. Its key lists those of the samples.

    Raises:
        FatalSampleError: A sample has no `input_ids`, its fields do not fit together, a field is
            not what its name means, or all together are above the capacity; names the sample.
    """
    if not samples:
        raise ValueError("pack_samples: there is no sample")
    columns = _Columns(samples)
    fields = _joined_fields(columns, [len(samples)], packing, is_batch=False)
    keys: list[str] = fields.pop("__key__")
    restore_keys = [key or () for key in columns["__restore_key__"] or [()] * len(samples)]
    pack = PackedSample(
        __key__=",".join(keys), __restore_key__=("pack", *restore_keys), __keys__=keys, **fields
    )
    return _with_others(pack, columns.others())


class PackColumns(Columns):
    """Samples of packs that are made into a batch at once; equal to the batch of these packs.

    Each token is written once, into the row of the batch.

    Args:
        packs: the samples of each pack.
        packing: how they are packed, and the shape of the rows.

    Raises:
        Exception: `pack_samples` would raise it for one of the packs, or another one.
    """

    def __init__(self, packs: Sequence[Sequence[Any]], packing: Packing) -> None:
        self.packs, self.packing = packs, packing
        self.columns = columns = _Columns([*chain.from_iterable(packs)])
        self.fields = _joined_fields(columns, [*map(len, packs)], packing, is_batch=True)

    def samples(self) -> list[PackedSample]:
        """Returns the packs one by one."""
        return [pack_samples(samples, self.packing) for samples in self.packs]

    def batch(self) -> PackedBatch:
        """Returns the batch."""
        batch = PackedBatch(__restore_key__=(), **self.fields)
        return _with_others(batch, self.columns.others())


class _Places(NamedTuple):
    """The places of the tokens of S samples in B rows of L tokens, counted over all rows.

    Attributes:
        shape: of the fields; B and L for a batch, L for a pack.
        sizes: S numbers of tokens.
        starts: shape (S,); where each sample starts.
        taken: shape (S,); its tokens and the padding behind it.
        paddings: (sample, start, stop) of the padding behind a sample, where there is any.
        segments: shape (S,); numbers of the samples in their rows, from 1.
        bounds: `cu_seqlens` and `cu_seqlens_padded`.
        longest: tokens of the longest sample, with its padding if it is aligned.
    """

    shape: tuple[int, ...]
    sizes: list[int]
    starts: Int64Array
    taken: Int64Array
    paddings: list[tuple[int, int, int]]
    segments: Int64Array
    bounds: list[Int32Array]
    longest: int

    def fill(self, tokens: npt.NDArray[Any], value: float) -> npt.NDArray[Any]:
        """Writes a value where there is padding; returns the array."""
        for _, start, stop in self.paddings:
            tokens[start:stop] = value
        return tokens

    def joined(self, values: list[Any], fill: int) -> Int64Array:
        """Returns what all samples have for their tokens, and `fill` where there is padding."""
        parts, is_tensor = values.copy(), type(values[0]) is torch.Tensor
        for sample, start, stop in reversed(self.paddings):
            padding = np.full(stop - start, fill)
            parts.insert(sample + 1, torch.from_numpy(padding) if is_tensor else padding)
        if is_tensor:
            return np.asarray(torch.cat(parts).numpy(), np.int64)
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")


def _places(
    columns: _Columns, sizes: list[int], counts: list[int], packing: Packing, is_batch: bool
) -> _Places:
    """Returns where samples lie.

    Args:
        columns: the samples of all packs.
        sizes: their tokens.
        counts: how many samples each pack has.
        packing: how they are packed.
        is_batch: whether rows have the shape that `packing` wants; else they are as long as needed.

    Raises:
        FatalSampleError: A pack is above the capacity; names a sample.
    """
    align, stops = packing.token_alignment, [*accumulate(counts, initial=0)]
    aligned = columns.aligned or [-(-size // align) * align for size in sizes]
    sums = _sums_in_rows(aligned, stops)
    totals = [own[-1] for own in sums]
    if (max(totals) > packing.tokens and not columns.aligned) or 0 in sizes:
        for first, stop, total in zip(stops, stops[1:], totals, strict=False):
            _check_capacity(columns.samples[first:stop], sizes[first:stop], total, packing)
    if packing.layout == "thd":  # all in one row
        stops, totals = [0, len(sizes)], [sum(totals)]
        sums = _sums_in_rows(aligned, stops)
    num_rows, length = len(totals), max(totals)
    if is_batch and packing.pads_to_capacity:
        length = max(length, packing.tokens * len(counts) // num_rows)
    ends = [row * length + end for row, own in enumerate(sums) for end in own[:-1]]
    edges = np.array([*ends, num_rows * length])
    segments = np.array([*chain.from_iterable(range(1, len(own)) for own in sums)])
    starts, taken = edges[:-1], edges[1:] - edges[:-1]
    paddings: list[tuple[int, int, int]] = []
    if num_rows * length > sum(sizes):
        for sample in [stop - 1 for stop in stops[1:]] if aligned == sizes else range(len(sizes)):
            start, stop = int(starts[sample]) + sizes[sample], int(edges[sample + 1])
            if start < stop:
                paddings.append((sample, start, stop))
    bounds = _row_bounds(sums, is_batch)
    own_bounds = (
        bounds.copy() if aligned == sizes else _row_bounds(_sums_in_rows(sizes, stops), is_batch)
    )
    shape = (num_rows, length) if is_batch else (length,)
    return _Places(
        shape, sizes, starts, taken, paddings, segments, [own_bounds, bounds], max(aligned)
    )


def _sums_in_rows(sizes: list[int], stops: list[int]) -> list[list[int]]:
    """Returns the sums of the sizes of each row, from 0."""
    return [[*accumulate(sizes[first:stop], initial=0)] for first, stop in pairwise(stops)]


def _row_bounds(sums: list[list[int]], is_batch: bool) -> Int32Array:
    """Returns sums in rows as an array; short rows repeat their last sum."""
    if not is_batch:
        return np.array(sums[0], np.int32)
    most = max(map(len, sums))
    return np.array([own + own[-1:] * (most - len(own)) for own in sums], np.int32)


def _joined_fields(
    columns: _Columns, counts: list[int], packing: Packing, is_batch: bool
) -> dict[str, Any]:
    """Returns the fields of a batch of packs, or those of the one pack; no restore key.

    Args:
        columns: the samples of all packs.
        counts: how many samples each pack has.
        packing: how they are packed.
        is_batch: whether rows have the shape that `packing` wants; else there is one pack.
    """
    values, sizes = columns.arrays("input_ids")
    columns.check_attention(sizes)
    places = _places(columns, sizes, counts, packing, is_batch)
    input_ids = places.joined(values, packing.pad_id)
    positions = np.arange(len(input_ids))
    positions -= places.starts.repeat(places.taken)
    labels = _labels(columns, input_ids, places, packing)
    arrays = [
        input_ids, labels, places.fill(positions, 0),
        places.fill(places.segments.repeat(places.taken), 0),
        _loss_weights(columns, labels, places, packing),
    ]  # fmt: skip
    if is_batch:
        arrays = [array.reshape(places.shape) for array in arrays]
    arrays += places.bounds
    keys, kinds = columns.lookup("__key__")
    if kinds != {str}:
        keys = [str(key or "") for key in keys] or [""] * len(sizes)
    images = columns.images()
    of_images = np.zeros((0, 2) if is_batch else 0, np.int64)
    if images:
        owners = np.array([place for place, own in enumerate(images) for _ in own], np.int64)
        of_images = places.segments[owners]
        if is_batch:
            of_images = np.stack([places.starts[owners] // places.shape[1], of_images], axis=1)
    return {
        **dict(zip((*_PER_TOKEN, *_PER_SAMPLE), map(torch.from_numpy, arrays), strict=True)),
        "__key__": keys,
        "__sources__": [own or () for own in columns["__sources__"] or [()] * len(sizes)],
        "__subflavors__": columns["__subflavors__"] or [None] * len(sizes),
        "images": list(chain.from_iterable(images)),
        "image_segments": torch.from_numpy(of_images),
        "max_seqlen": places.longest,
    }


class _Columns:
    """The fields of the samples of packs, each looked up in all samples at once."""

    def __init__(self, samples: Sequence[Any]) -> None:
        if any(issubclass(kind, UserDict) for kind in set(map(type, samples))):  # of tokenizers
            samples = [dict(own) if isinstance(own, UserDict) else own for own in samples]
        self.samples = samples
        # If they were in packs: the tokens of each with its padding. Their losses are weighted.
        self.aligned: list[int] = []
        # The names of fields; None where a sample may make up others when it is asked.
        self._names: set[str] | None = None
        self._kinds = set(map(type, samples))
        self._are_dicts = self._kinds == {dict}
        self._get: Any = dict.get if self._are_dicts else getattr
        if self._are_dicts:
            self._names = set().union(*samples)
        elif all(getattr(kind, "__getattr__", None) is Sample.__getattr__ for kind in self._kinds):
            self._names = set().union(*map(vars, samples))
        elif any(issubclass(kind, dict) for kind in self._kinds):
            self._get = lambda sample, name, _: field_of(sample, name)

    def __getitem__(self, name: str) -> list[Any] | None:
        """Returns a field of each sample, None where it has none; None if all lack it."""
        return self.lookup(name)[0] or None

    def lookup(self, name: str) -> tuple[list[Any], set[type]]:
        """Returns a field of each sample, and the types of its values; nothing if all lack it."""
        is_known = self._names is None or name in self._names
        if not is_known and (self._are_dicts or not any(hasattr(k, name) for k in self._kinds)):
            return [], set()
        found = list(map(self._get, self.samples, repeat(name), repeat(None)))
        kinds = set(map(type, found))
        return (found, kinds) if kinds != {type(None)} else ([], set())

    def arrays(self, name: str) -> tuple[list[Any], list[int]]:
        """Returns tensors or arrays that have an entry for each token, and how many they have.

        Raises:
            FatalSampleError: A sample lacks the field, or the field has other dimensions.
        """
        values, kinds = self.lookup(name)
        are_tensors = kinds == {torch.Tensor}
        if not (
            (are_tensors or kinds == {np.ndarray})
            and {*map(_NUM_DIMENSIONS, values)} == {1}
            and {*map(_DTYPE, values)} <= _INTEGERS
        ):
            values = list(map(_array, self.samples, repeat(name), values or repeat(None)))
            are_tensors = False
        return values, list(map(_NUM_VALUES if are_tensors else len, values))

    def check_attention(self, sizes: list[int]) -> None:
        """Refuses the padding of a tokenizer, which would fill the pack."""
        masks = self["attention_mask"] or []
        for sample, mask, size in zip(self.samples, masks, sizes, strict=bool(masks)):
            if mask is not None and not _per_token(sample, "attention_mask", mask, size).all():
                raise FatalSampleError.from_sample(
                    sample,
                    "attention_mask has zeros. Padding would fill the pack: tokenize with "
                    "padding=False, or cut what is hidden off all fields",
                )

    def others(self) -> dict[str, list[Any]]:
        """Returns the fields that a pack does not use, and positions that samples have."""
        names = set().union(*map(_field_names, self.samples if self._names is None else ()))
        names = names.union(self._names or (), *(layout_of(kind)[1] for kind in self._kinds))
        names = {name for name in names - _USED if not name.startswith("__")}
        found = {name: values for name in sorted(names) if (values := self[name]) is not None}
        for name in found:
            if hasattr(PackedBatch, name):
                raise FatalSampleError.from_sample(
                    self.samples[0], f"it has a field {name!r}, which packs make: rename it"
                )
        if (positions := self["position_ids"]) is not None:
            own = list(map(_own_positions, self.samples, positions))
            rows = max(own, key=torch.Tensor.dim).shape[1:]
            found["position_ids"] = [
                p.reshape(len(p), -1).expand(-1, *rows) if rows else p for p in own
            ]
        return found

    def images(self) -> list[list[Any]]:
        """Returns the images of each sample; nothing if no sample has any."""
        has_images = any(self.lookup(name)[0] for name in IMAGE_FIELDS)
        return list(map(_images_of, self.samples)) if has_images else []


def _field_names(sample: Any) -> set[str]:
    """Returns the names of the fields of a sample."""
    own = sample if isinstance(sample, (dict, UserDict)) else getattr(sample, "__dict__", ())
    return {*own, *layout_of(type(sample))[1]}


def _own_positions(sample: Any, value: Any) -> torch.Tensor:
    """Returns the positions of the tokens of a sample: (t,), or (t, R) of R rows."""
    size = len(field_of(sample, "input_ids"))
    positions = torch.arange(size) if value is None else torch.as_tensor(value)
    if positions.shape[-1:] != (size,) or positions.dtype not in _INTEGERS:
        raise FatalSampleError.from_sample(
            sample,
            f"position_ids has shape {tuple(positions.shape)} and type {positions.dtype}; make it "
            f"integers, ({size},) or (rows, {size})",
        )
    rows = positions.reshape(-1, size)
    return rows[0] if len(rows) == 1 else rows.T


def _images_of(sample: Any) -> list[Any]:
    """Returns the images of a sample; of rows of patches, the rows of each image."""
    names = [name for name in IMAGE_FIELDS if field_of(sample, name) is not None]
    if len(names) > 1:
        raise FatalSampleError.from_sample(
            sample, f"it has {' and '.join(names)}; keep those that the model gets"
        )
    grid = field_of(sample, "image_grid_thw")
    if grid is None or names != ["pixel_values"]:
        return images_of(sample)
    patches = torch.as_tensor(field_of(sample, "pixel_values"))
    return [*torch.split(patches, torch.as_tensor(grid).prod(dim=-1).tolist())]


def slice_sample(sample: Any, start: int, stop: int) -> Any:
    """Cuts tokens `start` to `stop` out of an encoded sample, a copy.

    Raises:
        FatalSampleError: It has no `input_ids`; or it has images, and which of them belong to the
            tokens only the task encoder knows.
    """
    ids = field_of(sample, "input_ids")
    if ids is None:
        raise FatalSampleError.from_sample(
            sample, f"{type(sample).__name__} has no input_ids to cut; override slice_sample"
        )
    if images_of(sample):
        raise FatalSampleError.from_sample(
            sample,
            "it is longer than a pack and has images; which belong to the tokens that are kept "
            'only you know. Override slice_sample, or use overlong="drop" or "alone"',
        )
    names = _field_names(sample).difference(IMAGE_ROWS, SERVICE_FIELDS)
    values = {name: field_of(sample, name) for name in names}
    cut = {
        name: value[start:stop]
        for name, value in values.items()
        if isinstance(value, (list, np.ndarray, torch.Tensor))
        and getattr(value, "ndim", 1) > 0
        and len(value) == len(ids)
    }
    if values.get("position_ids") is not None:  # those of a part begin again
        rows = torch.as_tensor(values["position_ids"])
        cut["position_ids"] = rows[..., start:stop] - rows[..., start : start + 1]
    if isinstance(sample, (dict, UserDict)):
        return {**sample, **cut}
    if isinstance(sample, tuple) and hasattr(sample, "_replace"):
        return sample._replace(**cut)
    copied = copy.copy(sample)
    for name, value in cut.items():
        setattr(copied, name, value)
    return copied


def _array(sample: Any, name: str, value: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any]
    if value is None:
        raise FatalSampleError.from_sample(
            sample,
            f"{type(sample).__name__} has no {name} (t,). Give it from encode_sample or "
            "postencode_sample, or override pack_selected_samples(samples)",
        )
    if type(value) is np.ndarray:
        array = value
    else:
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.ndim != 1:
        raise FatalSampleError.from_sample(
            sample, f"{name} has shape {array.shape}; give one entry per token, shape (t,)"
        )
    if name in ("input_ids", "labels") and array.size and array.dtype.kind not in "iu":
        raise FatalSampleError.from_sample(sample, f"{name} is {array.dtype}; make it integers")
    return array


def _per_token(sample: Any, name: str, value: Any, size: int) -> npt.NDArray[Any]:
    array = _array(sample, name, value)
    if len(array) != size:
        raise FatalSampleError.from_sample(
            sample, f"it has {size} input_ids and {len(array)} {name}; give one per token"
        )
    return array


def _labels(
    columns: _Columns, input_ids: Int64Array, places: _Places, packing: Packing
) -> Int64Array:
    """Returns the labels of all samples at their places."""
    sizes, starts = places.sizes, places.starts
    values, kinds = columns.lookup("labels")
    is_whole = bool(values) and type(None) not in kinds
    own, lengths = columns.arrays("labels") if is_whole else ([], [])
    if lengths == sizes:
        labels = places.joined(own, packing.ignore_index)
    else:
        labels = input_ids.copy()
        if packing.labels_are_shifted:
            labels[:-1] = input_ids[1:]
            labels[starts + sizes - 1] = packing.ignore_index
        for place, value in enumerate(values):
            if value is not None:
                array = _per_token(columns.samples[place], "labels", value, sizes[place])
                labels[starts[place] : starts[place] + sizes[place]] = array
        places.fill(labels, packing.ignore_index)
    if not packing.labels_are_shifted and not columns.aligned:
        labels[starts] = packing.ignore_index  # nothing of a sample predicts its first token
    return labels


def _check_capacity(samples: Sequence[Any], sizes: list[int], total: int, packing: Packing) -> None:
    if not all(sizes):
        raise FatalSampleError.from_sample(samples[sizes.index(0)], "it has no input_ids")
    if total > packing.tokens and not (packing.overlong == "alone" and len(samples) == 1):
        longest = sizes.index(max(sizes))
        raise FatalSampleError.from_sample(
            samples[longest],
            f"{len(samples)} samples of {total} tokens, aligned, do not fit a pack of "
            f"{packing.tokens}; this one, the longest, has {sizes[longest]}. sample_length must "
            "give at least as many tokens as input_ids has in the end",
        )


def _loss_weights(
    columns: _Columns, labels: Int64Array, places: _Places, packing: Packing
) -> npt.NDArray[np.float32]:
    """Weights of each token's loss; labels of tokens that count nothing become `ignore_index`."""
    samples = columns.samples
    masks = {name: values for name in LOSS_MASKS if (values := columns[name]) is not None}
    has_loss = labels != packing.ignore_index
    own, kinds = columns.lookup(_LOSS_WEIGHTS[0])
    if kinds != {float}:
        has_weights = bool(own) or columns[_LOSS_WEIGHTS[1]] is not None
        own = list(map(loss_weight_of, samples)) if has_weights else [1.0]
    weights: npt.NDArray[Any] = has_loss.astype(np.float64) if masks else has_loss
    starts = places.starts.tolist()
    for name, values in masks.items():
        for sample, start, size, mask in zip(samples, starts, places.sizes, values, strict=True):
            if mask is not None:
                weights[start : start + size] *= _per_token(sample, name, mask, size)
    wrong = np.flatnonzero((labels < 0) & weights.astype(bool))
    if len(wrong):
        number = np.searchsorted(places.starts, wrong[0], side="right") - 1
        raise FatalSampleError.from_sample(
            samples[number],
            f"label {labels[wrong[0]]} at token {wrong[0] - starts[number]} is neither a token nor "
            f"ignore_index={packing.ignore_index}; set it to ignore_index, or its loss_mask to 0",
        )
    if packing.loss == "token" and not masks and set(own) == {1.0}:
        return np.asarray(weights, np.float32)
    weights = np.asarray(weights, np.float64)
    targets = np.add.reduceat((weights != 0).astype(np.int64), starts)
    loss = "token" if columns.aligned else packing.loss
    modes = [token_weight(loss, number) for number in targets.tolist()]
    weights *= np.repeat(np.multiply(own, modes), places.taken)
    found = np.asarray(places.fill(weights, 0), np.float32)
    labels[found == 0] = packing.ignore_index
    return found


def loss_weight_of(sample: Any) -> float:
    """Returns the loss weight that an encoded sample carries; 1 if it has none."""
    for name in _LOSS_WEIGHTS:
        value = field_of(sample, name)
        if value is not None:
            return float(value)
    return 1.0
