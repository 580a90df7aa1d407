"""Opens, reads and writes the files of datasets: regular files only, and with patience.

A dataset may come from anywhere. A named pipe in the place of a tar would block for ever, a device
never ends, and a link in the place of a temporary file would be written through. What storage
refuses for a moment is tried again: servers fail over, links drop.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from energon_lite.core.errors import DatasetFormatError, FatalSampleError, is_worth_a_line, pass_on

logger = logging.getLogger(__name__)

T = TypeVar("T")


# For how long one file is tried, and for how long a whole dataset that cannot be read is waited
# for: servers fail over within minutes, and ranks wait for each other for ten. [Unit: second]
BRIEF_SEC, OUTAGE_SEC = 4.0, 300.0
# The first pause, how much longer each is than the one before, and the longest. [Unit: second]
_FIRST_SEC, _FACTOR, _LONGEST_SEC = 0.02, 4, 1.0

# So long after a file could not be read, it is tried for a moment only. [Unit: second]
_AFTERWARDS_SEC, _MOMENT_SEC = 60.0, 0.1
# Of how many files that is remembered.
_MOST_FAILED = 1000

# Errors that may be gone a moment later, whichever file it is.
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ESTALE", "EAGAIN", "EINTR", "ETIMEDOUT", "ENOTCONN", "ECONNRESET", "ECONNABORTED",
        "ECONNREFUSED", "EPIPE", "EREMOTEIO", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "ESHUTDOWN", "ECOMM", "EPROTO", "EBUSY", "ENOLCK", "ENOMEM", "EBADF",
        "EKEYEXPIRED",
    )
    if hasattr(errno, name)
)  # fmt: skip

# No more files can be opened, by this process or on this machine.
FULL = frozenset((errno.EMFILE, errno.ENFILE))
# What no server that comes back changes.
_FINAL = (errno.ELOOP, errno.ENAMETOOLONG)

# Files that are read whole are lists and settings. The index of a shard of 30 million samples has
# 240 MB, the .info.json of a million shards 40 MB.
MAX_WHOLE_BYTES = 1 << 30
# Up to this size each process has a copy of an index: with a thousand sources, 4 MB in each worker.
# A longer one is mapped, for all processes at once, though the system kills a process where storage
# cuts a mapped file short.
MAPPED_BYTES = 1 << 12

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
_REMEDIES = {
    **dict.fromkeys(PASSING, "the storage failed; try again, and check the disk or the mount"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give the user of this process permission for it"),
    errno.EROFS: "mount the file system for writing, or work on a copy",
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "free some space there, then run the same command again",
    ),
    errno.ENAMETOOLONG: "give the files and folders shorter names",
    errno.ELOOP: "links lead in a circle, or a link is where there may be none; move it away",
    errno.ENOTDIR: "a file is in the place of a folder; move it away",
    errno.EEXIST: "something else is in the place of a folder; move it away",
    errno.EISDIR: "a folder is in the place of a file; move it away",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the limit of open files of the machine",
    errno.ENOMEM: "free some memory",
    errno.ESTALE: "the file was replaced on the network storage; try again",
}
_TEMPORARY = re.compile(r"(.*)\.[0-9a-f]{16}\.tmp", re.DOTALL)

_current = threading.local()

# Tests replace both.
sleep = time.sleep
clock = time.monotonic


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Logs a warning, once in each process."""
    logger.warning("%s", message)


# -------------------------------------------------------------------------------- trying again


def briefly(error: OSError, _spent_sec: float) -> float:
    """Returns for how many seconds a file is tried after an error that may pass."""
    return BRIEF_SEC if error.errno in PASSING else 0.0


def retried(
    attempt: Callable[[], T],
    path: Path,
    patience: Callable[[OSError, float], float] = briefly,
    first: Exception | None = None,
) -> T:
    """Calls a function again, after longer and longer pauses, until it succeeds.

    Inside another such call it is called only once: the outer one tries again.

    Args:
        attempt: what to call.
        path: the file that it reads, for messages.
        patience: returns for how many seconds in all to try, by the newest error and the seconds
            spent so far. Called once for each error, so it may do something about it.
        first: the error of a try that the caller made.

    Returns:
        What `attempt` returned.

    Raises:
        OSError: The newest error; after several tries with their number and time.
    """
    if getattr(_current, "is_trying", False):
        return attempt()
    pass_on(first)
    slept, pause = 0.0, _FIRST_SEC
    begun, tries = (0.0, 1) if first is None else (clock(), 2)
    while True:
        _current.is_trying = True
        try:
            result = attempt()
            break
        except OSError as error:
            pass_on(error)
            # Since the first error: the attempt itself may take long.
            begun = begun or clock()
            spent = max(slept, clock() - begun)
            left = patience(error, spent) - spent
            if left <= 0:
                if first is None:
                    raise
                raise _with_tries(error, path, tries, spent) from None
            first = first or error
        finally:
            _current.is_trying = False
        sleep(min(pause, left))
        slept += min(pause, left)
        pause = min(pause * _FACTOR, _LONGEST_SEC)
        tries += 1
    if first is not None:
        kind = errno.errorcode.get(getattr(first, "errno", None) or 0, type(first).__name__)
        number = is_worth_a_line((kind, str(path.parent)))
        if number:
            logger.warning(
                "%s could be read at try %d, after %.1f s: %s (%s: %d times in this folder so far)",
                path, tries, max(slept, clock() - begun), first, kind, number,
            )  # fmt: skip
    return result


