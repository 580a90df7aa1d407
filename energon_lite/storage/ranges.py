"""Ranges of many files: neighbours are joined into runs, and all runs are read together.

What can be read without waiting for storage is read first, as nearly all is where files are in the
page cache. All the rest is asked for then, and waited for.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array, UInt8Array
from energon_lite.core.errors import DatasetFormatError, pass_on
from energon_lite.storage.byte_file import ByteFile

# Bytes between two ranges that are cheaper to read as well than to call the kernel again.
MAX_GAP_BYTES = 8 << 10
# Buffers have a multiple of it.
_BLOCK = 512
NO_BUFFER: UInt8Array = np.empty(0, dtype=np.uint8)


class Runs(NamedTuple):
    """Neighbours among N ranges, sorted by file and place: columns of shape (R,).

    Attributes:
        firsts: the first range of each.
        lasts: the range after the last.
        owners: the number of the file.
        starts: first byte.
        stops: byte after the last.
    """

    firsts: Int64Array
    lasts: Int64Array
    owners: Int64Array
    starts: Int64Array
    stops: Int64Array


class ReadRuns(NamedTuple):
    """The bytes of R runs.

    Attributes:
        data: the buffer; its length is a multiple of 512.
        shifts: shape (N,); byte b of the file of a range is at b + shift in the buffer.
        errors: of the runs that could not be read; their bytes are arbitrary.
        num_waits: how many runs were not at hand.
    """

    data: UInt8Array
    shifts: Int64Array
    errors: dict[int, Exception]
    num_waits: int


def runs_of(
    owners: Int64Array, starts: Int64Array, stops: Int64Array, max_gap: int = MAX_GAP_BYTES
) -> Runs:
    """Joins ranges; columns of shape (N,), N > 0, sorted by file and place.

    Args:
        owners: the number of the file of each.
        starts: first byte.
        stops: byte after the last.
        max_gap: bytes between two ranges that are read as well.
    """
    is_far = (owners[1:] != owners[:-1]) | (starts[1:] - stops[:-1] > max_gap)
    firsts = np.concatenate([[0], np.flatnonzero(is_far) + 1])
    lasts = np.append(firsts[1:], len(owners))
    return Runs(firsts, lasts, owners[firsts], starts[firsts], stops[lasts - 1])


def read_runs(
    runs: Runs, file_of: Callable[[int], ByteFile], buffer: UInt8Array = NO_BUFFER
) -> ReadRuns:
    """Reads runs into one buffer, one after the other.

    Args:
        runs: the runs; one without bytes is not looked at.
        file_of: returns the open file of an owner, or raises an OSError or a DatasetFormatError.
        buffer: used again if it is long enough.
    """
    ends = np.cumsum(runs.stops - runs.starts)
    num_blocks = -(-int(ends[-1]) // _BLOCK)
    if num_blocks * _BLOCK > len(buffer):  # a little longer, for the next time
        buffer = np.empty(num_blocks * 9 // 8 * _BLOCK, dtype=np.uint8)
    memory = buffer.data
    targets = [memory[at:end] for at, end in pairwise([0, *ends.tolist()])]
    reads = [*zip(runs.owners.tolist(), targets, runs.starts.tolist(), strict=True)]
    waiting = []
    for number, (owner, target, start) in enumerate(reads):
        try:
            if not target or file_of(owner).read_at_hand(target, start):
                continue
        except (OSError, DatasetFormatError) as error:
            pass_on(error)
        waiting.append(number)
    if len(waiting) > 1:
        advise_runs(Runs(*(column[waiting] for column in runs)), file_of)
    errors: dict[int, Exception] = {}
    failed: dict[int, Exception] = {}  # files; their other runs are not tried
    for number in waiting:
        owner, target, start = reads[number]
        try:
            if owner not in failed:
                fill(file_of(owner), target, start)
                continue
        except (OSError, DatasetFormatError) as error:
            pass_on(error)
            failed[owner] = error
        errors[number] = failed[owner]
    shifts = np.repeat(ends - runs.stops, runs.lasts - runs.firsts)
    return ReadRuns(buffer, shifts, errors, len(waiting))


def advise_runs(runs: Runs, file_of: Callable[[int], ByteFile]) -> None:
    """Asks for runs that will be read soon, without waiting; passes over files that fail."""
    columns = (runs.owners.tolist(), runs.starts.tolist(), runs.stops.tolist())
    for owner, start, stop in zip(*columns, strict=True):
        try:
            file_of(owner).advise(start, stop)
        except (OSError, DatasetFormatError) as error:
            pass_on(error)


def fill(file: ByteFile, target: memoryview, start: int) -> None:
    """Fills `target` with the bytes from `start` on, and waits for storage.

    Raises:
        OSError: The file ends before, or cannot be read.
    """
    file.ensure(start, start + len(target))
    num_read = file.read_into(target, start)
    if num_read < len(target):
        text = f"reading ended at byte {start + num_read}; it has {file.size_now()} bytes now"
        raise OSError(errno.EIO, f"{text}, and had {file.size_bytes}", str(file.path))
