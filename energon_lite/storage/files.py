"""Opens, reads and writes files of data by their paths, wherever they lie, and with patience.

A path is a name: it leads to a folder that was registered (`storage.byte_file`), or to a file of
this machine. No other package touches the files behind it. What storage refuses for a moment is
tried again (`storage.patience`).
"""

from __future__ import annotations

import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

import numpy as np

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage import local
from energon_lite.storage.byte_file import ByteFile as ByteFile
from energon_lite.storage.byte_file import Folder, Status, registered
from energon_lite.storage.byte_file import register as register
from energon_lite.storage.local import LOCAL, open_file
from energon_lite.storage.local import libc as libc
from energon_lite.storage.os_errors import FULL as FULL
from energon_lite.storage.os_errors import PASSING as PASSING
from energon_lite.storage.os_errors import errors_of as errors_of
from energon_lite.storage.os_errors import explained as explained
from energon_lite.storage.patience import Patience as Patience
from energon_lite.storage.patience import retried as retried
from energon_lite.storage.patience import warn_once as warn_once

# Files that are read whole are lists and settings. The index of a shard of 30 million samples has
# 240 MB, the .info.json of a million shards 40 MB.
MAX_WHOLE_BYTES = 1 << 30
_TEMPORARY = re.compile(r"(.*)\.[0-9a-f]{16}\.tmp", re.DOTALL)


def _place(path: PurePath) -> tuple[Folder, PurePath]:
    """Returns the folder that a path leads to, and the name in it."""
    return registered(path) or (LOCAL, path)


# ------------------------------------------------------------------------------------- asking


def status_of(path: PurePath) -> Status | None:
    """Returns the facts about a path; None where there is nothing.

    Raises:
        OSError: They cannot be found out: a folder above it may not be read, links lead in a
            circle.
    """
    folder, name = _place(path)
    return folder.status(name)


def is_there(path: PurePath) -> bool:
    """Returns whether there is something under this name, of whatever kind; see `status_of`."""
    return status_of(path) is not None


def is_file(path: PurePath) -> bool:
    """Returns whether a path leads to a regular file; see `status_of`."""
    status = status_of(path)
    return status is not None and status.is_file


def is_folder(path: PurePath) -> bool:
    """Returns whether a path leads to a folder; see `status_of`."""
    status = status_of(path)
    return status is not None and status.is_folder


def size_of(path: PurePath) -> int:
    """Returns the size of a file in bytes.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be found out.
    """
    status = retried(lambda: status_of(path), path)
    if status is None:
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return status.size_bytes


def sizes_of(folder: PurePath, names: Iterable[PurePath | str]) -> list[int]:
    """Returns the sizes of files in bytes, asked for at once; -1 for one that is not there.

    Args:
        folder: that they are in.
        names: of the files.

    Raises:
        OSError: They cannot be found out.
    """
    place, name = _place(folder)
    paths = [name / own for own in names]
    found = retried(lambda: place.statuses(paths), folder)
    return [-1 if status is None else status.size_bytes for status in found]


def entries(path: PurePath) -> list[str]:
    """Returns the names in a folder, sorted, those of folders with a `/` at the end.

    Raises:
        FileNotFoundError: There is no such folder.
        OSError: It cannot be read.
    """
    folder, name = _place(path)
    return sorted(folder.entries(name))


def can_read(path: PurePath) -> bool:
    """Whether a file can be opened and read now: from storage, not from the system's memory."""
    folder, name = _place(path)
    return folder.is_well(name)


def is_local(path: PurePath) -> bool:
    """Returns whether a path is one of this machine, and not of a registered storage."""
    return registered(path) is None


def absolute(path: PurePath) -> PurePath:
    """Returns a path that starts at the root of its storage; links and `..` in it stay."""
    return path if path.is_absolute() or registered(path) else Path(path).absolute()


def resolved(path: PurePath) -> PurePath:
    """Returns the path that links on this machine lead to, and without `..`."""
    return path if registered(path) else Path(path).resolve()


def real_path(path: PurePath) -> Path:
    """Returns a local path of a file, for programs that know no other files, such as SQLite.

    Raises:
        DatasetFormatError: The storage has none.
    """
    folder, name = _place(path)
    return folder.real_path(name)


def leads_out(path: PurePath, folder: PurePath) -> bool:
    """Returns whether links lead out of `folder`, which may be a link itself, to `path`."""
    return not resolved(path).is_relative_to(resolved(folder))


# ------------------------------------------------------------------------------------- reading


def open_bytes(path: PurePath) -> ByteFile:
    """Opens a file for reading; storage that refuses for a moment is asked again.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is a pipe, a device, a folder or a socket, or the name can be none.
        OSError: It cannot be opened.
    """
    return retried(lambda: open_at_once(path), path)


def open_at_once(path: PurePath) -> ByteFile:
    """Opens a file for reading, or raises the first error; see `open_bytes`."""
    folder, name = _place(path)
    return folder.open(name)


