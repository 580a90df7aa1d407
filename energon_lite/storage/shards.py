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
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.core.arrays import BoolArray, Int64Array, UInt8Array
from energon_lite.core.errors import DatasetFormatError, Ignored, pass_on
from energon_lite.storage import files
from energon_lite.storage.large_files import CACHED_ONLY, LARGE_BYTES, FileContents, read_files
from energon_lite.storage.nvmeta import INFO_JSON, META, index_path, read_index, reindex
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.storage.tar import BLOCK, block_members, first_keys, key_of_members

logger = logging.getLogger(__name__)

BlockBytes = memoryview | FileContents
K = TypeVar("K")
T = TypeVar("T")

# A block is cut where its samples reach this size, so that a look-ahead is bounded in bytes too.
MAX_BLOCK_BYTES = 1 << 22
# Bytes between two samples that are cheaper to read as well than to call the kernel again.
MAX_GAP_BYTES = 8 << 10
MAX_OPEN = 128
# Bytes that the kernel is asked for at once: it may cut off what is longer than its own read-ahead.
_ADVICE_BYTES = 128 << 10
# For how many blocks storage counts as slow after one that was not in the page cache.
SLOW_BLOCKS = 64
# For so long samples are tried one by one, once each, after the first that cannot be read.
_ONE_BY_ONE_SEC = 60.0
# Shards of which the first keys are looked up together: opening the index costs as much as 30.
_SHARDS_AT_ONCE = 256
# Shards whose keys are kept, as checksums: 80 KB for 10,000 samples.
_MOST_SHARDS = 128
_UNKNOWN = -1
_NONE: Int64Array = np.empty(0, dtype=np.int64)


def will_need(descriptor: int, start: int, stop: int) -> None:
    """Asks the kernel to read a range of a file into its page cache; does not wait for it."""
    if CACHED_ONLY:
        with Ignored(OSError):  # a file system may refuse
            for at in range(start, stop, _ADVICE_BYTES):
                size = min(_ADVICE_BYTES, stop - at)
                os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)


class Rows(NamedTuple):
    """Samples of a block, ascending by their place in the dataset: columns of shape (N,)."""

    order: Int64Array  # position in the block
    shards: Int64Array
    places: Int64Array  # number in the shard
    starts: Int64Array  # first byte in the shard
    stops: Int64Array


class OpenShard(files.OpenDescriptor):
    """A shard that stays open as long as some thread uses this object.

    Args:
        path: the file.
        offsets: where its samples begin, and where the last one ends.
        name: of the shard.
    """

    def __init__(self, path: Path, offsets: Int64Array, name: str) -> None:
        self.descriptor = files.open_regular(path)
        self.offsets, self.name = offsets, name
        status = os.fstat(self.descriptor)
        self.size_bytes, self.inode = status.st_size, status.st_ino


