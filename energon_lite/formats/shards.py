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
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array, UInt8Array, keep_freed_memory
from energon_lite.core.errors import DatasetFormatError, FatalSampleError, Ignored, pass_on
from energon_lite.formats.nvmeta import INFO_JSON, META, index_path, read_index, reindex
from energon_lite.formats.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.formats.stored_offsets import StoredOffsets
from energon_lite.formats.tar import BLOCK, FEW_BYTES, block_members, check_kind, first_keys
from energon_lite.storage import files, patience
from energon_lite.storage.byte_file import ByteFile
from energon_lite.storage.ranges import (
    MAX_GAP_BYTES,
    NO_BUFFER,
    advise_runs,
    fill,
    read_runs,
    runs_of,
)

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

# A block is cut where its samples reach this size, so that a look-ahead is bounded in bytes too.
MAX_BLOCK_BYTES = 1 << 22
MAX_OPEN = 128
# malloc maps larger pieces, and unmaps them when they are freed: each 4 KiB is a page fault again.
_LARGE_BYTES = 128 << 10
# For how many blocks storage counts as slow after one that was not in the page cache.
SLOW_BLOCKS = 64
# For so long samples are tried one by one, once each, after the first that cannot be read.
_ONE_BY_ONE_SEC = 60.0
# Shards of which the first keys are looked up together: opening the index costs as much as 30.
_SHARDS_AT_ONCE = 256
_UNKNOWN = -1
_NONE: Int64Array = np.empty(0, dtype=np.int64)


class Rows(NamedTuple):
    """Samples of a block, ascending by their place in the dataset: columns of shape (N,)."""

    order: Int64Array  # position in the block
    shards: Int64Array
    places: Int64Array  # number in the shard
    starts: Int64Array  # first byte in the shard
    stops: Int64Array

    def taken(self, own: Any) -> Rows:
        """Returns some of them, by numbers or by a mask."""
        return Rows(*(column[own] for column in self))


class OpenShard(NamedTuple):
    """A shard that is open, and where its samples begin and the last one ends."""

    file: ByteFile
    offsets: Int64Array

    @property
    def is_whole(self) -> bool:
        """Whether the file has all bytes that its index names."""
        return bool(self.offsets[-1] <= self.file.size_bytes)


class KeyCheck:
    """Compares tars, and where their samples begin, with `index.sqlite`.

    Compared are, once for each shard that is opened:

    - its first key: another tar of the same layout is noticed;
    - where samples of several parts begin: a wrong `.tar.idx` could assign a part to another
      sample.

    `energon-lite lint` compares all keys. A dataset without a usable index is read uncompared. The
    index is open only while it is queried.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`; in all methods a shard is a position in these.
        tar_file_ids: number of each shard in the index.
    """

    def __init__(self, root: PurePath, shards: Sequence[str], tar_file_ids: Sequence[int]) -> None:
        self._root = root
        self._shards = shards
        self._ids = tar_file_ids
        self._first: dict[int, str] = {}

    def check_shard(self, shard: int, file: ByteFile, offsets: Int64Array) -> None:
        """Compares a shard that is open.

        Raises:
            DatasetFormatError: Its first key, or where its samples begin, is not that of the index.
        """
        stored, keys = self.check_first_key(shard, file, int(offsets[-1]))
        if stored and keys == [stored, stored]:
            total, id_ = int(offsets[1:-1].sum()), self._ids[shard]
            found = self._ask(IndexDatabase.offset_sum, id_, len(offsets) - 2)
            if found.get(id_, total) != total:
                path = self._root / self._shards[shard]
                raise DatasetFormatError(
                    f"{index_path(path)}: samples begin at other bytes than in {INDEX_SQLITE}; "
                    f"{reindex(path)}"
                )

    def check_first_key(self, shard: int, file: ByteFile, stop: int) -> tuple[str, list[str]]:
        """Compares the first key in the first `stop` bytes of a shard that is open.

        Returns:
            The key in the index, empty if it has none, and those of the first two parts.

        Raises:
            DatasetFormatError: They differ.
        """
        stored = self._first_key(shard)
        keys = first_keys(file, stop) if stored else []
        if keys[:1] not in ([], [stored]):
            raise self.error(shard, 0, keys[0], f"{INDEX_SQLITE} has {stored!r}")
        return stored, keys

    def _first_key(self, shard: int) -> str:
        """Returns the key of the first sample of a shard; empty if the index does not have it."""
        if shard not in self._first:
            start = shard // _SHARDS_AT_ONCE * _SHARDS_AT_ONCE
            ids = self._ids[start : start + _SHARDS_AT_ONCE]
            found = self._ask(IndexDatabase.keys_at, [(id_, 0) for id_ in ids])
            self._first.update((start + i, found.get((id_, 0), "")) for i, id_ in enumerate(ids))
        return self._first[shard]

    def error(self, shard: int, place: int, key: str, other: str) -> DatasetFormatError:
        """Returns the error of a sample for which an index has another key."""
        return DatasetFormatError(
            f"{self._root / self._shards[shard]}: sample {place} has the key {key!r}, where "
            f"{other}: the shard is corrupt, or was replaced after preparing. Restore it, or run "
            f"`energon-lite prepare {self._root} --tar-index-only`"
        )

    def _ask(self, question: Callable[..., dict[K, T]], *values: Any) -> dict[K, T]:
        def ask() -> dict[K, T]:
            with IndexDatabase(self._root) as index:
                return question(index, *values)

        try:
            return files.retried(ask, self._root / META / INDEX_SQLITE)
        except FileNotFoundError:
            return {}
        except (DatasetFormatError, OSError) as error:
            pass_on(error)
            files.warn_once(f"{error}. Until then keys of samples are not compared with it")
            return {}