class Patience:
    """Reads files of a dataset or a folder again, while their storage fails.

    A file is tried for some seconds, and for a minute after that for a moment only. While no other
    file can be read either, it is tried for some minutes: the samples are fine.

    Args:
        root: of the files, for messages.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # Until when a file that failed is tried for a moment only, and its error.
        self._failed: dict[Path, tuple[float, OSError]] = {}

    def retried(
        self,
        attempt: Callable[[], T],
        path: Path,
        others_can_be_read: Callable[[], bool],
        first: Exception | None = None,
        close_files: Callable[[], bool] = lambda: False,
    ) -> T:
        """Calls a function that reads from a file, again and again.

        Args:
            attempt: what to call.
            path: the file.
            others_can_be_read: returns whether it is this file only that cannot be read.
            first: the error of a try that the caller made.
            close_files: called where no more files can be opened; returns whether some were open.

        Returns:
            What `attempt` returned.

        Raises:
            OSError: This file cannot be read.
            FatalSampleError: None can be read.
        """
        if getattr(_current, "is_trying", False):
            return attempt()
        until, _ = self._failed.get(path, (0.0, None))
        is_away, away_sec = False, 0.0

        def patience(error: OSError, spent_sec: float) -> float:
            nonlocal is_away, away_sec
            if error.errno in _FINAL:
                return 0.0
            if error.errno in FULL:
                is_away = not close_files()
                return away_sec + BRIEF_SEC
            was_away, is_away = is_away, not others_can_be_read()
            if was_away:
                away_sec = spent_sec
            if not is_away:
                return away_sec + (_MOMENT_SEC if clock() < until else BRIEF_SEC)
            if not was_away:
                logger.warning(
                    "%s: no file of the dataset can be read (%s); waiting for %d s at most",
                    self._root, error, OUTAGE_SEC,
                )  # fmt: skip
            return OUTAGE_SEC

        try:
            return retried(attempt, path, patience, first)
        except OSError as error:
            pass_on(error)
            if is_away:
                raise FatalSampleError(
                    f"{self._root}: no file of the dataset can be read any more: {error}. No "
                    "sample was skipped for it. Bring the storage back, and resume from the last "
                    "state"
                ) from error
            raise self._remembered(error, path) from None

    def _remembered(self, error: OSError, path: Path) -> OSError:
        """Returns the error of a file, or the same one of before, which names the tries."""
        _, before = self._failed.get(path, (0.0, None))
        if before is None or error.errno != before.errno:
            before = explained(error, path)
        if len(self._failed) >= _MOST_FAILED:
            self._failed.clear()
        self._failed[path] = clock() + _AFTERWARDS_SEC, before
        return before


def _with_tries(error: OSError, path: Path, tries: int, spent: float) -> OSError:
    text = f"tried {tries} times in {spent:.1f} s"
    if error.errno is None:  # one of ours, which names its file
        return type(error)(f"{error} ({text})")
    return OSError(error.errno, f"{error.strerror} ({text})", error.filename or str(path))


# ---------------------------------------------------------------------------- opening, reading


def explained(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """Returns an error of the system with the file and the remedy in its text."""
    remedy = _REMEDIES.get(error.errno or 0)
    text = error.strerror or str(error)
    if remedy is None or remedy in text:
        return error
    return OSError(error.errno, f"{text}; {remedy}", os.fspath(error.filename or path))


@contextmanager
def errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Explains the errors of the system in a block that uses the file `path`."""
    try:
        yield
    except OSError as error:
        raise explained(error, path) from None


def is_there(path: Path) -> bool:
    """Returns whether there is something under this name, of whatever kind.

    Raises:
        OSError: It cannot be found out: a folder above it may not be read, links lead in a circle.
    """
    try:
        with errors_of(path):
            path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    return True


def open_regular(path: Path) -> int:
    """Opens a regular file for reading; links to one are followed.

    What storage refuses for a moment is tried again, as in `read_file`.

    Returns:
        The descriptor.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is a pipe, a device, a folder or a socket, or the name can be none.
        OSError: It cannot be opened.
    """
    return retried(lambda: open_file(path), path)


