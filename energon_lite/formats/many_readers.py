"""Reads a few small samples from each of many datasets at once.

A block of few samples costs nearly as much as a block of many: dozens of calls of numpy. So the
samples that a blend of many sources needs next are looked up and parsed together; only reading is
done range by range. What is not in the page cache is asked for first, all of it, and then waited
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.core.errors import DatasetFormatError, pass_on
from energon_lite.formats.shards import Block, Rows, ShardReader, groups
from energon_lite.formats.tar import OneFileEach, block_members
from energon_lite.storage.byte_file import ByteFile
from energon_lite.storage.ranges import read_runs, runs_of

# Storage is slow where more than one in this number of reads has to wait for it.
_WAITS = 16

Requests = Sequence[tuple[ShardReader, Int64Array, Int64Array]]


def _rows_of(requests: Requests) -> tuple[Rows, Int64Array, dict[int, ByteFile], dict[int, str]]:
    """Looks up samples in the indexes of their shards.

    Returns:
        The samples of the requests that could be looked up, with numbers of shards and of samples
        that count on from request to request; the number of the request of each, (N,); and the
        open files and the names of the shards.
    """
    sizes = [len(indices) for _, indices, _ in requests]
    numbers = np.repeat(np.arange(len(requests)), sizes)
    located = [reader.locate(indices) for reader, indices, _ in requests]
    for (reader, *_), (shards_of_it, _) in zip(requests, located, strict=True):
        reader.prefetch(shards_of_it)
    firsts = [0, *accumulate(len(reader.shards) for reader, *_ in requests)]
    shards, places = map(np.concatenate, zip(*located, strict=True))
    shards = shards + np.repeat(firsts[:-1], sizes)
    order = np.lexsort((places, shards))
    numbers, shards, places = numbers[order], shards[order], places[order]
    starts, stops = np.zeros((2, len(order)), np.int64)
    files, names, failed = dict[int, ByteFile](), dict[int, str](), set[int]()
    for first, last in groups(shards):
        request, shard = int(numbers[first]), int(shards[first])
        reader, own = requests[request][0], shard - firsts[request]
        names[shard] = reader.shards[own]
        try:
            offsets = reader.offsets(own, is_patient=False)
            files[shard], end = reader.file(own), reader.end_of(own)
        except (OSError, DatasetFormatError) as error:
            pass_on(error)
            failed.add(request)
            continue
        here = places[first:last]
        starts[first:last], stops[first:last] = offsets[here], offsets[here + 1]
        if end is not None and stops[last - 1] > end:
            failed.add(request)
    kept = np.isin(numbers, [*failed], invert=True)
    return Rows(order, shards, places, starts, stops).taken(kept), numbers[kept], files, names


def read_at_once(requests: Requests) -> tuple[Block, list[bool], bool]:
    """Reads samples of one file each.

    Args:
        requests: readers, the numbers of samples that each of them reads, and the turns of these
            among the samples of all; both of shape (N,).

    Returns:
        The samples of the requests that could be read, by their turns; which requests these are;
        and whether many reads had to wait for storage. If a sample of a request fails, or has other
        files, the block has nothing of it: the reader itself reports what is wrong, or tries again.
    """
    rows, numbers, files, names = _rows_of(requests)
    is_read = np.zeros(len(requests), dtype=bool)
    is_read[numbers] = True
    if not is_read.any():
        nothing = Block(memoryview(b""), OneFileEach([], [], []), [], [])
        return nothing, is_read.tolist(), False
    runs = runs_of(rows.shards, rows.starts, rows.stops)
    read = read_runs(runs, files.__getitem__)
    for reader, *_ in requests:
        reader.close_files()
    for run in read.errors:
        is_read[numbers[runs.firsts[run] : runs.lasts[run]]] = False
    turns = np.concatenate([turns for *_, turns in requests])
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
    shards = [*map(names.__getitem__, rows.shards.tolist())]
    block = Block(read.data.data, members, shards, rows.places.tolist())
    return block, is_read.tolist(), _WAITS * read.num_waits > len(runs.owners)