def read_file(path: PurePath, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
    """Reads a regular file whole.

    Args:
        path: the file.
        max_bytes: longest file that is read.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or a longer one.
        OSError: It cannot be read.
    """

    def whole() -> bytes:
        file = open_at_once(path)
        if file.size_bytes > max_bytes:
            raise DatasetFormatError(
                f"{path}: {file.size_bytes:,} bytes, where at most {max_bytes:,} can be right"
            )
        with errors_of(path):
            return file.read(0, file.size_bytes)

    return retried(whole, path)


def prefetch(folder: PurePath, names: Iterable[PurePath], stop: int = 16 << 20) -> None:
    """Asks for files that will be opened soon, if they lie elsewhere; does not wait for them.

    Args:
        folder: that they are in.
        names: of the files; not looked at for those of this machine.
        stop: how many of their first bytes; by default all of most files.
    """
    place = registered(folder)
    if place is not None and (paths := [place[1] / name for name in names]):
        place[0].prefetch(paths, stop)


def map_file(path: PurePath) -> bytes | memoryview:
    """Reads a regular file whole; a long one is mapped, so that all processes share its memory.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file.
        OSError: It cannot be read.
    """

    def mapped() -> bytes | memoryview:
        with errors_of(path):
            return open_at_once(path).mapped()

    return retried(mapped, path)


# ------------------------------------------------------------------------------------- writing


def write_atomically(path: PurePath, data: bytes, like: PurePath | None = None) -> None:
    """Writes a whole file or nothing: a reader never sees a part of it.

    Args:
        path: the file; an existing one is replaced.
        data: its content.
        like: a local file whose permissions it gets, and those to read and write for its owner;
            by default the permissions of any new file.

    Raises:
        OSError: It cannot be written.
        DatasetFormatError: The storage is only read.
    """
    place = registered(path)
    if place is not None:
        place[0].write(place[1], data)
        return
    with new_file(path) as file:
        if like is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(os.stat(like).st_mode) | 0o600)  # noqa: PTH116
        file.write(data)


def mapped_array(path: PurePath, shape: tuple[int, ...]) -> np.memmap[Any, np.dtype[np.int64]]:
    """Maps a local file of 64-bit integers to write in it; creates it, and refuses a link.

    Raises:
        DatasetFormatError: It is a pipe, a device or a socket.
        OSError: It is a link, or cannot be opened, or the disk has no room for it.
    """
    with errors_of(path), os.fdopen(open_own(real_path(path)), "r+b") as file:
        # Where a disk is full, writing to a page without a place on it kills the process.
        os.posix_fallocate(file.fileno(), 0, max(1, 8 * math.prod(shape)))
        return np.memmap(file, dtype=np.int64, mode="r+", shape=shape)


@contextmanager
def new_file(path: PurePath) -> Iterator[BinaryIO]:
    """Opens a local file for writing that gets its name when the block ends without an error.

    An existing file is replaced, a link itself and not what it leads to. What goes to another
    storage is a temporary file of this machine until then.

    Yields:
        The file; until then it has another `name`, which it loses where the block fails.

    Raises:
        OSError: It cannot be written.
        DatasetFormatError: The storage is only read.
    """
    place = registered(path)
    if place is None:
        with local.new_file(path) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile() as file:
        yield cast("BinaryIO", file)
        file.flush()
        place[0].write_file(place[1], Path(file.name))


def write_over(path: PurePath, data: bytes, identity: Hashable) -> None:
    """Writes a whole file; elsewhere only in the place of the one that was seen there.

    Args:
        path: the file.
        data: its content.
        identity: of the file that was there; None: there was none.

    Raises:
        FileExistsError: Another program wrote it meanwhile.
        OSError: It cannot be written.
    """
    place = registered(path)
    if place is None:
        write_atomically(path, data)
    else:
        place[0].write_over(*place[1:], data, identity)


def move(file: Path, path: PurePath) -> None:
    """Moves a local file to another place, on the same disk or in another storage.

    Raises:
        OSError: It cannot be written there.
    """
    place = registered(path)
    if place is None:
        file.replace(path)
    else:
        place[0].write_file(place[1], file)


def create(path: PurePath) -> None:
    """Creates an empty local file; what has its name is removed, also a link.

    Raises:
        OSError: It cannot be created.
    """
    real = real_path(path)
    real.unlink(missing_ok=True)
    real.open("xb").close()


def make_folder(path: PurePath) -> None:
    """Makes a folder and those above it, where it is not there; does nothing elsewhere.

    Raises:
        OSError: It cannot be made.
    """
    if not registered(path):
        Path(path).mkdir(parents=True, exist_ok=True)


def remove(path: PurePath) -> None:
    """Removes a file, if it is there.

    Raises:
        OSError: It cannot be removed.
        DatasetFormatError: The storage is only read.
    """
    folder, name = _place(path)
    folder.remove(name)


def remove_leftovers(folder: PurePath, names: Collection[str], min_age_sec: float = 0.0) -> None:
    """Removes the temporary files of killed processes (`new_file`).

    Args:
        folder: where the files are.
        names: names of the files; the temporary files of others stay.
        min_age_sec: younger files stay, where another process may be writing.
    """
    if registered(folder):
        return
    stems = {local.stem_of(name) for name in names}
    with errors_of(folder), os.scandir(real_path(folder)) as found:
        for entry in found:
            name = _TEMPORARY.fullmatch(entry.name)
            if not name or name[1] not in stems or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime >= min_age_sec:
                    Path(entry.path).unlink()


def open_own(path: PurePath) -> int:
    """Opens a regular local file for reading and writing, and creates it; a link is refused.

    Returns:
        The descriptor.

    Raises:
        DatasetFormatError: It is a pipe, a device or a socket.
        OSError: It is a link, or cannot be opened.
    """
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)[0]
