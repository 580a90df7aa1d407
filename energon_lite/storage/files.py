"""Opens and writes the files of datasets: regular ones only, and never through a planted link.

A dataset may come from anywhere. A named pipe in the place of a tar would be waited for for ever, a
device read without end, and a link in the place of a temporary file would be written through.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from energon_lite.core.errors import DatasetFormatError

# Files that are read whole are lists and settings. The index of a shard of 30 million samples has
# 240 MB, the .info.json of a million shards 40 MB.
MAX_WHOLE_BYTES = 1 << 30

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> int:
    """Opens a regular file for reading; links to one are followed.

    Returns:
        The descriptor.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is a pipe, a device, a folder or a socket.
        OSError: It cannot be opened.
    """
    # Without O_NONBLOCK the opening of a pipe waits for somebody who writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise DatasetFormatError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file; remove it, "
            "or put the file in its place"
        )
    return descriptor


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
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise DatasetFormatError(
                f"{path}: {size:,} bytes, where at most {max_bytes:,} can be right"
            )
        return file.read(size)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that gets the name `path` when the block ends, and is removed if that fails.

    An existing file is replaced, a link itself and not what it leads to.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor
            yield file
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, data: bytes, mode: int | None = None) -> None:
    """Writes a whole file or nothing: a reader never sees a part of it.

    Args:
        path: the file; an existing one is replaced.
        data: its content.
        mode: permission bits; by default those that a new file gets.
    """
    with new_file(path) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data)