class KeyCheck:
    """Compares tars, and where their samples begin, with `index.sqlite`.

    A comparison costs about as much as reading a text, so not all samples are compared, and which
    are depends on nothing but the data:

    - the first key of each shard, when it is opened first: another tar of the same layout is
      noticed;
    - where samples of several parts begin: a wrong `.tar.idx` could assign a part to another
      sample;
    - keys in extension headers, which no checksum covers.

    `energon-lite lint` compares all keys. A dataset without a usable index is read uncompared. The
    index is open only while it is queried.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`; in all methods a shard is a position in these.
        tar_file_ids: number of each shard in the index.
    """

    def __init__(self, root: Path, shards: Sequence[str], tar_file_ids: Sequence[int]) -> None:
        self._root = root
        self._shards = shards
        self._ids = tar_file_ids
        self._first: dict[int, str] = {}
        self._sums_of: dict[int, Int64Array] = {}

    def check_shard(self, shard: int, descriptor: int, offsets: Int64Array) -> None:
        """Compares a shard that is open.

        Raises:
            DatasetFormatError: Its first key, or where its samples begin, is not that of the index.
        """
        stored, keys = self.check_first_key(shard, descriptor, int(offsets[-1]))
        if stored and keys == [stored, stored]:
            total, id_ = int(offsets[1:-1].sum()), self._ids[shard]
            found = self._ask(IndexDatabase.offset_sum, id_, len(offsets) - 2)
            if found.get(id_, total) != total:
                path = self._root / self._shards[shard]
                raise DatasetFormatError(
                    f"{index_path(path)}: samples begin at other bytes than in {INDEX_SQLITE}; "
                    f"{reindex(path)}"
                )

    def check_first_key(self, shard: int, descriptor: int, stop: int) -> tuple[str, list[str]]:
        """Compares the first key in the first `stop` bytes of a shard that is open.

        Returns:
            The key in the index, empty if it has none, and those of the first two parts.

        Raises:
            DatasetFormatError: They differ.
        """
        stored = self._first_key(shard)
        keys = first_keys(descriptor, stop) if stored else []
        if keys[:1] not in ([], [stored]):
            raise self._error(shard, 0, keys[0], stored)
        return stored, keys

    def _first_key(self, shard: int) -> str:
        """Returns the key of the first sample of a shard; empty if the index does not have it."""
        if shard not in self._first:
            start = shard // _SHARDS_AT_ONCE * _SHARDS_AT_ONCE
            ids = self._ids[start : start + _SHARDS_AT_ONCE]
            found = self._ask(IndexDatabase.keys_at, [(id_, 0) for id_ in ids])
            self._first.update((start + i, found.get((id_, 0), "")) for i, id_ in enumerate(ids))
        return self._first[shard]

    def compare(
        self, members: list[Any], shards: Int64Array, places: Int64Array, rows: Sequence[int]
    ) -> None:
        """Puts an error in the place of each sample whose key is another one in the index.

        Args:
            members: for each sample of a block its members, or an error.
            shards: shape (N,), the shard of each.
            places: shape (N,), the number of each in its shard.
            rows: which of them are compared.
        """
        for row in rows:
            shard, place = int(shards[row]), int(places[row])
            sums = self._sums(shard)
            key = key_of_members(members[row])
            if key and place < len(sums) and sums[place] not in (_UNKNOWN, _key_sum(key)):
                stored = self._ask(IndexDatabase.keys_of, self._ids[shard])
                if stored.get(place, key) != key:
                    members[row] = self._error(shard, place, key, stored[place])

    def _sums(self, shard: int) -> Int64Array:
        """Looks up all keys of a shard, which costs less per sample than a query for some."""
        found = self._sums_of.get(shard)
        if found is not None:
            return found
        if len(self._sums_of) == _MOST_SHARDS:
            self._sums_of.clear()
        keys = self._ask(IndexDatabase.keys_of, self._ids[shard])
        sums = np.full(len(keys), _UNKNOWN, dtype=np.int64)
        for place, key in keys.items():
            if 0 <= place < len(sums):
                sums[place] = _key_sum(key)
        self._sums_of[shard] = sums
        return sums

    def _error(self, shard: int, place: int, key: str, stored: str) -> DatasetFormatError:
        """Returns the error of a sample that has another key in the index."""
        return DatasetFormatError(
            f"{self._root / self._shards[shard]}: sample {place} has the key {key!r}, where "
            f"{INDEX_SQLITE} has {stored!r}: the shard is corrupt, or was replaced after "
            f"preparing. Restore it, or run `energon-lite prepare {self._root} --tar-index-only`"
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


def _key_sum(key: str) -> int:
    return zlib.crc32(key.encode("utf-8", "surrogateescape"))


class OpenShards:
    """Reads byte ranges of shards; any number of threads may do so.

    No lock is held: a fork would have it.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`; in all methods a shard is a position in these.
        counts: samples of each shard.
        tar_file_ids: number of each shard in `index.sqlite`.
    """

    def __init__(
        self, root: Path, shards: Sequence[str], counts: Sequence[int], tar_file_ids: Sequence[int]
    ) -> None:
        self._root, self._shards, self._counts = root, shards, counts
        self.keys = KeyCheck(root, shards, tar_file_ids)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._most_open = MAX_OPEN
        self.slow_blocks = 0  # to be read until storage counts as quick again
        self._no_large = 0  # to be read until large files are tried to be read one by one
        # Of each shard that was opened and is whole, to notice another file: size, sum of offsets,
        # and the inode whose first key was compared with the index.
        self._seen: dict[int, tuple[int, int, int]] = {}
        # Size of each open shard whose index goes beyond its end.
        self._overrun: dict[int, int] = {}
        # Ranges that were not in the page cache.
        self.num_waits = 0
        # Made on first use: a blend of many sources needs them of few.
        self._names: Any = None
        self._patience: files.Patience | None = None

    def names_of(self, shards: Int64Array) -> list[str]:
        """Returns the names of `shards`, shape (N,)."""
        if self._names is None:
            self._names = np.array(self._shards, dtype=object)
        names: list[str] = self._names[shards].tolist()
        return names

    def offsets(self, shard: int) -> Int64Array:
        """Returns where the samples of a shard begin, and where the last one ends.

        Raises:
            OSError: The shard cannot be opened, though the dataset can be read.
            DatasetFormatError: The shard or its index is invalid.
            FatalSampleError: The dataset cannot be read at all.
        """
        if shard in self._open:
            return self._opened(shard).offsets
        return self._patiently(shard, lambda: self._opened(shard).offsets)

    def end_of(self, shard: int) -> int | None:
        """Returns the size of a shard whose index goes beyond its end now; None for others."""
        if shard in self._overrun:
            with Ignored(OSError, DatasetFormatError):
                size = (self._root / self._shards[shard]).stat().st_size
                if size != self._overrun[shard]:  # it was restored, or is being copied
                    self._close(shard)
                    self._opened(shard)
        return self._overrun.get(shard)

    def cut_short(self, shard: int, place: int, stop: int) -> DatasetFormatError:
        """Returns the error of a sample that would end at byte `stop`, behind the file's end."""
        path, size = self._root / self._shards[shard], self._overrun[shard]
        tail = bytearray(b"?" * 2 * BLOCK)
        with Ignored(OSError, DatasetFormatError):
            self._fill(shard, memoryview(tail), max(0, size - len(tail)))
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

    def read(
        self, shard: int, target: memoryview, base: int, rows: Rows, first: int, last: int
    ) -> dict[int, Exception]:
        """Fills `target` with the bytes of samples of one shard.

        Where that fails, the samples are read one by one, repeatedly for some seconds.

        Args:
            shard: which one.
            target: as long as the range of these samples.
            base: first byte of the range in the shard.
            rows: the samples.
            first: the first row of the range.
            last: the row after the range.

        Returns:
            The errors of the samples that cannot be read, by their row; an OSError or a
            DatasetFormatError each.

        Raises:
            FatalSampleError: The dataset cannot be read at all.
        """
        opened = self._open.get(shard)
        try:
            if opened is None:
                self.offsets(shard)
            elif self._read_cached(opened.descriptor, target, base):
                return {}
            self._fill(shard, target, base)
            return {}
        except (OSError, DatasetFormatError) as error:
            pass_on(error)
            failure = error
        starts, stops = rows.starts[first:last].tolist(), rows.stops[first:last].tolist()
        missing = dict(enumerate(zip(starts, stops, strict=True), first))

        def read_missing() -> None:
            latest, until = None, 0.0
            for row, (start, stop) in list(missing.items()):
                try:
                    self._fill(shard, target[start - base : stop - base], start)
                    del missing[row]
                except OSError as error:
                    latest, until = error, until or files.clock() + _ONE_BY_ONE_SEC
                    if files.clock() > until:
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

    def read_large(self, rows: Rows) -> tuple[FileContents, Any] | None:
        """Reads samples file by file, each into separate memory.

        Returns:
            Contents and members, as in a block. None if something is not in the page cache, or
            fails; or is not plain or not large, and then the next blocks are not tried.
        """
        self._no_large = max(0, self._no_large - 1)
        if self._no_large:
            return None
        numbers = rows.shards.tolist()
        try:
            opened = {number: self._opened(number) for number in set(numbers)}
            descriptors = [opened[number].descriptor for number in numbers]
            found = read_files(descriptors, rows.starts, rows.stops)
        except (OSError, DatasetFormatError) as error:
            pass_on(error)
            return None  # reading a range reports what is wrong, and waits if it has to
        if found is None:
            self._no_large = SLOW_BLOCKS
        self.slow_blocks = max(0, self.slow_blocks - 1)
        return found

    def _read_cached(self, descriptor: int, target: memoryview, start: int) -> bool:
        """Reads a range if it is in the page cache, and counts those that are not."""
        try:
            num_read = os.preadv(descriptor, [target], start, CACHED_ONLY)
        except OSError as error:  # file systems that do not know are often on other machines
            pass_on(error)
            num_read = -1
        if num_read == len(target):
            return True
        self.num_waits += CACHED_ONLY > 0
        return False

    def offsets_at_once(self, shard: int) -> Int64Array:
        """Returns what `offsets` does, or raises the error of a first try; closes no shard.

        Raises:
            OSError: The shard cannot be opened, or as many as may be are open.
            DatasetFormatError: The shard or its index is invalid.
        """
        path = self._root / self._shards[shard]
        if shard not in self._open and len(self._open) >= self._most_open:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return files.retried(lambda: self._opened(shard).offsets, path, lambda *_: 0.0)

    def at_once(self, shard: int) -> OpenShard | None:
        """Returns an open shard; None if it cannot be opened, or is not whole."""
        with Ignored(OSError, DatasetFormatError):
            opened = self._opened(shard)
            return None if shard in self._overrun else opened
        return None

    def advise(self, shard: int, start: int, stop: int) -> None:
        """Asks the kernel to read a range of a shard into its page cache; does not wait for it."""
        opened = self._open.get(shard)
        if opened is not None:
            will_need(opened.descriptor, start, stop)

    def _fill(self, number: int, target: memoryview, start: int) -> None:
        """Reads a range of a shard.

        Raises:
            OSError: It cannot be read; the shard is closed then, and opened again by the next try.
        """
        try:
            shard = self._opened(number)
            num_read = files.read_into(shard.descriptor, target, start)
            if num_read == len(target):
                return
            size = os.fstat(shard.descriptor).st_size
            text = f"reading ended at byte {start + num_read}; it has {size} bytes now"
            path = str(self._root / self._shards[number])
            raise OSError(errno.EIO, f"{text}, and had {shard.size_bytes}", path)
        except OSError:
            self._close(number)
            raise

    def _patiently(
        self, number: int, attempt: Callable[[], T], first: Exception | None = None
    ) -> T:
        if self._patience is None:
            self._patience = files.Patience(self._root)
        return self._patience.retried(
            attempt,
            self._root / self._shards[number],
            lambda: self._others_can_be_read(number),
            first,
            self._close_half,
        )

    def _close_half(self) -> bool:
        """Closes half of the shards, and keeps fewer open from now on; False if none is open."""
        num_open = len(self._open)
        self._most_open = max(1, num_open // 2)
        self.close_down_to(self._most_open - 1)
        return num_open > 0

    def _others_can_be_read(self, number: int) -> bool:
        """Whether another shard of the dataset can be read, or its list where there is no other."""
        total = len(self._shards)
        others = {(number + step) % total for step in (1, total // 2, -1)} - {number}
        paths = [self._root / self._shards[other] for other in sorted(others)]
        return any(map(files.can_read, paths or [self._root / META / INFO_JSON]))

    def _opened(self, number: int) -> OpenShard:
        shard = self._open.get(number)
        if shard is not None:
            with suppress(KeyError):  # another thread has closed it
                self._open.move_to_end(number)
            return shard
        path = self._root / self._shards[number]
        self.close_down_to(self._most_open - 1)
        shard = OpenShard(path, self._load_offsets(number), self._shards[number])
        try:
            self._check(number, shard)
        except BaseException:
            shard.close()  # the traceback would keep it open
            raise
        self._open[number] = shard
        return shard

    def _load_offsets(self, number: int) -> Int64Array:
        """Returns where the samples of a shard begin, and where the last one ends."""
        return read_index(self._root / self._shards[number], self._counts[number])

    def _check_first_key(self, number: int, descriptor: int, offsets: Int64Array) -> None:
        """Compares a shard that was opened with `index.sqlite`."""
        self.keys.check_shard(number, descriptor, offsets)

    def _check(self, number: int, shard: OpenShard) -> None:
        """Checks that an opened file is the one that was opened before, and is indexed.

        Raises:
            OSError: Its size, or its index, has changed.
            DatasetFormatError: `index.sqlite` describes another shard.
        """
        seen = (shard.size_bytes, int(shard.offsets.sum()))
        known = self._seen.get(number, (*seen, _UNKNOWN))
        if seen != known[:2]:
            text = f"another file of {seen[0]} bytes took the place of one of {known[0]} bytes"
            text += ", or its index changed; restore it, or begin a run of the new data"
            raise OSError(errno.ESTALE, text, str(self._root / self._shards[number]))
        if shard.offsets[-1] > shard.size_bytes:
            self._overrun[number] = shard.size_bytes
        else:
            self._seen[number] = known
            self._overrun.pop(number, None)
        if known[2] != shard.inode:
            self._check_first_key(number, shard.descriptor, shard.offsets)
        if number not in self._overrun:
            self._seen[number] = (*seen, shard.inode)

    def _close(self, number: int) -> None:
        self._open.pop(number, None)

    def close_down_to(self, number: int) -> None:
        """Closes the least recently used shards until `number` are open."""
        with suppress(KeyError):  # other threads have closed all
            while len(self._open) > number:
                self._open.popitem(last=False)


class Ranges(NamedTuple):
    """Where samples lie in shards that are open: columns of shape (N,), in the order of the draws.

    Attributes:
        shards: the shards.
        owners: position of each sample's shard in `shards`.
        places: number in the shard.
        starts: first byte in the shard.
        stops: byte after the last.
    """

    shards: list[OpenShard]
    owners: Int64Array
    places: Int64Array
    starts: Int64Array
    stops: Int64Array


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

    data: BlockBytes
    members: Sequence[Any]
    shards: list[str]
    places: list[int]


class BlockReader(ABC):
    """Random access to the samples of a dataset, in blocks.

    Attributes:
        root: folder or file of the dataset.
        num_samples: samples that count; they are numbered 0..num_samples-1.
    """

    root: Path
    num_samples: int

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


class ShardReader(BlockReader):
    """Random access to the samples of a list of shards.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`.
        counts: samples of each shard.
        tar_file_ids: number of each shard in `index.sqlite`, to compare keys with it.
        excluded: positions, ascending, in the concatenated shards that do not count as samples.
        max_open: files that stay open; 0 opens each file again for every block.

    Attributes:
        starts: the position of the first sample of each shard, and the number of all samples.
    """

    def __init__(
        self,
        root: Path,
        shards: Sequence[str],
        counts: Sequence[int],
        tar_file_ids: Sequence[int],
        excluded: Sequence[int] = (),
        max_open: int = MAX_OPEN,
    ) -> None:
        self.root = root
        self.max_open = max_open
        self.shards = tuple(shards)
        self.tar_file_ids = tuple(tar_file_ids)
        self.starts = np.cumsum([0, *counts], dtype=np.int64)
        # The i-th excluded position has `excluded[i] - i` counted samples before it.
        self._excluded = _NONE
        if len(excluded):
            self._excluded = np.asarray(excluded, dtype=np.int64) - np.arange(len(excluded))
        self.num_samples = int(self.starts[-1]) - len(excluded)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the files behind: another process opens its own."""
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    @property
    def _files(self) -> OpenShards:
        """The shards: made on first use, since a worker of a large blend reads few of its sources.

        If two threads make them at once, both get the same.
        """
        found: OpenShards | None = self.__dict__.get("_opened")
        if found is None:
            found = self.__dict__.setdefault("_opened", self._new_files())
        return found

    def _new_files(self) -> OpenShards:
        counts = np.diff(self.starts).tolist()
        return OpenShards(self.root, self.shards, counts, self.tar_file_ids)

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the shard of each sample, by number, and its place there; both (N,)."""
        positions = indices
        if len(self._excluded):
            positions = indices + np.searchsorted(self._excluded, indices, side="right")
        shards = np.searchsorted(self.starts, positions, side="right") - 1
        return shards, positions - self.starts[shards]

    def ranges_at_once(self, indices: Int64Array) -> Ranges | None:
        """Looks up samples; None where something may be wrong."""
        shards, places = self.locate(indices)
        numbers = sorted({*shards.tolist()})
        found = [self._files.at_once(number) for number in numbers]
        opened = [shard for shard in found if shard is not None]
        self._files.close_down_to(self.max_open)
        if len(opened) < len(found):
            return None
        owners = np.searchsorted(numbers, shards)
        starts, stops = np.empty((2, len(places)), dtype=np.int64)
        for number, shard in enumerate(opened):
            own: Any = owners == number if len(opened) > 1 else slice(None)
            starts[own] = shard.offsets[places[own]]
            stops[own] = shard.offsets[places[own] + 1]
        return Ranges(opened, owners, places, starts, stops)

    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        """Reads samples; the smaller `max_bytes`, the fewer bytes between two samples are read."""
        return next(self.blocks(indices, max_bytes))

    def blocks(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Iterator[Block]:
        """Reads samples in blocks, each into the memory of the one before."""
        all_rows, lost = self._extents(indices, self._files.offsets)
        max_gap = min(MAX_GAP_BYTES, max_bytes >> 7)
        buffer = np.empty(0, dtype=np.uint8)
        for rows in _cut_in_blocks(all_rows, max_bytes):
            if len(buffer) > 2 * max_bytes:  # of one long sample
                buffer = np.empty(0, dtype=np.uint8)
            block = None if lost else self._large_files(rows)
            if block is None:
                buffer, shifts = self._read_runs(rows, max_gap, lost, buffer)
                block = self._block(buffer, rows, shifts, lost)
            self._files.close_down_to(self.max_open)
            yield block
            del block  # its files have separate memory

    def _large_files(self, rows: Rows) -> Block | None:
        """Reads samples of large files file by file; None where long ranges are to be read."""
        if (rows.stops - rows.starts).sum() < LARGE_BYTES * len(rows.order):
            return None
        back = np.argsort(rows.order)
        rows = Rows(*(column[back] for column in rows))
        found = self._files.read_large(rows)
        if found is None:
            return None
        return Block(*found, self._files.names_of(rows.shards), rows.places.tolist())

    def _block(
        self, data: UInt8Array, rows: Rows, shifts: Int64Array, lost: dict[int, Exception]
    ) -> Block:
        """Describes samples that were read, in the order of the draws."""
        back = np.argsort(rows.order)
        shifts = shifts[back]
        rows = Rows(*(column[back] for column in rows))
        rows = rows._replace(starts=rows.starts + shifts, stops=rows.stops + shifts)
        errors = {}
        if lost:
            errors = {i: lost[n] for i, n in enumerate(rows.order.tolist()) if n in lost}
        for i in errors:
            rows.stops[i] = rows.starts[i]  # an empty range
        members = self._members(data, rows, -shifts)
        for i, error in errors.items():
            members[i] = error
        names = self._files.names_of(rows.shards)
        return Block(data.data, members, names, rows.places.tolist())

    @property
    def is_slow(self) -> bool:
        """Whether reading waited for storage lately."""
        return self._files.slow_blocks > 0

    def advise(self, indices: Int64Array) -> None:
        """Asks the kernel to read samples into its page cache, neighbours at once."""
        rows, _ = self._extents(indices, self._files.offsets_at_once)
        firsts, lasts = np.array(_runs(rows, MAX_GAP_BYTES)).T
        ranges = np.stack([rows.shards[firsts], rows.starts[firsts], rows.stops[lasts - 1]], axis=1)
        for shard, start, stop in ranges.tolist():
            self._files.advise(shard, start, stop)

    def path_of(self, number: int) -> Path:
        """Returns the path of the shard at position `number`."""
        return self.root / self.shards[number]

    def _members(self, data: UInt8Array, rows: Rows, bases: Int64Array) -> Any:
        """Finds the files of samples in their bytes, and compares keys with the index.

        Args:
            data: the bytes.
            rows: the samples, in the order of the block; `starts` and `stops` are places in `data`.
            bases: shape (N,); where the buffer would begin in the shard.

        Returns:
            For each sample what `Block.members` has.
        """
        members, long = block_members(data, rows.starts, rows.stops, bases)
        if long:
            self._files.keys.compare(members, rows.shards, rows.places, long)
        return members

    def offsets(self, shard: int) -> Int64Array:
        """Returns where the samples of a shard begin, and where the last one ends.

        Raises:
            OSError: The shard cannot be read.
            DatasetFormatError: Its index is wrong.
        """
        return self._files.offsets(shard)

    def _extents(
        self, indices: Int64Array, offsets_of: Callable[[int], Int64Array]
    ) -> tuple[Rows, dict[int, Exception]]:
        """Looks up samples in the indexes of their shards.

        Args:
            indices: shape (N,); the samples.
            offsets_of: returns the index of a shard.

        Returns:
            The samples, and the errors of those that cannot be read, by their position among the
            N; these have no bytes.
        """
        order = np.argsort(indices, kind="stable")
        shards, places = self.locate(indices[order])
        starts, stops = np.zeros((2, len(places)), dtype=np.int64)
        lost: dict[int, Exception] = {}
        for first, last in _groups(shards[1:] != shards[:-1]):
            number = int(shards[first])
            try:
                offsets = offsets_of(number)
            except (OSError, DatasetFormatError) as error:
                pass_on(error)
                lost.update(dict.fromkeys(order[first:last].tolist(), error))
                continue
            starts[first:last] = offsets[places[first:last]]
            stops[first:last] = offsets[places[first:last] + 1]
            end = self._files.end_of(number)
            if end is not None:
                inside = first + int(np.searchsorted(stops[first:last], end, side="right"))
                for row in range(inside, last):
                    place, stop = int(places[row]), int(stops[row])
                    lost[int(order[row])] = self._files.cut_short(number, place, stop)
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
        runs = _runs(rows, max_gap)
        firsts = [first for first, _ in runs]
        numbers, bases = rows.shards[firsts].tolist(), rows.starts[firsts].tolist()
        sizes = (rows.stops[[last - 1 for _, last in runs]] - rows.starts[firsts]).tolist()
        data, num_blocks = buffer, -(-sum(sizes) // BLOCK)
        if num_blocks * BLOCK > len(data):  # a little longer, for the blocks after this one
            data = np.empty(num_blocks * 9 // 8 * BLOCK, dtype=np.uint8)
        target = data.data
        shifts = np.zeros(len(rows.starts), dtype=np.int64)
        at, num_waits = 0, self._files.num_waits
        for (first, last), number, base, size in zip(runs, numbers, bases, sizes, strict=True):
            if not size:  # all of these are lost
                continue
            own = target[at : at + size]
            failed = self._files.read(number, own, base, rows, first, last)
            for row, error in failed.items():
                lost[int(rows.order[row])] = error
            shifts[first:last] = at - base
            at += size
        is_slow = 4 * (self._files.num_waits - num_waits) > len(runs)
        self._files.slow_blocks = SLOW_BLOCKS if is_slow else max(0, self._files.slow_blocks - 1)
        return data, shifts


def _runs(rows: Rows, max_gap: int) -> list[tuple[int, int]]:
    """Returns the first row, and the row after the last, of neighbours in a shard."""
    is_far = rows.starts[1:] - rows.stops[:-1] > max_gap
    return _groups((rows.shards[1:] != rows.shards[:-1]) | is_far)


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
            yield Rows(*(column[is_own] for column in rows))
        first, before = last, int(ends[last - 1])


def _groups(is_cut: BoolArray) -> list[tuple[int, int]]:
    """Returns first and last + 1 of the runs between cuts; a cut lies before position i + 1."""
    edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(is_cut) + 1]
    return list(pairwise(edges))
