"""Several encoded samples in one sequence, and batches of such sequences."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.batching.rules import Packing
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.edataclass import edataclass
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.samples import IMAGE_FIELDS, Batch, Sample, field_of, images_of
from energon_lite.loss.means import token_weight

# Fields with one entry per token, which are cut with a sample.
TOKEN_FIELDS = ("input_ids", "labels", "loss_mask")
_LOSS_WEIGHTS = ("__loss_weight__", "loss_weight")
_NUM_VALUES = torch.Tensor.numel  # half of the time of `len`


@edataclass
class PackedSample(Sample):
    """n samples, one after the other, in one sequence of T tokens.

    Attributes:
        input_ids: (T,) int64.
        labels: (T,) int64; `ignore_index` where there is no loss.
        position_ids: (T,) int64; 0, 1, 2, ... in each sample.
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
    """

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
    __keys__: list[str]

    @classmethod
    def from_samples(cls, packs: Sequence[PackedSample]) -> PackedBatch:
        """Makes a batch of packs, a row for each; what `generic_batch` calls."""
        return PackedBatch.from_packs(packs)


@edataclass
class PackedBatch(Batch):
    """B rows of L tokens, each a pack; or one row with all packs (`layout="thd"`).

    Attributes:
        input_ids: (B, L) int64.
        labels: (B, L) int64.
        position_ids: (B, L) int64.
        segment_ids: (B, L) int64; counted from 1 in each row, 0 for padding.
        loss_weights: (B, L) float32; what `weighted_sum` and `weight_total` want.
        cu_seqlens: (B, S + 1) int32; rows with fewer than S samples repeat their last value, which
            is to say samples of no tokens.
        cu_seqlens_padded: (B, S + 1) int32.
        max_seqlen: tokens of the longest sample, with its padding if it is aligned.
        images: the images of all packs, in their order.
        image_segments: (number of images, 2) int64; row and segment of each.
        __key__: the key of each sample of all packs.
    """

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
        rows = [_joined(packs)] if packing and packing.layout == "thd" else [_row(p) for p in packs]
        length = max(len(row["input_ids"]) for row in rows)
        if packing and packing.pads_to_capacity:
            length = max(length, packing.tokens * len(packs) // len(rows))
        ignore_index, pad_id = (packing.ignore_index, packing.pad_id) if packing else (-100, 0)
        paddings: dict[str, float | None] = {
            **dict.fromkeys(_PER_TOKEN, 0), "input_ids": pad_id, "labels": ignore_index,
            **dict.fromkeys(_PER_SAMPLE),
        }  # fmt: skip
        num_samples = max(len(row["cu_seqlens"]) for row in rows)
        images = [
            (number, segment)
            for number, row in enumerate(rows)
            for segment in row["image_segments"].tolist()
        ]
        columns: dict[str, Any] = {
            name: _stacked(
                [row[name] for row in rows], num_samples if padding is None else length, padding
            )
            for name, padding in paddings.items()
        }
        return cls(
            __key__=list(chain.from_iterable(pack.__keys__ for pack in packs)),
            __restore_key__=tuple(pack.__restore_key__ for pack in packs),
            __sources__=tuple(chain.from_iterable(p.__sources__ or () for p in packs)) or None,
            max_seqlen=max(pack.max_seqlen for pack in packs),
            images=list(chain.from_iterable(pack.images for pack in packs)),
            image_segments=torch.from_numpy(np.array(images, np.int64).reshape(-1, 2)),
            **columns,
        )


_PER_TOKEN = ("input_ids", "labels", "position_ids", "segment_ids", "loss_weights")
_PER_SAMPLE = ("cu_seqlens", "cu_seqlens_padded")


def _row(pack: PackedSample) -> dict[str, torch.Tensor]:
    """Returns the fields of which a batch has a row for each pack."""
    return {name: getattr(pack, name) for name in (*_PER_TOKEN, *_PER_SAMPLE, "image_segments")}


def _joined(packs: Sequence[PackedSample]) -> dict[str, torch.Tensor]:
    """Puts packs behind each other; segments and boundaries are counted on."""
    rows = []
    segments = tokens = places = 0
    for pack in packs:
        row = _row(pack)
        first = 1 if segments else 0  # the boundary between two packs is one of both
        row["segment_ids"] = torch.where(pack.segment_ids > 0, pack.segment_ids + segments, 0)
        row["cu_seqlens"] = pack.cu_seqlens[first:] + tokens
        row["cu_seqlens_padded"] = pack.cu_seqlens_padded[first:] + places
        row["image_segments"] = pack.image_segments + segments
        segments += len(pack.__keys__)
        tokens, places = int(row["cu_seqlens"][-1]), int(row["cu_seqlens_padded"][-1])
        rows.append(row)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _stacked(rows: Sequence[torch.Tensor], length: int, padding: float | None) -> torch.Tensor:
    """Stacks rows; short ones are filled with `padding`, None for their last value."""
    # Through numpy, whose calls take half of the time of torch's.
    parts = []
    for row in rows:
        array = row.numpy()
        parts.append(array)
        if len(array) < length:
            fill = array[-1] if padding is None else padding
            parts.append(np.full(length - len(array), fill, array.dtype))
    stacked = np.concatenate(parts, dtype=parts[0].dtype, casting="unsafe")
    return torch.from_numpy(stacked.reshape(len(rows), length))


def pack_samples(samples: Sequence[Any], packing: Packing) -> PackedSample:
    """Puts encoded samples into one sequence.

    Args:
        samples: dataclasses, dicts or NamedTuples with `input_ids` (t,), and if they like `labels`
            (t,), `loss_mask` (t,) and images: `images` (a list, or (n, C, H, W)), `image` or
            `pixel_values`. Without labels all tokens but the first are predicted.
        packing: alignment, loss mode, labels, and the capacity that must not be exceeded.

    Returns:
        The pack. Its key lists those of the samples.

    Raises:
        FatalSampleError: A sample has no `input_ids`, its fields do not fit together, or all
            together are above the capacity; names the sample.
    """
    if not samples:
        raise ValueError("pack_samples: there is no sample")
    columns = _Columns(samples)
    input_ids, lengths = columns.joined("input_ids")
    sizes = np.array(lengths)
    align = packing.token_alignment
    padded_sizes = sizes if align == 1 else -(-sizes // align) * align
    ends = np.cumsum(padded_sizes)
    starts, total = ends - padded_sizes, int(ends[-1])
    _check_capacity(samples, lengths, total, packing)
    positions = np.repeat(starts, padded_sizes)
    np.subtract(np.arange(total), positions, out=positions)
    segments = np.repeat(np.arange(1, len(samples) + 1), padded_sizes)
    is_padding = None
    if align > 1:
        is_padding = positions >= np.repeat(sizes, padded_sizes)
        positions[is_padding] = segments[is_padding] = 0
        joined, input_ids = input_ids, np.full(total, packing.pad_id)
        input_ids[~is_padding] = joined
    labels = _labels(columns, input_ids, starts, sizes, is_padding, packing)
    boundaries = np.zeros((2, len(samples) + 1), np.int32)
    boundaries[1, 1:] = ends
    boundaries[0, 1:] = ends if align == 1 else np.cumsum(sizes)
    return PackedSample(
        **_names_and_images(columns),
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segments),
        loss_weights=torch.from_numpy(
            _loss_weights(columns, labels, starts, sizes, padded_sizes, packing)
        ),
        cu_seqlens=torch.from_numpy(boundaries[0]),
        cu_seqlens_padded=torch.from_numpy(boundaries[1]),
        max_seqlen=-(-max(lengths) // align) * align,
    )


class _Columns:
    """The fields of the samples of a pack, each looked up in all samples at once."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples
        # The names of fields; None where a sample may make up others when it is asked.
        self._names: set[str] | None = None
        self._kinds = set(map(type, samples))
        self._are_dicts = self._kinds == {dict}
        if self._are_dicts:
            self._names = set().union(*samples)
        elif all(getattr(kind, "__getattr__", None) is Sample.__getattr__ for kind in self._kinds):
            self._names = set().union(*map(vars, samples))

    def __getitem__(self, name: str) -> list[Any] | None:
        """Returns a field of each sample, None where it has none; None if all lack it."""
        is_known = self._names is None or name in self._names
        if self._are_dicts:
            found = list(map(dict.get, self.samples, repeat(name))) if is_known else []
        else:
            is_known = is_known or any(hasattr(kind, name) for kind in self._kinds)
            found = [field_of(sample, name) for sample in self.samples] if is_known else []
        return None if set(map(type, found)) <= {type(None)} else found

    def joined(self, name: str) -> tuple[Int64Array, list[int]]:
        """Returns what a field has for all tokens, in a row, and for how many of each sample.

        Raises:
            FatalSampleError: A sample lacks the field, or the field has other dimensions.
        """
        values: list[Any] = self[name] or [None] * len(self.samples)
        kinds = set(map(type, values))
        # What has other dimensions is named below.
        with suppress(RuntimeError, ValueError):
            if kinds == {torch.Tensor}:
                joined = np.asarray(torch.cat(values).numpy(), np.int64)
                if joined.ndim == 1:
                    return joined, list(map(_NUM_VALUES, values))
            elif kinds == {np.ndarray}:
                joined = np.concatenate(values, dtype=np.int64, casting="unsafe")
                if joined.ndim == 1:
                    return joined, list(map(len, values))
        arrays = list(map(_array, self.samples, repeat(name), values))
        return np.concatenate(arrays, dtype=np.int64, casting="unsafe"), list(map(len, arrays))


