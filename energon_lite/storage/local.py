"""Files of this machine: regular ones only, opened at once or not at all.

A dataset may come from anywhere. A named pipe in the place of a tar would block for ever, a device
never ends, and a link in the place of a temporary file would be written through.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np

from energon_lite.core.errors import DatasetFormatError, Ignored, pass_on
from energon_lite.storage.byte_file import ByteFile, Folder, Status
from energon_lite.storage.os_errors import errors_of

# Up to this size each process has a copy of an index: with a thousand sources, 4 MB in each worker.
# A longer one is mapped, for all processes at once, though the system kills a process where storage
# cuts a mapped file short.
MAPPED_BYTES = 1 << 12
# Half of the memory maps that the kernel allows a process (vm.max_map_count), as of open files.
MOST_MAPS = 1 << 15
# Reads what is in the page cache, and nothing else; 0 where the kernel takes no advice either.
CACHED_ONLY = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "posix_fadvise") else 0
# Bytes that the kernel is asked for at once: it may cut off what is longer than its own read-ahead.
_ADVICE_BYTES = 128 << 10

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_NO_MAP = ctypes.c_void_p(-1).value

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class LocalFile(ByteFile):
    """A regular file; links to one are followed.

    Args:
        path: the file.
        flags: for the system; by default the file is only read.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is a pipe, a device, a folder or a socket, or the name can be none.
        OSError: It cannot be opened.
    """

    descriptor = -1

    def __init__(self, path: PurePath, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.descriptor, status = open_file(path, flags)
        self.size_bytes, self.identity = status.st_size, _identity_of(status)
        # The system takes the lowest number that is free. Without a limit, it is -1.
        half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self.is_surplus = self.descriptor >= (half if 0 <= half < MOST_MAPS else MOST_MAPS)

    def read_into(self, target: memoryview, start: int) -> int:
        """Fills `target` with the bytes from `start` on; fewer where the file ends."""
        total = num_read = os.preadv(self.descriptor, [target], start)
        while num_read and total < len(target):  # a signal, or a network file system
            num_read = os.preadv(self.descriptor, [target[total:]], start + total)
            total += num_read
        return total

    def read(self, start: int, stop: int) -> bytes:
        """Reads a range; an OSError where the file ends before `stop`."""
        data = os.pread(self.descriptor, stop - start, start)  # at most 2 GiB
        return data if len(data) == stop - start else super().read(start, stop)

    def read_at_hand(self, target: memoryview, start: int) -> bool:
        """Fills `target` if all of it is in the page cache; returns whether it did."""
        try:
            return os.preadv(self.descriptor, [target], start, CACHED_ONLY) == len(target)
        except OSError as error:  # file systems that do not know are often on other machines
            pass_on(error)
            return False

    def advise(self, start: int, stop: int) -> None:
        """Asks the kernel to read a range into its page cache; does not wait for it."""
        if CACHED_ONLY:
            with Ignored(OSError):  # a file system may refuse
                for at in range(start, stop, _ADVICE_BYTES):
                    size = min(_ADVICE_BYTES, stop - at)
                    os.posix_fadvise(self.descriptor, at, size, os.POSIX_FADV_WILLNEED)

    def size_now(self) -> int:
        """Returns the size that the file has now."""
        return os.fstat(self.descriptor).st_size

    def mapped(self) -> bytes | memoryview:
        """Returns the content; that of a long file is mapped."""
        if self.size_bytes > MAPPED_BYTES and len(_maps) < MOST_MAPS:
            mode = mmap.PROT_READ, mmap.MAP_SHARED
            address = libc.mmap(None, self.size_bytes, *mode, self.descriptor, 0)
            if address != _NO_MAP:
                return np.asarray(_Map(address, self.size_bytes)).data
        return super().mapped()

    # At the end of a program the default is still there; `os` and `suppress` may not be.
    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Closes the file, if it is open."""
        descriptor, self.descriptor = self.descriptor, -1
        try:
            if descriptor >= 0:
                close(descriptor)
        except OSError:
            pass

    __del__ = close


