"""The tars of a prepared dataset and its index, as one process has them open.

Any thread may read from them. After a fork the child opens its own.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage import files
from energon_lite.storage.nvmeta import META
from energon_lite.storage.shards import KeyCheck
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.storage.tar import TarError, read_header

T = TypeVar("T")

# Tars that stay open.
_MAX_OPEN = 64
# These are read to find out whether the storage is there, beside the index.
_SHARDS_TRIED = 2

# The headers of one file are not longer.
_HEADER_BYTES = 64 << 10

# Indexes that were open when this process was forked: they may be neither used nor closed.
_inherited: list[IndexDatabase | None] = []


class OpenFile(files.OpenDescriptor):
    """A file that is open as long as this object is used.

    Args:
        path: the file.

    Attributes:
        size_bytes: its size when it was opened.
        version: differs between files of one name.

    Raises:
        DatasetFormatError: It is no regular file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = files.open_file(path)
        status = os.fstat(self.descriptor)
        self.size_bytes = status.st_size
        # A new file may get the inode of the one that it replaces.
        self.version = (status.st_ino, status.st_size, status.st_mtime_ns)

    def read(self, offset: int, size: int) -> bytes:
        """Reads a range.

        Raises:
            OSError: The file ends before, or cannot be read.
        """
        data = os.pread(self.descriptor, size, offset)
        if len(data) == size:
            return data
        target = bytearray(size)  # one call returns no more than 2 GiB
        num_read = files.read_into(self.descriptor, memoryview(target), offset)
        if num_read < size:
            text = f"reading ended at byte {offset + num_read}, before byte {offset + size}"
            raise OSError(errno.EIO, text, str(self.path))
        return bytes(target)


class OpenTars:
    """The tars of a prepared dataset, and its index.

    Args:
        root: folder of the dataset.
        shards: the names of its tars; in all methods a tar is a position in these.
    """

    def __init__(self, root: Path, shards: Sequence[str]) -> None:
        self._root = root
        self._shards = shards
        self._keys = KeyCheck(root, shards, range(len(shards)))
        self._patience = files.Patience(root)
        # The file of each tar whose first key was compared with the index.
        self._compared: dict[int, tuple[int, ...]] = {}
        self._open_nothing()

    def _open_nothing(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._tars: OrderedDict[int, OpenFile] = OrderedDict()
        self._index: IndexDatabase | None = None

    def __del__(self, getpid: Callable[[], int] = os.getpid, keep: Any = _inherited.append) -> None:
        """Closes the index, in the process that opened it."""
        if self._process != getpid():
            keep(self._index)
        elif self._index is not None:
            self._index.__exit__()

    def index(self) -> IndexDatabase:
        """Returns the open index."""
        if self._process != os.getpid():
            _inherited.append(self._index)
            self._open_nothing()
        with self._lock:  # another connection would stay open until garbage is collected
            if self._index is None:
                self._index = IndexDatabase(self._root)
            return self._index

    def ask(self, question: Callable[[IndexDatabase], T]) -> T:
        """Asks the index something.

        Raises:
            OSError: The index cannot be read, though tars can be.
            DatasetFormatError: It is corrupt.
            FatalSampleError: Nothing of the dataset can be read.
        """

        def again() -> T:
            self._index = None
            return question(self.index())

        try:
            return question(self.index())
        except OSError as error:
            return self._patiently(again, self._root / META / INDEX_SQLITE, error)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Reads a range of a tar.

        Raises:
            OSError: The tar cannot be read, though others can be.
            DatasetFormatError: It ends before the range does, or is not the one that was indexed.
            FatalSampleError: Nothing of the dataset can be read.
        """
        try:
            return self._read(shard, offset, size)
        except OSError as error:
            path = self._root / self._shards[shard]
            return self._patiently(lambda: self._read(shard, offset, size), path, error)

    def _patiently(self, attempt: Callable[[], T], path: Path, first: OSError) -> T:
        names = (*self._shards[:_SHARDS_TRIED], f"{META}/{INDEX_SQLITE}")
        others = [self._root / name for name in names if self._root / name != path]
        return self._patience.retried(
            attempt, path, lambda: any(map(files.can_read, others)), first, self._close_all
        )

    def _close_all(self) -> bool:
        with self._lock:
            num_open = len(self._tars)
            self._tars.clear()
        return num_open > 0

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        tar = self._opened(shard)
        try:
            if offset >= 0 <= size and offset + size <= tar.size_bytes:
                return tar.read(offset, size)
            what = f"a file should have {size} bytes from byte {offset} on, but the tar has"
            raise self._misfit(tar, f"{what} {tar.size_bytes}: it is truncated, or")
        except BaseException:
            with self._lock:
                self._tars.pop(shard, None)
            raise

    def _opened(self, shard: int) -> OpenFile:
        if self._process != os.getpid():
            self.index()
        with self._lock:
            tar = self._tars.get(shard)
            if tar is not None:
                self._tars.move_to_end(shard)
                return tar
        tar = OpenFile(self._root / self._shards[shard])
        if self._compared.get(shard) != tar.version:
            self._compare(shard, tar)
            self._compared[shard] = tar.version
        with self._lock:
            self._tars[shard] = tar
            # A thread that still reads from a tar keeps it open.
            while len(self._tars) > _MAX_OPEN:
                self._tars.popitem(last=False)
        return tar

    def _compare(self, shard: int, tar: OpenFile) -> None:
        """Checks that the first and the last sample of a tar are those of the index."""
        self._keys.check_first_key(shard, tar.descriptor, tar.size_bytes)
        for key, offset, size in self.index().last_sample(shard):
            if offset < 0 or offset + size > tar.size_bytes:
                return  # the other samples may be there
            found: tuple[str, str] | None = ("", "")
            with suppress(TarError):
                header = read_header(tar.read(offset, min(size, _HEADER_BYTES)), 0, offset)
                found = found if header is None else header.key_and_part()
            if found is not None and found[0] != key:
                raise self._misfit(tar, f"sample {key!r} does not begin at byte {offset}: the tar")

    def _misfit(self, tar: OpenFile, text: str) -> DatasetFormatError:
        return DatasetFormatError(
            f"{tar.path}: {text} was replaced after preparing. Restore it, or run `energon-lite "
            f"prepare {self._root} --tar-index-only`"
        )
