"""Reads samples out of indexed tar shards, many at a time.

The order is known ahead, so a block of samples is read as few long ranges: neighbours in a shard
come with one `pread`. Files are opened on first use, at most `MAX_OPEN` at a time, and never
mapped: a file that is cut short while it is read raises an error for its lost samples, instead of
a signal that kills the process.

What cannot be read is opened and read again for some seconds, then sample by sample, so that only
samples that really cannot be read are lost. While nothing of the dataset can be read, no sample is
skipped: the reader waits, and ends the run after some minutes.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.core.arrays import BoolArray, Int64Array, UInt8Array
from energon_lite.core.errors import DatasetFormatError, FatalSampleError
from energon_lite.storage.files import (
    BRIEF_SEC,
    OUTAGE_SEC,
    can_read,
    clock,
    explained,
    open_regular,
    read_into,
    retried,
)
from energon_lite.storage.key_check import KeyCheck
from energon_lite.storage.nvmeta import INFO_JSON, META, index_path, read_index, reindex
from energon_lite.storage.tar import BLOCK, block_members

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_OPEN = 128
# So long after a shard could not be read, it is tried for a moment only. [Unit: second]
_AFTERWARDS_SEC, _MOMENT_SEC = 60.0, 0.1
# For so long samples are tried one by one, once each, after the first that cannot be read.
_ONE_BY_ONE_SEC = 60.0
# No more files can be opened, by this process or on this machine.
_FULL = (errno.EMFILE, errno.ENFILE)
# What no server that comes back changes.
_FINAL = (errno.ELOOP, errno.ENAMETOOLONG)


class _OpenShard(NamedTuple):
    descriptor: int
    offsets: Int64Array
    size_bytes: int


class OpenShards:
    """Reads byte ranges of shards.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`; in all methods a shard is a position in these.
        counts: samples of each shard.
        keys: what the keys of the first samples should be.

    Attributes:
        overrun: size in bytes of each open shard whose index goes beyond its end.
    """

    def __init__(
        self, root: Path, shards: Sequence[str], counts: Sequence[int], keys: KeyCheck
    ) -> None:
        self._root = root
        self._shards = shards
        self._counts = counts
        self._keys = keys
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._most_open = MAX_OPEN
        # Size of each shard that was opened, and the sum of its offsets, to notice another file.
        self._seen: dict[int, tuple[int, int]] = {}
        self.overrun: dict[int, int] = {}
        # Inode of each shard of which the first key was compared with the index.
        self._compared: dict[int, int] = {}
        # Until when a shard that failed is tried for a moment only, and with what it failed.
        self._failed: dict[int, tuple[float, OSError]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves behind what is open, and what was seen: another process opens its own files."""
        return OpenShards, (self._root, self._shards, self._counts, self._keys)

    def __del__(self) -> None:
        """Closes the files."""
        if "_open" in self.__dict__:
            self.close_down_to(0)

    def offsets(self, shard: int) -> Int64Array:
        """Returns where the samples of a shard begin, and where the last one ends.

        Raises:
            OSError: The shard cannot be opened, though the dataset can be read.
            DatasetFormatError: The shard, or its index, is not as it should be.
            FatalSampleError: The dataset cannot be read at all.
        """
        return self._ready(shard).offsets

    def end_of(self, shard: int) -> int | None:
        """Returns the size of a shard whose index goes beyond its end now; None for others."""
        if shard in self.overrun:
            with suppress(OSError, DatasetFormatError):
                size = (self._root / self._shards[shard]).stat().st_size
                if size != self.overrun[shard]:  # it was restored, or is being copied
                    self._close(shard)
                    self._opened(shard)
        return self.overrun.get(shard)

    def cut_short(self, shard: int, place: int, stop: int) -> DatasetFormatError:
        """Returns the error of a sample that would end at byte `stop`, behind the file's end."""
        path, size = self._root / self._shards[shard], self.overrun[shard]
        tail = bytearray(b"?" * 2 * BLOCK)
        self.read(shard, memoryview(tail), max(0, size - len(tail)))
        if size % BLOCK or any(tail):
            what = (
                "the shard is truncated, or was replaced after preparing. Restore it, or prepare "
                "the dataset again"
            )
        else:
            what = f"it has its end mark, so {index_path(path).name} is wrong; {reindex(path)}"
        return DatasetFormatError(
            f"{path}: sample {place} should end at byte {stop}, but the file ends before "
            f"({size} bytes): {what}"
        )

    def read(self, shard: int, target: memoryview, start: int) -> Exception | None:
        """Fills `target` from byte `start` of a shard; returns the error if that fails."""
        try:
            got = read_into(self._ready(shard).descriptor, target, start)
        except (OSError, DatasetFormatError) as error:
            return error
        if got == len(target):
            return None
        return OSError(errno.EIO, f"reading ended at byte {start + got}")

    def read_again(
        self,
        shard: int,
        target: memoryview,
        starts: Int64Array,
        stops: Int64Array,
        first: Exception,
    ) -> dict[int, Exception]:
        """Fills `target` with a range of a shard that `read` failed on.

        The samples that are missing are read one by one, again and again for some seconds.

        Args:
            shard: which one.
            target: as long as the range.
            starts: shape (N,), first byte of each sample, ascending; the first begins the range.
            stops: shape (N,), byte after the last of each.
            first: what `read` returned.

        Returns:
            The errors of the samples that cannot be read, by their row; an OSError or a
            DatasetFormatError each.

        Raises:
            FatalSampleError: The dataset cannot be read at all.
        """
        base = int(starts[0])
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        missing: dict[int, tuple[int, int]] = dict(enumerate(ranges))

        def read_missing() -> None:
            latest, until = None, 0.0
            for row, (start, stop) in list(missing.items()):
                try:
                    self._fill(shard, target[start - base : stop - base], start)
                    del missing[row]
                except OSError as error:
                    latest, until = error, until or clock() + _ONE_BY_ONE_SEC
                    if clock() > until:
                        break
            if latest is not None:
                raise latest

        self._close(shard)
        try:
            self._patiently(shard, read_missing, first)
        except (OSError, DatasetFormatError) as error:
            return dict.fromkeys(missing, error)
        return {}

    def _fill(self, number: int, target: memoryview, start: int) -> None:
        """Reads a range of a shard.

        Raises:
            OSError: It cannot be read; the shard is closed then, and opened again by the next try.
        """
        try:
            shard = self._opened(number)
            got = read_into(shard.descriptor, target, start)
            if got == len(target):
                return
            size = os.fstat(shard.descriptor).st_size
            path = self._root / self._shards[number]
            text = f"reading ended at byte {start + got}; it has {size} bytes now"
            raise OSError(errno.EIO, f"{text}, and had {shard.size_bytes}", str(path))
        except OSError:
            self._close(number)
            raise

    def _patiently(
        self, number: int, attempt: Callable[[], T], first: Exception | None = None
    ) -> T:
        """Reads something of a shard: again for some seconds if that fails.

        While nothing of the dataset can be read, for some minutes: its samples are well.
        """
        path = self._root / self._shards[number]
        until, before = self._failed.get(number, (0.0, None))
        is_away, away_sec = False, 0.0

        def patience(error: OSError, spent_sec: float) -> float:
            nonlocal is_away, away_sec
            if error.errno in _FINAL:
                return 0.0
            if error.errno in _FULL:
                is_away = not self._open
                self._most_open = max(1, len(self._open) // 2)
                self.close_down_to(self._most_open - 1)
                return away_sec + BRIEF_SEC
            was_away, is_away = is_away, not self._others_can_be_read(number)
            if was_away:
                away_sec = spent_sec
            if is_away:
                if not was_away:
                    logger.warning(
                        "%s: no file of the dataset can be read (%s); waiting for %d s at most",
                        self._root, error, OUTAGE_SEC,
                    )  # fmt: skip
                return OUTAGE_SEC
            return away_sec + (_MOMENT_SEC if clock() < until else BRIEF_SEC)

        try:
            return retried(attempt, path, patience, first)
        except OSError as error:
            if is_away:
                raise FatalSampleError(
                    f"{self._root}: no file of the dataset can be read any more: {error}. No "
                    "sample was skipped for it. Bring the storage back, and resume from the last "
                    "state"
                ) from error
            if before is None or error.errno != before.errno:
                before = explained(error, path)
            self._failed[number] = clock() + _AFTERWARDS_SEC, before
            raise before from None  # it says how often it was tried

    def _others_can_be_read(self, number: int) -> bool:
        """Whether another shard of the dataset can be read, or its list where there is no other."""
        total = len(self._shards)
        others = {(number + step) % total for step in (1, total // 2, -1)} - {number}
        paths = [self._root / self._shards[other] for other in sorted(others)]
        return any(map(can_read, paths or [self._root / META / INFO_JSON]))

    def _ready(self, number: int) -> _OpenShard:
        if number not in self._open:
            self._patiently(number, lambda: self._opened(number))
        return self._opened(number)

    def _opened(self, number: int) -> _OpenShard:
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        path = self._root / self._shards[number]
        self.close_down_to(self._most_open - 1)
        offsets = read_index(path, self._counts[number])
        descriptor = open_regular(path)
        try:
            status = os.fstat(descriptor)
            shard = _OpenShard(descriptor, offsets, status.st_size)
            self._check(number, shard, status.st_ino)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        self._open[number] = shard
        return shard

    def _check(self, number: int, shard: _OpenShard, inode: int) -> None:
        """Checks that a file that was opened is the one that was opened before, and is indexed.

        Raises:
            OSError: Its size, or its index, is another one.
            DatasetFormatError: `index.sqlite` is of another shard.
        """
        path = self._root / self._shards[number]
        seen = (shard.size_bytes, int(shard.offsets.sum()))
        before = self._seen.get(number, seen)
        if seen != before:
            text = f"another file of {seen[0]} bytes took the place of one of {before[0]} bytes"
            text += ", or its index changed; restore it, or begin a run of the new data"
            raise OSError(errno.ESTALE, text, str(path))
        if shard.offsets[-1] > shard.size_bytes:
            self.overrun[number] = shard.size_bytes
        else:
            self._seen[number] = seen
            self.overrun.pop(number, None)
        if self._compared.get(number) != inode:
            self._keys.check_shard(number, shard.descriptor, shard.offsets)
            self._compared[number] = inode

    def _close(self, number: int) -> None:
        shard = self._open.pop(number, None)
        if shard is not None:
            with suppress(OSError):
                os.close(shard.descriptor)

    def close_down_to(self, number: int) -> None:
        """Closes what was not used for longest, until so many files are open."""
        while len(self._open) > number:
            self._close(next(iter(self._open)))


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