def _names_and_images(columns: _Columns) -> dict[str, Any]:
    """What a pack has besides its tokens."""
    samples, none = columns.samples, [()] * len(columns.samples)
    keys = [str(key or "") for key in columns["__key__"] or none]
    restore_keys = [key or () for key in columns["__restore_key__"] or ()] or none
    sources = filter(None, columns["__sources__"] or ())
    images: list[list[Any]] = []
    if any(columns[name] is not None for name in IMAGE_FIELDS):
        images = list(map(images_of, samples))
    numbers = [number for number, own in enumerate(images, 1) for _ in own]
    return {
        "__key__": ",".join(keys),
        "__restore_key__": ("pack", *restore_keys),
        "__sources__": tuple(chain.from_iterable(sources)) or None,
        "__keys__": keys,
        "images": list(chain.from_iterable(images)),
        "image_segments": torch.from_numpy(np.array(numbers, np.int64)),
    }


def slice_sample(sample: Any, start: int, stop: int) -> Any:
    """Cuts tokens `start` to `stop` out of an encoded sample, a copy.

    Raises:
        FatalSampleError: It has no `input_ids`; or it has images, and which of them belong to the
            tokens only the task encoder knows.
    """
    if field_of(sample, "input_ids") is None:
        raise FatalSampleError.from_sample(
            sample, f"{type(sample).__name__} has no input_ids to cut; override slice_sample"
        )
    if images_of(sample):
        raise FatalSampleError.from_sample(
            sample,
            "it is longer than a pack and has images; which belong to the tokens that are kept "
            'only you know. Override slice_sample, or use overlong="drop" or "alone"',
        )
    cut = {
        name: value[start:stop]
        for name in TOKEN_FIELDS
        if (value := field_of(sample, name)) is not None
    }
    return _replaced(sample, cut)