class LocalFolder(Folder):
    """The files of this machine, by their paths."""

    def status(self, name: PurePath) -> Status | None:
        """Returns the facts about what a path leads to; None where there is nothing.

        Raises:
            OSError: A folder above it may not be read, or links lead in a circle.
        """
        try:
            with errors_of(name):
                found = os.stat(name)  # noqa: PTH116  a name, not a `Path`
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return None
        mode = found.st_mode
        return Status(stat.S_ISREG(mode), stat.S_ISDIR(mode), found.st_size, _identity_of(found))

    def open(self, name: PurePath) -> ByteFile:
        """Opens a regular file; see `LocalFile`."""
        return LocalFile(name)

    def entries(self, name: PurePath) -> list[str]:
        """Returns the names in a folder, those of folders with a `/` at the end."""
        with errors_of(name), os.scandir(name) as entries:
            return [entry.name + "/" * entry.is_dir() for entry in entries]

    def is_well(self, name: PurePath) -> bool:
        """Whether a file can be opened and read now: from storage, not from the page cache."""
        try:
            file = LocalFile(name)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.descriptor, 0, 4096, os.POSIX_FADV_DONTNEED)
            return bool(os.pread(file.descriptor, 1, 0))
        except (OSError, DatasetFormatError):
            return False

    def real_path(self, name: PurePath) -> Path:
        """Returns the path."""
        return Path(name)

    def write(self, name: PurePath, data: bytes) -> None:
        """Writes a file, and makes the folders above it."""
        with errors_of(name.parent):
            Path(name.parent).mkdir(parents=True, exist_ok=True)
        with new_file(name) as file:
            file.write(data)


LOCAL = LocalFolder()


def _identity_of(status: os.stat_result) -> tuple[int, ...]:
    # A new file may get the inode of the one that it replaces.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_file(path: PurePath, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """Opens a regular file, at once or not at all.

    Returns:
        The descriptor, and the facts about the file.

    Raises:
        DatasetFormatError: It is no regular file, or the name can be none.
        OSError: It cannot be opened.
    """
    try:
        with errors_of(path):
            # Without O_NONBLOCK the opening of a pipe waits for a writer.
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except ValueError as error:  # a zero byte, half a surrogate
        raise DatasetFormatError(f"{str(path)!a} can be the name of no file ({error})") from None
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENODEV):
            raise
        raise _irregular(path, Path(path).stat().st_mode) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(path, status.st_mode)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor, status


def _irregular(path: PurePath, mode: int) -> DatasetFormatError:
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    return DatasetFormatError(
        f"{path} is {kind}, not a regular file; give another path, or put the file in its place"
    )


_maps: set[int] = set()  # addresses


class _Map:
    """A file that is mapped, until the last array over it is gone.

    Not `mmap.mmap`, which keeps a descriptor open for each map: a blend of many sources would need
    twice as many files as it reads. Nor an array of `ctypes`, of a new type for each size.
    """

    __slots__ = ("_address", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        _maps.add(address)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Describes the bytes for NumPy; they are read-only."""
        return {
            "version": 3,
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self._address, True),
        }

    # At the end of a program the module is emptied before the last object is gone.
    def __del__(self, is_ending: Any = sys.is_finalizing, munmap: Any = libc.munmap) -> None:
        if not is_ending():  # then threads may still read
            _maps.discard(self._address)
            munmap(self._address, self._size)


@contextmanager
def new_file(path: PurePath) -> Iterator[BinaryIO]:
    """Opens a file for writing that gets the name `path` when the block ends without an error.

    An existing file is replaced, a link itself and not what it leads to.

    Yields:
        The file; until then it has another `name`, which it loses where the block fails.

    Raises:
        OSError: It cannot be written.
    """
    temporary = Path(path).with_name(f"{stem_of(path.name)}.{os.urandom(8).hex()}.tmp")
    # "x" creates a file under a name that nothing has, not even a link.
    with errors_of(path), temporary.open("xb") as file:
        try:
            yield file
            file.close()
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def stem_of(name: str) -> str:
    """Returns how the temporary file of a name begins."""
    # A name may have 255 bytes, and a character 4.
    return name if len(os.fsencode(name)) <= 200 else name[:50]