def open_own(path: Path) -> int:
    """Opens a regular file for reading and writing, and creates it; a link is refused.

    Returns:
        The descriptor.

    Raises:
        DatasetFormatError: It is a pipe, a device or a socket.
        OSError: It is a link, or cannot be opened.
    """
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, at once or not at all.

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
        raise _irregular(path, path.stat().st_mode) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor


def _irregular(path: Path, mode: int) -> DatasetFormatError:
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    return DatasetFormatError(
        f"{path} is {kind}, not a regular file; give another path, or put the file in its place"
    )


def read_file(path: Path, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
    """Reads a regular file whole.

    Args:
        path: the file.
        max_bytes: longest file that is read.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or a longer one.
        OSError: It cannot be read.
    """
    return bytes(retried(lambda: _whole(path, max_bytes), path))


def _whole(path: Path, max_bytes: int, is_mapped: bool = False) -> bytes | memoryview:
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if is_mapped and size > MAPPED_BYTES:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            if address != _NO_MAP:
                return np.asarray(_Map(address, size)).data
        if size > max_bytes:
            raise DatasetFormatError(
                f"{path}: {size:,} bytes, where at most {max_bytes:,} can be right"
            )
        with errors_of(path):
            data = file.read(size)
    if len(data) < size:
        raise OSError(errno.EIO, f"reading ended at byte {len(data):,} of {size:,}", str(path))
    return data


def map_file(path: Path) -> bytes | memoryview:
    """Reads a regular file whole; a long one is mapped, so that all processes share its memory.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file.
        OSError: It cannot be read.
    """
    return retried(lambda: _whole(path, MAX_WHOLE_BYTES, is_mapped=True), path)


class _Map:
    """A file that is mapped, until the last array over it is gone.

    Not `mmap.mmap`, which keeps a descriptor open for each map: a blend of many sources would need
    twice as many files as it reads. Nor an array of `ctypes`, of a new type for each size.
    """

    __slots__ = ("_address", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

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
            munmap(self._address, self._size)


class OpenDescriptor:
    """A file that stays open as long as this object is used.

    Attributes:
        descriptor: of the file; -1 if it is closed.
    """

    descriptor = -1

    # As above: the default is there at the end of a program, `os` may not be.
    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Closes the file, if it is open."""
        descriptor, self.descriptor = self.descriptor, -1
        try:
            if descriptor >= 0:
                close(descriptor)
        except OSError:  # `suppress` may not be there, either
            pass

    __del__ = close


# -------------------------------------------------------------------------------------- writing


def can_read(path: Path) -> bool:
    """Whether a file can be opened and read now: from storage, not from the system's memory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 4096, os.POSIX_FADV_DONTNEED)
            return bool(os.pread(descriptor, 1, 0))
        finally:
            os.close(descriptor)
    except OSError:
        return False


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that gets the name `path` when the block ends without an error.

    An existing file is replaced, a link itself and not what it leads to.

    Yields:
        The file; until then it has another `name`, which it loses where the block fails.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f"{_stem(path.name)}.{os.urandom(8).hex()}.tmp")
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


def _stem(name: str) -> str:
    # A name may have 255 bytes, and a character 4.
    return name if len(os.fsencode(name)) <= 200 else name[:50]


def remove_leftovers(folder: Path, names: Collection[str], min_age_sec: float = 0.0) -> None:
    """Removes the temporary files of killed processes (`new_file`).

    Args:
        folder: where the files are.
        names: names of the files; the temporary files of others stay.
        min_age_sec: younger files stay, where another process may be writing.
    """
    stems = {_stem(name) for name in names}
    with errors_of(folder), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if not found or found[1] not in stems or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime >= min_age_sec:
                    Path(entry.path).unlink()


def leads_out(path: Path, folder: Path) -> bool:
    """Returns whether links lead out of `folder`, which may be a link itself, to `path`."""
    home = Path(os.path.realpath(folder))
    return not Path(os.path.realpath(path)).is_relative_to(home)


def write_atomically(path: Path, data: bytes, mode: int | None = None) -> None:
    """Writes a whole file or nothing: a reader never sees a part of it.

    Args:
        path: the file; an existing one is replaced.
        data: its content.
        mode: permission bits; by default those that a new file gets.

    Raises:
        OSError: It cannot be written.
    """
    with new_file(path) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data)


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Reads at `offset` of an open file until `target` is full, or the file ends.

    A single `preadv` may read less (a signal, a network file system); this reads on.

    Returns:
        The number of bytes read.
    """
    total = num_read = os.preadv(descriptor, [target], offset)
    while num_read and total < len(target):
        num_read = os.preadv(descriptor, [target[total:]], offset + total)
        total += num_read
    return total
