"""Reads a few small samples from each of many datasets at once.

A block of few samples costs nearly as much as a block of many: dozens of calls of numpy. So the
samples that a blend of many sources needs next are looked up and parsed together; only reading is
done range by range. What is not in the page cache is asked for first, all of it, and then waited
for.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import numpy as np

from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.formats.shards import Block, Rows, ShardReader
from energon_lite.formats.tar import OneFileEach, block_members
from energon_lite.storage.byte_file import ByteFile
from energon_lite.storage.ranges import Runs, read_runs, runs_of

# Storage is slow where more than one in this number of reads has to wait for it.
_WAITS = 16


class _Files(dict[int, ByteFile]):
    """Open files of the shards of several readers, numbered one reader after the other.

    Args:
        readers: the readers.
    """

    def __init__(self, readers: Sequence[ShardReader]) -> None:
        super().__init__()
        self._readers = readers
        self.firsts = [0, *accumulate(len(reader.shards) for reader in readers)]

    def __missing__(self, number: int) -> ByteFile:
        reader = bisect(self.firsts, number) - 1
        file = self[number] = self._readers[reader].file(number - self.firsts[reader])
        return file


def _together(
    readers: Sequence[ShardReader], parts: Sequence[Rows]
) -> tuple[Rows, Runs, Callable[[int], ByteFile]]:
    """Puts the samples of several readers together.

    Returns:
        The samples, with numbers of shards and of samples that count on from reader to reader;
        which of them are read at once; and what opens a shard.
    """
    files = _Files(readers)
    sizes = [len(part.order) for part in parts]
    order, shards, *columns = map(np.concatenate, zip(*parts, strict=True))
    order += np.repeat([0, *accumulate(sizes[:-1])], sizes)
    shards += np.repeat(files.firsts[:-1], sizes)
    rows = Rows(order, shards, *columns)
    return rows, runs_of(rows.shards, rows.starts, rows.stops), files.__getitem__


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
    found = [reader.extents(indices, is_patient=False) for reader, indices, _ in requests]
    is_read = np.array([not lost for _, lost in found], dtype=bool)
    kept = np.flatnonzero(is_read).tolist()
    if not kept:
        nothing = Block(memoryview(b""), OneFileEach([], [], []), [], [])
        return nothing, is_read.tolist(), False
    readers, parts = [requests[i][0] for i in kept], [found[i][0] for i in kept]
    rows, runs, file_of = _together(readers, parts)
    read = read_runs(runs, file_of)
    for reader in readers:
        reader.close_files()
    numbers = np.repeat(kept, [len(part.order) for part in parts])
    for run in read.errors:
        is_read[numbers[runs.firsts[run] : runs.lasts[run]]] = False
    turns = np.concatenate([requests[i][2] for i in kept])
    order = argsort(turns[rows.order])
    rows, shifts, numbers = rows.taken(order), read.shifts[order], numbers[order]
    members = block_members(read.data, rows.starts + shifts, rows.stops + shifts, -shifts)
    if type(members) is not OneFileEach or read.errors:
        is_one = np.array([type(own) is list and len(own) == 1 for own in members], dtype=bool)
        is_read[numbers[~is_one]] = False
        kept_rows = np.flatnonzero(is_read[numbers])
        rows = rows.taken(kept_rows)
        members = chain.from_iterable(map(members.__getitem__, kept_rows.tolist()))
        members = OneFileEach(*map(list, [*zip(*members, strict=True)] or [()] * 3))
    all_names = np.array([name for reader in readers for name in reader.shards], dtype=object)
    block = Block(read.data.data, members, all_names[rows.shards].tolist(), rows.places.tolist())
    return block, is_read.tolist(), _WAITS * read.num_waits > len(runs.owners)
