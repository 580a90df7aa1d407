"""The tars of a prepared dataset and its index, as one process has them open.

Any thread may read from them. After a fork the child opens its own index.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, TypeVar

from energon_lite.core.errors import DatasetFormatError
from energon_lite.formats.nvmeta import META
from energon_lite.formats.shards import KeyCheck
from energon_lite.formats.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.formats.tar import first_keys
from energon_lite.storage import files

T = TypeVar("T")

# Tars that stay open.
_MAX_OPEN = 64
# These are read to find out whether the storage is there, beside the index.
_SHARDS_TRIED = 2

# Indexes that were open when this process was forked: they may be neither used nor closed.
_inherited: list[IndexDatabase | None] = []


class KeysAtEnds(KeyCheck):
    """Compares the first and the last key of each tar with the index.

    Args:
        root: folder of the dataset.
        shards: the names of its tars.
    """

    def __init__(self, root: PurePath, shards: Sequence[str]) -> None:
        super().__init__(root, shards, range(len(shards)))
        self._last: dict[int, dict[int, tuple[str, int, int]]] = {}

    def check_last_key(self, shard: int, file: files.ByteFile) -> None:
        """Compares the key of the last sample of a shard that is open, if the file is long enough.

        Raises:
            DatasetFormatError: It is not that of the index.
        """
        if shard not in self._last:
            self._last[shard] = self._ask(IndexDatabase.last_sample, self._ids[shard])
        for place, (stored, start, size) in self._last[shard].items():
            if 0 <= start <= start + size <= file.size_bytes:
                key = (*first_keys(file, start + size, start), "")[0]
                if key != stored:
                    raise self.error(shard, place, key, f"{INDEX_SQLITE} has {stored!r}")


class OpenTars:
    """The tars of a prepared dataset, and its index.

    Args:
        root: folder of the dataset.
        shards: the names of its tars; in all methods a tar is a position in these.
    """

    def __init__(self, root: PurePath, shards: Sequence[str]) -> None:
        self._root = root
        self._shards = shards
        keys = KeysAtEnds(root, shards)
        # Not a method: this object would be part of a circle, and close its index late.
        self._opened = lru_cache(_MAX_OPEN)(partial(_open_tar, root, shards, keys))
        self._patience = files.Patience(root)
        self._open_no_index()

    def _open_no_index(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
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
            self._open_no_index()
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

    def _patiently(self, attempt: Callable[[], T], path: PurePath, first: OSError) -> T:
        names = (*self._shards[:_SHARDS_TRIED], f"{META}/{INDEX_SQLITE}")
        others = [self._root / name for name in names if self._root / name != path]
        return self._patience.retried(
            attempt, path, lambda: any(map(files.can_read, others)), first, self._close_all
        )

    def _close_all(self) -> bool:
        num_open = self._opened.cache_info().currsize
        self._opened.cache_clear()
        return num_open > 0

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        try:
            tar = self._opened(shard)
            if offset >= 0 <= size and offset + size <= tar.size_bytes:
                return tar.read(offset, offset + size)
        except BaseException:
            self._close_all()
            raise
        self._close_all()
        raise DatasetFormatError(
            f"{tar.path}: a file should have {size} bytes from byte {offset} on, but the tar has "
            f"{tar.size_bytes}: it is truncated, or was replaced after preparing. Restore it, or "
            f"run `energon-lite prepare {self._root} --tar-index-only`"
        )


def _open_tar(
    root: PurePath, shards: Sequence[str], keys: KeysAtEnds, shard: int
) -> files.ByteFile:
    """Opens a tar, and compares its first and its last key with the index."""
    tar = files.open_at_once(root / shards[shard])
    keys.check_first_key(shard, tar, tar.size_bytes)
    keys.check_last_key(shard, tar)
    return tar