def _replaced(sample: Any, values: dict[str, Any]) -> Any:
    if isinstance(sample, dict):
        return {**sample, **values}
    if isinstance(sample, tuple) and hasattr(sample, "_replace"):
        return sample._replace(**values)
    copied = copy.copy(sample)
    for name, value in values.items():
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
    return array


def _per_token(sample: Any, name: str, value: Any, size: int) -> npt.NDArray[Any]:
    array = _array(sample, name, value)
    if len(array) != size:
        raise FatalSampleError.from_sample(
            sample, f"it has {size} input_ids and {len(array)} {name}; give one per token"
        )
    return array


def _labels(
    columns: _Columns,
    input_ids: Int64Array,
    starts: Int64Array,
    sizes: Int64Array,
    is_padding: BoolArray | None,
    packing: Packing,
) -> Int64Array:
    """Returns the labels of all samples."""
    labels, ends = input_ids.copy(), starts + sizes
    if packing.labels_are_shifted:
        labels[:-1] = input_ids[1:]
        labels[ends - 1] = packing.ignore_index
    values = columns["labels"] or ()
    triples = zip(starts.tolist(), ends.tolist(), values, strict=bool(values))
    for place, (start, end, value) in enumerate(triples):
        if value is not None:
            own = _per_token(columns.samples[place], "labels", value, end - start)
            labels[start:end] = own
    if not packing.labels_are_shifted:
        labels[starts] = packing.ignore_index  # nothing of a sample predicts its first token
    if is_padding is not None:
        labels[is_padding] = packing.ignore_index
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
    columns: _Columns,
    labels: Int64Array,
    starts: Int64Array,
    sizes: Int64Array,
    padded_sizes: Int64Array,
    packing: Packing,
) -> npt.NDArray[np.float32]:
    """What each token's loss counts, shape (T,)."""
    samples, masks = columns.samples, columns["loss_mask"]
    has_loss = labels != packing.ignore_index
    own = [1.0]
    if any(columns[name] is not None for name in _LOSS_WEIGHTS):
        own = list(map(loss_weight_of, samples))
    if packing.loss == "token" and masks is None and set(own) == {1.0}:
        return np.asarray(has_loss, np.float32)
    weights = has_loss.astype(np.float64)
    quadruples = zip(samples, starts.tolist(), sizes.tolist(), masks or (), strict=bool(masks))
    for sample, start, size, mask in quadruples:
        if mask is not None:
            weights[start : start + size] *= _per_token(sample, "loss_mask", mask, size)
    targets = np.add.reduceat((weights != 0).astype(np.int64), starts)
    modes = [token_weight(packing.loss, number) for number in targets.tolist()]
    return np.asarray(weights * np.repeat(np.multiply(own, modes), padded_sizes), np.float32)


def loss_weight_of(sample: Any) -> float:
    """Returns the loss weight that an encoded sample carries; 1 if it has none."""
    for name in _LOSS_WEIGHTS:
        value = field_of(sample, name)
        if value is not None:
            return float(value)
    return 1.0
