"""Reads a few small samples from each of many datasets at once.

A block of few samples costs nearly as much as a block of many: dozens of calls of numpy. So the
samples that a blend of many sources needs next are looked up and parsed together; only reading is
done range by range.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import numpy as np

from energon_lite.core.arrays import BoolArray, Int64Array, UInt8Array
from energon_lite.storage.large_files import CACHED_ONLY
from energon_lite.storage.shards import MAX_GAP_BYTES, Block, Ranges, ShardReader
from energon_lite.storage.tar import BLOCK, OneFileEach, block_members

# First byte in a shard and number of the shard in one integer.
_SHARD = 1 << 40
# One in this number of reads may wait for storage; where more have to, each reader reads ahead.
_WAITS = 4


def read_at_once(
    requests: Sequence[tuple[ShardReader, Int64Array, Int64Array]],
) -> tuple[Block, list[bool]]:
    """Reads samples of one file each, most of which are in the page cache.

    Args:
        requests: readers, the numbers of samples that each of them reads, and the turns of these
            among the samples of all; both of shape (N,).

    Returns:
        A block of the samples of all requests, by their turns, and which requests are in it. If a
        sample cannot be read at once, or has other files, then the block has nothing of its
        request: the reader itself reports what is wrong, and waits if it has to.
    """
    found = [reader.ranges_at_once(indices) for reader, indices, _ in requests]
    parts = [part for part in found if part is not None]
    is_read = np.array([part is not None for part in found], dtype=bool)
    shards = [shard for part in parts for shard in part.shards]
    if not parts:
        return Block(memoryview(b""), OneFileEach([], [], []), [], []), is_read.tolist()
    firsts = np.cumsum([0, *(len(part.shards) for part in parts)])[:-1]
    sizes = [len(part.places) for part in parts]
    owners, *columns = map(np.concatenate, zip(*(part[1:] for part in parts), strict=True))
    owners += np.repeat(firsts, sizes)
    turns = [turns for (*_, turns), is_in in zip(requests, is_read, strict=True) if is_in]
    order = np.argsort(np.concatenate(turns))
    rows = Ranges(shards, *(column[order] for column in (owners, *columns)))
    numbers = np.repeat(np.flatnonzero(is_read), sizes)[order]
    data, shifts, is_bad = _filled(rows)
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
    names = [shards[owner].name for owner in rows.owners.tolist()]
    return Block(data.data, members, names, rows.places.tolist()), is_read.tolist()


def _filled(rows: Ranges) -> tuple[UInt8Array, Int64Array, BoolArray]:
    """Reads samples, neighbours in a shard at once.

    Returns:
        The bytes, a multiple of 512; what must be added to a byte of a sample's shard to find it
        there, shape (N,); and which samples could not be read at once, shape (N,).
    """
    order = np.argsort(rows.owners * _SHARD + rows.starts)
    owners, starts, stops = rows.owners[order], rows.starts[order], rows.stops[order]
    is_far = (owners[1:] != owners[:-1]) | (starts[1:] - stops[:-1] > MAX_GAP_BYTES)
    firsts = np.flatnonzero(np.concatenate([[True], is_far]))
    lasts = np.append(firsts[1:], len(order)) - 1
    bases, sizes = starts[firsts], stops[lasts] - starts[firsts]
    ends = np.cumsum(sizes)
    descriptors = [shard.descriptor for shard in rows.shards]
    data = np.empty(-(-int(ends[-1]) // BLOCK) * BLOCK, dtype=np.uint8)
    target, at, failed = data.data, 0, []
    num_waits = len(firsts) // _WAITS + 1
    runs = zip(owners[firsts].tolist(), bases.tolist(), ends.tolist(), strict=True)
    for number, (owner, base, end) in enumerate(runs):
        own, at = target[at:end], end
        if not _is_filled(descriptors[owner], own, base, CACHED_ONLY):
            num_waits -= 1
            if num_waits < 0 or not _is_filled(descriptors[owner], own, base, 0):
                failed.append(number)
    lengths = lasts - firsts + 1
    shifts, is_bad = np.empty_like(starts), np.empty(len(order), dtype=bool)
    shifts[order] = np.repeat(ends - sizes - bases, lengths)
    is_bad[order] = np.repeat(np.isin(np.arange(len(firsts)), failed), lengths)
    return data, shifts, is_bad


def _is_filled(descriptor: int, target: memoryview, start: int, flags: int) -> bool:
    with suppress(OSError):
        return os.preadv(descriptor, [target], start, flags) == len(target)
    return False
