"""Reads samples out of indexed tar shards, many at a time.

The order is known ahead, so a block of samples is read as few long ranges: neighbours in a shard
come with one `pread`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import BoolArray, Int64Array, UInt8Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.key_check import KeyCheck
from energon_lite.storage.open_shards import MAX_OPEN, OpenShards
from energon_lite.storage.tar_blocks import block_members

# A block is cut where its samples reach this size, so that a look-ahead is bounded in bytes too.
MAX_BLOCK_BYTES = 1 << 20
# Bytes between two samples that are cheaper to read along than to ask the kernel again.
MAX_GAP_BYTES = 8 << 10


class Block(NamedTuple):
    """Samples that were read together.

    Attributes:
        data: the bytes of all of them.
        members: for each sample (name, first byte, byte after the last) of its files, the bytes
            being those of `data`; or the error that reading it gave.
        shards: for each sample the name of its shard.
        places: for each sample its number in the shard.
    """

    data: memoryview
    members: list[Any]
    shards: list[str]
    places: list[int]


class ShardReader:
    """Random access to the samples of a list of shards.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`.
        counts: samples of each shard.
        excluded: positions, ascending, in the concatenated shards that do not count as samples.
        max_open: files that stay open; 0 opens each anew for every block.
        tar_file_ids: number of each shard in `index.sqlite`, to compare keys with it.

    Attributes:
        num_samples: samples that count; they are numbered 0..num_samples-1.
    """

    def __init__(
        self,
        root: Path,
        shards: Sequence[str],
        counts: Sequence[int],
        excluded: Sequence[int] = (),
        max_open: int = MAX_OPEN,
        tar_file_ids: Sequence[int] | None = None,
    ) -> None:
        self.root = root
        self.max_open = max_open
        self.shards = tuple(shards)
        self._names = np.array([*shards, ""], dtype=object)[:-1]
        self._counts = tuple(counts)
        self._starts = np.cumsum([0, *counts], dtype=np.int64)
        # The i-th excluded position has `excluded[i] - i` counted samples before it.
        self._excluded = np.asarray(excluded, dtype=np.int64) - np.arange(len(excluded))
        self.num_samples = int(self._starts[-1]) - len(excluded)
        self._keys = KeyCheck(root, self.shards, tar_file_ids)
        self._files = OpenShards(root, self.shards, self._counts, self._keys)

    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        """Reads the samples at `indices`, shape (N,), or the first of them up to `max_bytes`.

        The smaller the block may be, the less is read along between two samples.

        Returns:
            A block of at least one sample, if N > 0.
        """
        positions = indices
        if len(self._excluded):
            positions = indices + np.searchsorted(self._excluded, indices, side="right")
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        shard_numbers = np.searchsorted(self._starts, ascending, side="right") - 1
        places = ascending - self._starts[shard_numbers]
        starts, stops, errors = self._extents(shard_numbers, places)
        sizes = np.empty_like(starts)
        sizes[order] = stops - starts
        taken = max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes)))
        if taken < len(indices):
            kept = order < taken
            order, shard_numbers, places, starts, stops = (
                x[kept] for x in (order, shard_numbers, places, starts, stops)
            )
        max_gap = MAX_GAP_BYTES * max_bytes // MAX_BLOCK_BYTES
        runs = _runs(shard_numbers, starts, stops, max_gap)
        data, shifts, lost = self._read_runs(runs, shard_numbers, places, starts, stops, errors)
        self._files.close_down_to(self.max_open)
        # From ascending order back to that of the indices; an empty range for what was not read.
        back = np.argsort(order)
        firsts, lasts = (starts + shifts)[back], (stops + shifts)[back]
        for row in lost:
            lasts[order[row]] = firsts[order[row]]
        members, long = block_members(data, firsts, lasts, -shifts[back])
        for row, error in lost.items():
            members[order[row]] = error
        numbers, places = shard_numbers[back], places[back]
        if long:
            self._keys.compare(members, numbers, places, long)
        return Block(data.data, members, self._names[numbers].tolist(), places.tolist())

    def _extents(
        self, shard_numbers: Int64Array, places: Int64Array
    ) -> tuple[Int64Array, Int64Array, dict[int, Exception]]:
        """Looks up byte ranges in the shards' indices; a shard that has none gives its error."""
        starts = np.zeros(len(places), dtype=np.int64)
        stops = np.zeros(len(places), dtype=np.int64)
        errors: dict[int, Exception] = {}
        for first, last in _groups(shard_numbers[1:] != shard_numbers[:-1]):
            number = int(shard_numbers[first])
            try:
                offsets = self._files.offsets(number)
            except (OSError, DatasetFormatError) as error:
                errors[number] = error
                continue
            starts[first:last] = offsets[places[first:last]]
            stops[first:last] = offsets[places[first:last] + 1]
        return starts, stops, errors

    def _read_runs(
        self,
        runs: list[tuple[int, int]],
        shard_numbers: Int64Array,
        places: Int64Array,
        starts: Int64Array,
        stops: Int64Array,
        errors: dict[int, Exception],
    ) -> tuple[UInt8Array, Int64Array, dict[int, Exception]]:
        """Reads all ranges, given in ascending order, into one buffer.

        Returns:
            The buffer, a multiple of 512 bytes; what must be added to a place in its file to find
            it there, shape (N,); and the errors of the samples that could not be read.
        """
        lost: dict[int, Exception] = {}
        if self._files.overrun:
            runs = self._inside_files(runs, shard_numbers, places, stops, lost)
        sizes = [int(stops[last - 1] - starts[first]) for first, last in runs]
        data = np.empty(sum(sizes), dtype=np.uint8)
        target = data.data
        shifts = np.zeros(len(starts), dtype=np.int64)
        at = 0
        for (first, last), size in zip(runs, sizes, strict=True):
            number, base = int(shard_numbers[first]), int(starts[first])
            if number in errors:
                lost.update(dict.fromkeys(range(first, last), errors[number]))
                continue
            own = target[at : at + size]
            error = self._files.read(number, own, base)
            if error is not None:
                run = slice(first, last)
                again = self._files.read_again(number, own, starts[run], stops[run], error)
                lost.update((first + row, final) for row, final in again.items())
            shifts[first:last] = at - base
            at += size
        return data, shifts, lost

    def _inside_files(
        self,
        runs: list[tuple[int, int]],
        shard_numbers: Int64Array,
        places: Int64Array,
        stops: Int64Array,
        lost: dict[int, Exception],
    ) -> list[tuple[int, int]]:
        """Shortens runs to the samples that end inside their file; puts the others into `lost`."""
        inside = []
        for first, last in runs:
            number = int(shard_numbers[first])
            end = self._files.end_of(number)
            while end is not None and last > first and stops[last - 1] > end:
                last -= 1
                place, stop = int(places[last]), int(stops[last])
                lost[last] = self._files.cut_short(number, place, stop)
            if last > first:
                inside.append((first, last))
        return inside


def _runs(
    shard_numbers: Int64Array, starts: Int64Array, stops: Int64Array, max_gap: int
) -> list[tuple[int, int]]:
    """Groups samples, ascending by position, that one read should bring.

    Example:
        With 1,000-byte samples of one shard at bytes 0, 1000, 1000, 90000 and gaps of 8,192 bytes
        the groups are (0, 3) and (3, 4).
    """
    return _groups((shard_numbers[1:] != shard_numbers[:-1]) | (starts[1:] - stops[:-1] > max_gap))


def _groups(is_cut: BoolArray) -> list[tuple[int, int]]:
    """Returns first and last + 1 of the runs between cuts; a cut lies before position i + 1."""
    edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(is_cut) + 1]
    return list(pairwise(edges))
