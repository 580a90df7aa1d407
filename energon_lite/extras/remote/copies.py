"""Copies of objects on this machine, present in parts: read by all processes, written by one.

A copy is a sparse file with the bytes of the object at their own offsets, and a map: a byte for
each granule, written after the granule's bytes. So a copy is right whenever its writer is killed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from energon_lite.storage.files import libc

# File systems free whole blocks, mostly of this size; members of a tar begin at multiples of 512.
GRANULE = 4096
# A counter before the map, of the beginnings and ends of taking bytes away. These bytes are marked
# before they are freed, and can only be fetched again after the end.
_HEAD_BYTES = 8
# More are needed only where a reader is always interrupted for longer than taking away needs.
_MOST_READS = 1000
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
# Bytes that are newer than their marks by more are another program's. [Unit: second]
_BETWEEN_SEC = 1.0
libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long


def path_of(folder: Path, address: str, size_bytes: int, identity: Any) -> Path:
    """Returns the path of the copy of an object as it was when it was first asked for.

    Args:
        folder: of all copies.
        address: of the object.
        size_bytes: its size.
        identity: differs between objects that had the address one after the other.
    """
    text = json.dumps([address, size_bytes, identity])
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.data"


def bytes_beside(size_bytes: int) -> int:
    """Returns what a copy takes on the disk beside its bytes: its facts, its map, a last block."""
    return 2 * GRANULE - (-_map_bytes(size_bytes) // GRANULE) * GRANULE


def is_sound(path: Path, size_bytes: int) -> bool:
    """Returns whether a copy that another process left is as it was left, and has any bytes."""
    data, map_path = path.stat(), path.with_suffix(".map")
    marks, map_time = map_path.read_bytes(), map_path.stat().st_mtime
    sizes = data.st_size, len(marks)
    # Bytes are written before their marks, and the writer may be killed in between.
    is_touched = data.st_mtime > map_time + _BETWEEN_SEC
    is_whole = sizes == (size_bytes, _map_bytes(size_bytes)) and not is_touched
    return is_whole and b"\1" in marks[_HEAD_BYTES:]


def _map_bytes(size_bytes: int) -> int:
    return _HEAD_BYTES - (-size_bytes // GRANULE)


@contextmanager
def address_in(folder: Path) -> Iterator[str]:
    """Yields the address of the socket in a folder, which may have 108 bytes, but not its path."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


class Copy:
    """The copy of one object.

    Args:
        path: the sparse file (`path_of`).
        size_bytes: size of the object.

    Raises:
        FileNotFoundError: There is none.
    """

    descriptor = -1
    _flags = os.O_RDONLY | os.O_CLOEXEC

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self.descriptor = os.open(path, self._flags, 0o600)
        map_descriptor = os.open(path.with_suffix(".map"), self._flags, 0o600)
        try:
            self._begin(map_descriptor)
            memory = mmap.mmap(map_descriptor, _map_bytes(size_bytes), access=mmap.ACCESS_READ)
        except BaseException:
            os.close(map_descriptor)
            raise
        self._opened(map_descriptor)
        self._counter = np.frombuffer(memory, np.int64, 1)
        self._map = memory

    def _begin(self, map_descriptor: int) -> None:
        """Prepares the files, before the map is looked at."""

    def _opened(self, map_descriptor: int) -> None:
        os.close(map_descriptor)

    def close(self) -> None:
        """Closes the sparse file."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        """Closes it."""
        self.close()

    def has(self, start: int, stop: int) -> bool:
        """Returns whether a range is there."""
        first, last = _HEAD_BYTES + start // GRANULE, _HEAD_BYTES - (-stop // GRANULE)
        return self._map.find(b"\0", first, last) < 0

    def read_into(self, target: memoryview, start: int) -> bool:
        """Fills `target`, if all of its bytes are there before and after.

        Where something is taken away meanwhile, which need not be these bytes, it reads again.
        """
        stop = start + len(target)
        for _ in range(_MOST_READS):
            counter, total = int(self._counter[0]), 0
            if stop > self.size_bytes or not self.has(start, stop):
                return False
            while total < len(target):
                num_read = os.preadv(self.descriptor, [target[total:]], start + total)
                if not num_read:
                    return False
                total += num_read
            if counter == int(self._counter[0]):
                return self.has(start, stop)
        return False

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges of whole granules in a range that are not there."""
        return self._runs(start, stop, b"\0", b"\1")

    def _runs(self, start: int, stop: int, own: bytes, other: bytes) -> Iterator[tuple[int, int]]:
        at, last = _HEAD_BYTES + start // GRANULE, _HEAD_BYTES - (-stop // GRANULE)
        while (first := self._map.find(own, at, last)) >= 0:
            at = self._map.find(other, first, last)
            at = last if at < 0 else at
            end = (at - _HEAD_BYTES) * GRANULE
            yield (first - _HEAD_BYTES) * GRANULE, min(end, self.size_bytes)


class WritableCopy(Copy):
    """A copy that may be changed, and is made where there is none: by one process at a time.

    The map is written, not mapped: on a full disk that would be a signal which kills the process.
    """

    _flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    _map_descriptor = -1

    def _begin(self, map_descriptor: int) -> None:
        os.ftruncate(self.descriptor, self.size_bytes)
        os.ftruncate(map_descriptor, _map_bytes(self.size_bytes))

    def _opened(self, map_descriptor: int) -> None:
        self._map_descriptor = map_descriptor

    def close(self) -> None:
        """Closes both files."""
        super().close()
        descriptor, self._map_descriptor = self._map_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def put(self, start: int, data: Any) -> None:
        """Writes whole granules.

        Raises:
            OSError: The disk is full.
        """
        total = 0
        while total < len(data):
            total += os.pwrite(self.descriptor, data[total:], start + total)
        self._mark(start, start + total, b"\1")

    def take_away(self, start: int, stop: int) -> None:
        """Frees the place of the granules that are there; a reader of them notices.

        The others may just be written by another thread, which marks them after that.
        """
        self._count()
        for at, end in self._runs(start, stop, b"\1", b"\0"):
            self._mark(at, end, b"\0")
            libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, at, end - at)
        self._count()

    def sync(self) -> None:
        """Waits until all is on the disk."""
        os.fsync(self.descriptor)
        os.fsync(self._map_descriptor)

    def _mark(self, start: int, stop: int, value: bytes) -> None:
        first, last = start // GRANULE, -(-stop // GRANULE)
        os.pwrite(self._map_descriptor, value * (last - first), _HEAD_BYTES + first)

    def _count(self) -> None:
        os.pwrite(self._map_descriptor, (self._counter[0] + 1).tobytes(), 0)