class Block(NamedTuple):
    """Samples that were read together.

    Attributes:
        data: the bytes of all of them, until the next block is read.
        members: for each sample (name, first byte, byte after the last) of its files, as positions
            in `data`, of which `bytes(data[first:last])` is the content; or the error that reading
            the sample raised.
        shards: for each sample the name of its shard.
        places: for each sample its number in the shard.
    """

    data: memoryview
    members: Sequence[Any]
    shards: list[str]
    places: list[int]


class BlockReader(ABC):
    """Random access to the samples of a dataset, in blocks.

    Attributes:
        root: folder or file of the dataset.
        num_samples: samples that count; they are numbered 0..num_samples-1.
        slice_length: samples of a slice, of which neighbours are fetched together where a storage
            asked for it; else 0.
        ahead_bytes: the most that a stream may ask for ahead; 0 for no limit.
    """

    root: PurePath
    num_samples: int
    slice_length = ahead_bytes = 0

    @property
    def is_slow(self) -> bool:
        """Whether reading waited for storage lately."""
        return False

    def advise(self, indices: Int64Array) -> None:
        """Asks the kernel to read the samples at `indices`, shape (N,), into its page cache."""
        del indices

    @abstractmethod
    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        """Reads the samples at `indices`, shape (N,), or the first of them up to `max_bytes`.

        Returns:
            A block of at least one sample, if N > 0.
        """

    def blocks(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Iterator[Block]:
        """Reads the samples at `indices`, shape (N,), in blocks of up to `max_bytes`."""
        at = 0
        while at < len(indices):
            block = self.read(indices[at:], max_bytes)
            at += len(block.members)
            yield block


class RangeReader(BlockReader):
    """Random access to samples that are ranges of bytes of some files, the shards.

    A subclass knows the format. Any number of threads may read; no lock is held, since a fork would
    have it.

    Args:
        root: the dataset.
        shards: names of the files, relative to `root`; in all methods a shard is a position in
            these.
        counts: samples of each.
        excluded: positions, ascending, in the concatenated shards that do not count as samples.
        max_open: files that stay open; 0 opens each file again for every block. Where all datasets
            of a process have half of the files open that it may have, no more stay open.

    Attributes:
        starts: the position of the first sample of each shard, and the number of all samples.
    """

    def __init__(
        self,
        root: PurePath,
        shards: Sequence[str],
        counts: Sequence[int],
        excluded: Sequence[int] = (),
        max_open: int = MAX_OPEN,
    ) -> None:
        self.root = root
        self.max_open = max_open
        self.shards = tuple(shards)
        self.starts = np.array([0, *accumulate(counts)], dtype=np.int64)
        # The i-th excluded position has `excluded[i] - i` counted samples before it.
        self._excluded = _NONE
        if len(excluded):
            self._excluded = np.asarray(excluded, dtype=np.int64) - np.arange(len(excluded))
        self.num_samples = int(self.starts[-1]) - len(excluded)
        self._begin()

    def _begin(self) -> None:
        """Begins with no open file, in this process."""
        self._open: dict[int, OpenShard] = {}  # the one that was used last is the last one
        self._most_open = MAX_OPEN
        self._slow_blocks = 0  # to be read until storage counts as quick again
        # Of each shard that was opened and is whole, to notice another file: size, sum of offsets,
        # and the file whose first key was compared with the index.
        self._seen: dict[int, tuple[int, int, Hashable]] = {}
        # Made on first use: a blend of many sources needs them of few.
        self._names: Any = None
        self._patience: files.Patience | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the files behind: another process opens its own."""
        unopened: Any = object.__new__(type(self))
        unopened._begin()
        state: dict[str, Any] = vars(self) | vars(unopened)
        return state

    @abstractmethod
    def load_offsets(self, shard: int) -> Int64Array:
        """Returns where the samples of a shard begin, and where the last one ends."""

    @abstractmethod
    def cut_short(self, shard: int, place: int, stop: int, size: int) -> DatasetFormatError:
        """Returns the error of a sample that would end at byte `stop` of a file of `size` bytes."""

    def check_content(self, shard: int, file: ByteFile, offsets: Int64Array) -> None:
        """Checks that a file that was opened has the samples that were indexed."""
        del shard, file, offsets

    def witness(self) -> PurePath:
        """Returns the file that is tried where there is no other shard: does all storage fail?"""
        return self.path_of(0)

    @abstractmethod
    def members(self, data: UInt8Array, rows: Rows, bases: Int64Array) -> Any:
        """Finds the files of samples in their bytes.

        Args:
            data: the bytes.
            rows: the samples, in the order of the block; `starts` and `stops` are places in `data`.
            bases: shape (N,); where the buffer would begin in the shard.

        Returns:
            For each sample what `Block.members` has.
        """

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the shard of each sample, by number, and its place there; both (N,)."""
        positions = indices
        if len(self._excluded):
            positions = indices + np.searchsorted(self._excluded, indices, side="right")
        if len(self.shards) == 1:
            return np.zeros(len(positions), dtype=np.int64), positions
        shards = np.searchsorted(self.starts, positions, side="right") - 1
        return shards, positions - self.starts[shards]

    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        """Reads samples; the smaller `max_bytes`, the fewer bytes between two samples are read."""
        return next(self.blocks(indices, max_bytes))

    def blocks(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Iterator[Block]:
        """Reads samples in blocks, each into the memory of the one before."""
        all_rows, lost = self.extents(indices)
        max_gap = min(MAX_GAP_BYTES, max_bytes >> 7)
        buffer = NO_BUFFER
        for rows in _cut_in_blocks(all_rows, max_bytes):
            if len(buffer) > 2 * max_bytes:  # of one long sample
                buffer = NO_BUFFER
            if (rows.stops - rows.starts).sum() > _LARGE_BYTES * len(rows.order):
                keep_freed_memory()
            buffer, shifts = self._read_runs(rows, max_gap, lost, buffer)
            self.close_files()
            yield self._block(buffer, rows, shifts, lost)

    def _names_of(self, shards: Int64Array) -> list[str]:
        if self._names is None:
            self._names = np.array(self.shards, dtype=object)
        names: list[str] = self._names[shards].tolist()
        return names

    def _block(
        self, data: UInt8Array, rows: Rows, shifts: Int64Array, lost: dict[int, Exception]
    ) -> Block:
        """Describes samples that were read, in the order of the draws."""
        back = np.argsort(rows.order)
        shifts, rows = shifts[back], rows.taken(back)
        rows = rows._replace(starts=rows.starts + shifts, stops=rows.stops + shifts)
        errors = {}
        if lost:
            errors = {i: lost[n] for i, n in enumerate(rows.order.tolist()) if n in lost}
        for i in errors:
            rows.stops[i] = rows.starts[i]  # an empty range
        members = self.members(data, rows, -shifts)
        for i, error in errors.items():
            members[i] = error
        return Block(data.data, members, self._names_of(rows.shards), rows.places.tolist())

    @property
    def is_slow(self) -> bool:
        """Whether reading waited for storage lately."""
        return self._slow_blocks > 0

    def advise(self, indices: Int64Array) -> None:
        """Asks the kernel to read samples into its page cache, neighbours at once."""
        rows, _ = self.extents(indices, is_patient=False)
        advise_runs(runs_of(rows.shards, rows.starts, rows.stops), self.file)
        self.close_files()

    def path_of(self, number: int) -> PurePath:
        """Returns the path of the shard at position `number`."""
        return self.root / self.shards[number]

    def prefetch(self, shards: Int64Array) -> None:
        """Asks for what opening shards will read, where it lies elsewhere; does not wait."""

    def offsets(self, shard: int, is_patient: bool = True) -> Int64Array:
        """Opens a shard; returns where its samples begin, and where the last one ends.

        Args:
            shard: which one.
            is_patient: whether storage that fails is waited for; else it is asked once.

        Raises:
            OSError: The shard cannot be opened, though the dataset can be read.
            DatasetFormatError: The shard or its index is invalid.
            FatalSampleError: The dataset cannot be read at all.
        """
        if shard in self._open:
            return self._opened(shard).offsets
        if not is_patient:
            path = self.path_of(shard)
            return files.retried(lambda: self._opened(shard).offsets, path, lambda *_: 0.0)
        return self._patiently(shard, lambda: self._opened(shard).offsets)

    def file(self, shard: int) -> ByteFile:
        """Returns the open file of a shard.

        Raises:
            OSError: It cannot be opened.
            DatasetFormatError: The shard or its index is invalid.
        """
        return self._opened(shard).file

    def extents(
        self, indices: Int64Array, is_patient: bool = True
    ) -> tuple[Rows, dict[int, Exception]]:
        """Looks up samples in the indexes of their shards.

        Args:
            indices: shape (N,); the samples.
            is_patient: whether storage that fails is waited for.

        Returns:
            The samples, and the errors of those that cannot be read, by their position among the
            N; these have no bytes.
        """
        order = np.argsort(indices, kind="stable")
        shards, places = self.locate(indices[order])
        starts, stops = np.zeros((2, len(places)), dtype=np.int64)
        lost: dict[int, Exception] = {}
        self.prefetch(shards)
        for first, last in groups(shards):
            number = int(shards[first])
            try:
                offsets = self.offsets(number, is_patient)
            except (OSError, DatasetFormatError) as error:
                pass_on(error)
                lost.update(dict.fromkeys(order[first:last].tolist(), error))
                continue
            starts[first:last] = offsets[places[first:last]]
            stops[first:last] = offsets[places[first:last] + 1]
            end = self.end_of(number)
            if end is not None:
                inside = first + int(np.searchsorted(stops[first:last], end, side="right"))
                for row in range(inside, last):
                    place, stop = int(places[row]), int(stops[row])
                    lost[int(order[row])] = self.cut_short(number, place, stop, end)
                edge = stops[inside - 1] if inside > first else 0
                starts[inside:last] = stops[inside:last] = edge
        return Rows(order, shards, places, starts, stops), lost

    def _read_runs(
        self, rows: Rows, max_gap: int, lost: dict[int, Exception], buffer: UInt8Array
    ) -> tuple[UInt8Array, Int64Array]:
        """Reads all samples into one buffer, neighbours in a shard at once.

        Args:
            rows: the samples.
            max_gap: bytes between two samples that are read as well.
            lost: receives the errors of samples that cannot be read.
            buffer: used again if it is long enough.

        Returns:
            The buffer, a multiple of 512 bytes; and what must be added to a byte of a sample's
            shard to find it there, shape (N,).
        """
        runs = runs_of(rows.shards, rows.starts, rows.stops, max_gap)
        read = read_runs(runs, self.file, buffer)
        for run, failure in read.errors.items():
            first, last = int(runs.firsts[run]), int(runs.lasts[run])
            at = int(runs.starts[run] + read.shifts[first])
            target = read.data.data[at : at + int(runs.stops[run] - runs.starts[run])]
            failed = self._read_again(rows, first, last, target, failure)
            lost.update((int(rows.order[row]), error) for row, error in failed.items())
        is_slow = 4 * read.num_waits > len(runs.owners)
        self._slow_blocks = SLOW_BLOCKS if is_slow else max(0, self._slow_blocks - 1)
        return read.data, read.shifts

    def _read_again(
        self, rows: Rows, first: int, last: int, target: memoryview, failure: Exception
    ) -> dict[int, Exception]:
        """Fills `target` with the samples of a run that could not be read.

        They are read one by one, repeatedly for some seconds.

        Args:
            rows: the samples.
            first: the first row of the run.
            last: the row after it.
            target: as long as the run.
            failure: why it could not be read.

        Returns:
            The errors of the samples that cannot be read, by their row; an OSError or a
            DatasetFormatError each.

        Raises:
            FatalSampleError: The dataset cannot be read at all.
        """
        shard, base = int(rows.shards[first]), int(rows.starts[first])
        starts, stops = rows.starts[first:last].tolist(), rows.stops[first:last].tolist()
        missing = dict(enumerate(zip(starts, stops, strict=True), first))

        def read_missing() -> None:
            latest, until = None, 0.0
            for row, (start, stop) in list(missing.items()):
                try:
                    fill(self.file(shard), target[start - base : stop - base], start)
                    del missing[row]
                except OSError as error:
                    self._close(shard)  # the next try opens it again
                    latest, until = error, until or patience.clock() + _ONE_BY_ONE_SEC
                    if patience.clock() > until:
                        break
            if latest is not None:
                raise latest

        self._close(shard)
        try:
            self._patiently(shard, read_missing, failure)
        except (OSError, DatasetFormatError) as error:
            pass_on(error)
            return dict.fromkeys(missing, error)
        return {}

    def end_of(self, shard: int) -> int | None:
        """Returns the size of a shard whose index goes beyond its end now; None for others."""
        opened = self._open.get(shard)
        if opened is None or opened.is_whole:
            return None
        with Ignored(OSError, DatasetFormatError):
            if files.size_of(self.path_of(shard)) != opened.file.size_bytes:
                self._close(shard)  # it was restored, or is being copied
                opened = self._opened(shard)
        return None if opened.is_whole else opened.file.size_bytes

    def _patiently(
        self, number: int, attempt: Callable[[], T], first: Exception | None = None
    ) -> T:
        if self._patience is None:
            self._patience = files.Patience(self.root)
        return self._patience.retried(
            attempt,
            self.path_of(number),
            lambda: self._others_can_be_read(number),
            first,
            self._close_half,
        )

    def _close_half(self) -> bool:
        """Closes half of the shards, and keeps fewer open from now on; False if none is open."""
        num_open = len(self._open)
        self._most_open = max(1, num_open // 2)
        self._close_down_to(self._most_open - 1)
        return num_open > 0

    def _others_can_be_read(self, number: int) -> bool:
        """Whether another shard of the dataset can be read, or where there is none its witness."""
        total = len(self.shards)
        others = {(number + step) % total for step in (1, total // 2, -1)} - {number}
        paths = [self.path_of(other) for other in sorted(others)]
        return any(map(files.can_read, paths or [self.witness()]))

    def _opened(self, number: int) -> OpenShard:
        shard = self._open.get(number)
        if shard is not None:
            self._close(number)
            self._open[number] = shard
            return shard
        path = self.path_of(number)
        self._close_down_to(self._most_open - 1)
        offsets = self.load_offsets(number)
        shard = OpenShard(files.open_bytes(path), offsets)
        try:
            self._check(number, shard)
        except BaseException:
            shard.file.close()  # the traceback would keep it open
            raise
        if self.slice_length:
            first, last = self.starts[number : number + 2].tolist()
            places = range(-first % self.slice_length, last - first, self.slice_length)
            shard.file.cut_at(offsets[[0, *places, -1]])
        self._open[number] = shard
        return shard

    def _check(self, number: int, shard: OpenShard) -> None:
        """Checks that an opened file is the one that was opened before, and is indexed.

        Raises:
            OSError: Its size, or its index, has changed.
            DatasetFormatError: `index.sqlite` describes another shard.
            FatalSampleError: It has other content, by its version.
        """
        file, offsets = shard
        seen = (file.size_bytes, int(offsets.sum()))
        known = self._seen.get(number, (*seen, _UNKNOWN))
        is_other = known[2] not in (file.identity, _UNKNOWN)
        if is_other and file.is_versioned:
            raise FatalSampleError(
                f"{file.path} was replaced during the run by another object. No sample was skipped "
                "for it: restore it, and resume from the last state; or begin a run of the new "
                "data, and write new data under new names"
            )
        if seen != known[:2]:
            text = f"another file of {seen[0]} bytes took the place of one of {known[0]} bytes"
            text += ", or its index changed; restore it, or begin a run of the new data"
            raise OSError(errno.ESTALE, text, str(self.path_of(number)))
        if shard.is_whole:
            self._seen[number] = known
        if known[2] != file.identity:
            self.check_content(number, file, offsets)
        if shard.is_whole:
            self._seen[number] = (*seen, file.identity)

    def close_files(self) -> None:
        """Closes the files that are not to stay open between two reads."""
        for number, shard in [*self._open.items()]:
            if shard.file.is_surplus:
                self._close(number)
        self._close_down_to(self.max_open)

    def _close(self, number: int) -> None:
        self._open.pop(number, None)

    def _close_down_to(self, number: int) -> None:
        """Closes the least recently used shards until `number` are open."""
        num = len(self._open) - number
        for shard in [*self._open][:num] if num > 0 else ():
            self._close(shard)


class ShardReader(RangeReader):
    """Random access to the samples of a list of tars, which are compared with their indexes.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`.
        counts: samples of each shard.
        tar_file_ids: number of each shard in `index.sqlite`, to compare keys with it.
        excluded: as in `RangeReader`.
        max_open: as in `RangeReader`.
    """

    def __init__(
        self,
        root: PurePath,
        shards: Sequence[str],
        counts: Sequence[int],
        tar_file_ids: Sequence[int],
        excluded: Sequence[int] = (),
        max_open: int = MAX_OPEN,
    ) -> None:
        super().__init__(root, shards, counts, excluded, max_open)
        self.tar_file_ids = tuple(tar_file_ids)
        self.stored: StoredOffsets | None = None

    def _begin(self) -> None:
        super()._begin()
        self._keys: KeyCheck | None = None

    def load_offsets(self, shard: int) -> Int64Array:
        """Reads where samples begin, from the file of all offsets or from the tar's index."""
        count = int(self.starts[shard + 1] - self.starts[shard])
        found = None if self.stored is None else self.stored.read(shard, count)
        if found is None:
            self.stored = None
            found = read_index(self.path_of(shard), count)
        return found

    def prefetch(self, shards: Int64Array) -> None:
        """Asks for the indexes, and for the first bytes of the tars; see `RangeReader`."""

        def tars() -> Iterator[PurePath]:
            new = (number for number in np.unique(shards).tolist() if number not in self._open)
            yield from (PurePath(self.shards[number]) for number in islice(new, self._most_open))

        if self.stored is None:
            files.prefetch(self.root, map(index_path, tars()))
        files.prefetch(self.root, tars(), FEW_BYTES)

    def check_content(self, shard: int, file: ByteFile, offsets: Int64Array) -> None:
        """Compares a tar with the stored offsets, or with `index.sqlite`."""
        keys = first_keys(file, int(offsets[-1]))[:1]
        if not keys:
            check_kind(file)
        self._keys = self._keys or KeyCheck(self.root, self.shards, self.tar_file_ids)
        if self.stored is None:
            self._keys.check_shard(shard, file, offsets)
            return
        for key in keys:
            if not self.stored.has_first_key(shard, key):
                raise self._keys.error(shard, 0, key, f"{self.stored.path.name} has another")

    def witness(self) -> PurePath:
        """Returns the list of the tars."""
        return self.root / META / INFO_JSON

    def cut_short(self, shard: int, place: int, stop: int, size: int) -> DatasetFormatError:
        """Returns the error of a sample that would end at byte `stop` of a file of `size` bytes."""
        path = self.path_of(shard)
        tail = bytearray(b"?" * 2 * BLOCK)
        with Ignored(OSError, DatasetFormatError):
            fill(self.file(shard), memoryview(tail), max(0, size - len(tail)))
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

    def members(self, data: UInt8Array, rows: Rows, bases: Int64Array) -> Any:
        """Finds the files by their headers."""
        return block_members(data, rows.starts, rows.stops, bases)


def _cut_in_blocks(rows: Rows, max_bytes: int) -> Iterator[Rows]:
    """Cuts samples, in the order of the draws, into blocks of at most `max_bytes`, or of one."""
    sizes = np.empty_like(rows.order)
    sizes[rows.order] = rows.stops - rows.starts
    ends = np.cumsum(sizes)
    first, before = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, before + max_bytes)))
        if last - first == len(ends):
            yield rows
        else:
            is_own = (rows.order >= first) & (rows.order < last)
            yield rows.taken(is_own)
        first, before = last, int(ends[last - 1])


def groups(shards: Int64Array) -> list[tuple[int, int]]:
    """Returns first and last + 1 of the runs of equal numbers."""
    edges = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), len(shards)]
    return list(pairwise(edges))
