"""Reads a few small samples from each of many datasets at once.

A block of few samples costs nearly as much as a block of many: dozens of calls of numpy. So the
samples that a blend of many sources needs next are looked up and parsed together; only reading is
done range by range. What is not in the page cache is asked for first, all of it, and then waited
for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import BoolArray, Int64Array, UInt8Array, argsort
from energon_lite.core.errors import Ignored
from energon_lite.storage.large_files import CACHED_ONLY
from energon_lite.storage.shards import MAX_GAP_BYTES, Block, Ranges, ShardReader, will_need
from energon_lite.storage.tar import BLOCK, OneFileEach, block_members

# First byte in a shard and number of the shard in one integer.
_SHARD = 1 << 40
# Storage is slow where more than one in this number of reads has to wait for it.
_WAITS = 16


def read_at_once(
    requests: Sequence[tuple[ShardReader, Int64Array, Int64Array]],
) -> tuple[Block, list[bool], bool]:
    """Reads samples of one file each.

    Args:
        requests: readers, the numbers of samples that each of them reads, and the turns of these
            among the samples of all; both of shape (N,).

    Returns:
        The samples of the requests that could be read, by their turns; which requests these are;
        and whether many reads had to wait for storage. If a sample of a request fails, or has other
        files, the block has nothing of it: the reader itself reports what is wrong, or tries again.
    """
    found = [reader.ranges_at_once(indices) for reader, indices, _ in requests]
    parts = [part for part in found if part is not None]
    is_read = np.array([part is not None for part in found], dtype=bool)
    if not parts:
        nothing = Block(memoryview(b""), OneFileEach([], [], []), [], [])
        return nothing, is_read.tolist(), False
    turns = [turns for (*_, turns), is_in in zip(requests, is_read, strict=True) if is_in]
    order = argsort(np.concatenate(turns))
    shards, *columns = _all_ranges(parts)
    rows = Ranges(shards, *(column[order] for column in columns))
    sizes = [len(part.places) for part in parts]
    numbers = np.repeat(np.flatnonzero(is_read), sizes)[order]
    data, shifts, is_bad, is_slow = _filled(rows)
    while True:
        is_read[numbers[is_bad]] = False
        is_kept = is_read[numbers]
        if not is_kept.all():
            numbers, shifts = numbers[is_kept], shifts[is_kept]
            rows = Ranges(shards, *(column[is_kept] for column in rows[1:]))
        members, long = block_members(data, rows.starts + shifts, rows.stops + shifts, -shifts)
        if type(members) is OneFileEach:
            break
        is_bad = np.array([type(own) is not list or len(own) != 1 for own in members], dtype=bool)
        is_bad[long] = True
        if not is_bad.any():
            files = [*zip(*chain.from_iterable(members), strict=True)] or [()] * 3
            members = OneFileEach(*map(list, files))
            break
    names = np.array([*(shard.name for shard in shards), ""], dtype=object)[rows.owners].tolist()
    block = Block(data.data, members, names, rows.places.tolist())
    return block, is_read.tolist(), is_slow


def advise_at_once(requests: Sequence[tuple[ShardReader, Int64Array]]) -> None:
    """Asks the kernel to read samples into its page cache; does not wait for them.

    Args:
        requests: readers, and the numbers of samples, shape (N,), that each of them reads later.
    """
    found = [reader.ranges_at_once(indices) for reader, indices in requests]
    parts = [part for part in found if part is not None]
    if parts:
        runs = _runs_of(_all_ranges(parts))
        starts, stops = runs.starts.tolist(), runs.stops.tolist()
        deque(map(will_need, runs.descriptors, starts, stops), maxlen=0)


def _all_ranges(parts: Sequence[Ranges]) -> Ranges:
    """Returns samples of several readers, one reader after the other."""
    shards = [shard for part in parts for shard in part.shards]
    firsts = np.cumsum([0, *(len(part.shards) for part in parts)])[:-1]
    owners, *columns = map(np.concatenate, zip(*(part[1:] for part in parts), strict=True))
    owners += np.repeat(firsts, [len(part.places) for part in parts])
    return Ranges(shards, owners, *columns)


class _Runs(NamedTuple):
    """Neighbours in a shard: columns of shape (R,), and the order of the samples in them, (N,)."""

    order: Int64Array
    lengths: Int64Array  # samples
    descriptors: list[int]
    starts: Int64Array  # first byte in the shard
    stops: Int64Array


def _runs_of(rows: Ranges) -> _Runs:
    """Returns which samples are read at once, sorted by place."""
    order = np.argsort(rows.owners * _SHARD + rows.starts)
    owners, starts, stops = rows.owners[order], rows.starts[order], rows.stops[order]
    is_far = (owners[1:] != owners[:-1]) | (starts[1:] - stops[:-1] > MAX_GAP_BYTES)
    firsts = np.flatnonzero(np.concatenate([[True], is_far]))
    lasts = np.append(firsts[1:], len(order)) - 1
    descriptors = [rows.shards[owner].descriptor for owner in owners[firsts].tolist()]
    return _Runs(order, lasts - firsts + 1, descriptors, starts[firsts], stops[lasts])


def _filled(rows: Ranges) -> tuple[UInt8Array, Int64Array, BoolArray, bool]:
    """Reads samples, neighbours in a shard at once.

    Returns:
        The bytes, a multiple of 512; what must be added to a byte of a sample's shard to find it
        there, shape (N,); which samples could not be read, shape (N,); and whether many reads had
        to wait for storage.
    """
    runs = _runs_of(rows)
    sizes = runs.stops - runs.starts
    ends = np.cumsum(sizes)
    data = np.empty(-(-int(ends[-1]) // BLOCK) * BLOCK, dtype=np.uint8)
    edges = [0, *ends.tolist()]
    targets = [data.data[at:end] for at, end in pairwise(edges)]
    reads = [*zip(runs.descriptors, targets, runs.starts.tolist(), strict=True)]
    missing = [number for number, read in enumerate(reads) if not _is_filled(*read, CACHED_ONLY)]
    for number in missing:
        descriptor, target, start = reads[number]
        will_need(descriptor, start, start + len(target))
    failed = [number for number in missing if not _is_filled(*reads[number], 0)]
    shifts, is_bad = np.empty_like(runs.order), np.zeros(len(runs.order), dtype=bool)
    shifts[runs.order] = np.repeat(ends - sizes - runs.starts, runs.lengths)
    if failed:
        is_bad[runs.order] = np.repeat(np.isin(np.arange(len(reads)), failed), runs.lengths)
    return data, shifts, is_bad, _WAITS * len(missing) > len(reads)


def _is_filled(descriptor: int, target: memoryview, start: int, flags: int) -> bool:
    with Ignored(OSError):
        return os.preadv(descriptor, [target], start, flags) == len(target)
    return False
