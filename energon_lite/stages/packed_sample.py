"""Several encoded samples in one sequence, and batches of such."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from energon_lite.batching.rules import Packing
from energon_lite.core.edataclass import edataclass
from energon_lite.core.samples import Batch, Sample


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
        length = max(len(row.input_ids) for row in rows)
        if packing and packing.pads_to_capacity:
            length = max(length, packing.tokens * len(packs) // len(rows))
        ignore_index, pad_id = (packing.ignore_index, packing.pad_id) if packing else (-100, 0)
        num_samples = max(len(row.cu_seqlens) for row in rows)
        images = [
            (number, segment)
            for number, row in enumerate(rows)
            for segment in row.image_segments.tolist()
        ]
        return cls(
            __key__=list(chain.from_iterable(pack.__keys__ for pack in packs)),
            __restore_key__=tuple(pack.__restore_key__ for pack in packs),
            __sources__=tuple(chain.from_iterable(p.__sources__ or () for p in packs)) or None,
            input_ids=_stacked([row.input_ids for row in rows], length, pad_id),
            labels=_stacked([row.labels for row in rows], length, ignore_index),
            position_ids=_stacked([row.position_ids for row in rows], length, 0),
            segment_ids=_stacked([row.segment_ids for row in rows], length, 0),
            loss_weights=_stacked([row.loss_weights for row in rows], length, 0),
            cu_seqlens=_stacked([row.cu_seqlens for row in rows], num_samples, None),
            cu_seqlens_padded=_stacked([row.cu_seqlens_padded for row in rows], num_samples, None),
            max_seqlen=max(pack.max_seqlen for pack in packs),
            images=list(chain.from_iterable(pack.images for pack in packs)),
            image_segments=torch.tensor(images, dtype=torch.int64).reshape(-1, 2),
        )


class _Row(NamedTuple):
    """One row of a batch; the fields are those of a pack."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    loss_weights: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    image_segments: torch.Tensor


def _row(pack: PackedSample) -> _Row:
    return _Row(*(getattr(pack, name) for name in _Row._fields))


def _joined(packs: Sequence[PackedSample]) -> _Row:
    """Puts packs behind each other; segments and boundaries are counted on."""
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in _Row._fields}
    segments = tokens = places = 0
    for pack in packs:
        row = _row(pack)
        segment_ids = torch.where(row.segment_ids > 0, row.segment_ids + segments, 0)
        first = 1 if segments else 0  # the boundary between two packs is one of both
        row = row._replace(
            segment_ids=segment_ids,
            cu_seqlens=row.cu_seqlens[first:] + tokens,
            cu_seqlens_padded=row.cu_seqlens_padded[first:] + places,
            image_segments=row.image_segments + segments,
        )
        segments += len(pack.__keys__)
        tokens, places = int(row.cu_seqlens[-1]), int(row.cu_seqlens_padded[-1])
        for name, value in zip(_Row._fields, row, strict=True):
            columns[name].append(value)
    return _Row(*(torch.cat(column) for column in columns.values()))


def _stacked(rows: Sequence[torch.Tensor], length: int, padding: float | None) -> torch.Tensor:
    """Stacks rows; short ones are filled with `padding`, None for their last value."""
    # Through numpy, which takes a tenth of torch's time to write a slice.
    arrays = [row.numpy() for row in rows]
    stacked = np.empty((len(rows), length), dtype=arrays[0].dtype)
    for target, array in zip(stacked, arrays, strict=True):
        target[: len(array)] = array
        target[len(array) :] = array[-1] if padding is None else padding
    return torch.from_numpy(stacked)
