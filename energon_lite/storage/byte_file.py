"""The door for storage: `ByteFile`, an open file of data, and `Folder`, a place that has files.

A storage is one `Folder`. After `register("memory", folder)`, the path `memory://a/b` names `a/b`
in that folder, wherever a path of data is taken: of a dataset, in a metadataset, in `--meta-dir`.
As a `PurePath` it is `memory:/a/b`. Paths of no registered scheme are files of this machine
(`storage.local`).
"""

from __future__ import annotations

import errno
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple, cast

from energon_lite.core.errors import DatasetFormatError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")


class Status(NamedTuple):
    """Facts about a name in a folder.

    Attributes:
        is_file: whether it is a regular file.
        is_folder: whether it is a folder.
        size_bytes: of the file.
        identity: differs between files that had the name one after the other.
    """

    is_file: bool
    is_folder: bool
    size_bytes: int = 0
    identity: Hashable = None


class ByteFile(ABC):
    """A file that is open for reading as long as this object is used, by any number of threads.

    Attributes:
        path: where it is, for messages.
        size_bytes: its size when it was opened.
        identity: differs between files that had the name one after the other.
    """

    path: PurePath
    size_bytes: int
    identity: Hashable = None

    @abstractmethod
    def read_into(self, target: memoryview, start: int) -> int:
        """Fills `target` with the bytes from `start` on.

        Returns:
            The number of bytes read; fewer than `target` has only where the file ends.

        Raises:
            OSError: They cannot be read.
        """

    def read_at_hand(self, target: memoryview, start: int) -> bool:
        """Fills `target` if this needs no waiting for storage; returns whether it did."""
        del target, start
        return False

    def advise(self, start: int, stop: int) -> None:
        """Asks for a range that will be read soon; does not wait for it."""
        del start, stop

    def ensure(self, start: int, stop: int) -> None:
        """Waits until a range can be read from this machine, where storage is elsewhere.

        Raises:
            OSError: It cannot be fetched.
        """
        del start, stop

    def size_now(self) -> int:
        """Returns the size that the file has now."""
        return self.size_bytes

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Frees what the open file takes; done, too, when the object is gone."""

    def read(self, start: int, stop: int) -> bytes:
        """Reads a range.

        Raises:
            OSError: The file ends before `stop`, or cannot be read.
        """
        data = bytearray(stop - start)
        num_read = self.read_into(memoryview(data), start)
        if num_read < len(data):
            text = f"reading ended at byte {start + num_read:,}, before byte {stop:,}"
            raise OSError(errno.EIO, text, str(self.path))
        return bytes(data)

    def mapped(self) -> bytes | memoryview:
        """Returns the content; processes of this machine share its memory where they can.

        Raises:
            OSError: It cannot be read.
        """
        return self.read(0, self.size_bytes)

    def stream(
        self, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE, start: int = 0, stop: int | None = None
    ) -> BinaryIO:
        """Returns a range of the file, by default all of it, as one of Python's files."""
        raw = _Stream(self, start, self.size_bytes if stop is None else stop)
        return cast("BinaryIO", io.BufferedReader(raw, buffer_bytes))


class _Stream(io.RawIOBase):
    """A range as the `io` module has files; closing it leaves the `ByteFile` open."""

    def __init__(self, file: ByteFile, start: int, stop: int) -> None:
        self._file, self._start, self._stop, self._at = file, start, stop, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        stop = max(self._at, min(self._at + len(target), self._stop))
        data = self._file.read(self._at, stop)
        target[: len(data)] = data
        self._at = stop
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: self._start, io.SEEK_CUR: self._at, io.SEEK_END: self._stop}
        self._at = max(self._start, bases[whence] + offset)
        return self._at - self._start


class NotLocalError(DatasetFormatError):
    """A file would have to lie on this machine, for a program such as SQLite."""


class Folder(ABC):
    """A place that has files by name. A name is the path behind the scheme: `a/b` in `x://a/b`."""

    @abstractmethod
    def status(self, name: PurePath) -> Status | None:
        """Returns the facts about a name; None where there is nothing.

        Raises:
            OSError: They cannot be found out.
        """

    @abstractmethod
    def open(self, name: PurePath) -> ByteFile:
        """Opens a file.

        Raises:
            FileNotFoundError: There is no such file.
            DatasetFormatError: There is a folder in its place.
            OSError: It cannot be opened.
        """

    @abstractmethod
    def entries(self, name: PurePath) -> list[str]:
        """Returns the names in a folder, those of folders with a `/` at the end.

        Raises:
            FileNotFoundError: There is no such folder.
        """

    def is_well(self, name: PurePath) -> bool:
        """Whether a file can be read from the storage itself now, and not from a cache."""
        return self.status(name) is not None

    def real_path(self, name: PurePath) -> Path:
        """Returns a local path of a file, for programs that know no other files, such as SQLite.

        Raises:
            NotLocalError: The storage has none.
        """
        raise NotLocalError(
            f"{name} in {type(self).__name__} is not a file of this machine, which this use of it "
            "needs; copy or mount the data, and give the local path"
        )

    def write(self, name: PurePath, data: bytes) -> None:
        """Writes a file, whole or not at all, and makes the folders above it.

        Raises:
            NotLocalError: The storage is only read.
        """
        del data
        self.real_path(name)


_folders: dict[str, Folder] = {}


def register(scheme: str, folder: Folder) -> None:
    """Makes paths that begin with `scheme://` name files of a folder, in this process.

    A process that is forked knows it, too. One that is spawned registers it again, for example
    where the module of the task encoder is imported.

    Args:
        scheme: two or more of the characters that addresses have before `://`, in lower case.
        folder: the storage.

    Raises:
        ValueError: The scheme is none, or stands for local files.
    """
    if not _SCHEME.fullmatch(scheme) or scheme == "file":
        raise ValueError(f"{scheme!r} is no scheme of a storage; write a name such as 'memory'")
    _folders[scheme + ":"] = folder


def registered(path: PurePath) -> tuple[Folder, PurePath] | None:
    """Returns the registered folder that a path leads to, and the name in it; None: a local path.

    Example:
        `memory:/a/b` is `a/b` in the folder that is registered as "memory".
    """
    parts = path.parts if _folders else ()
    folder = _folders.get(parts[0]) if parts else None
    return None if folder is None else (folder, PurePath(*parts[1:]))


def is_registered(scheme: str) -> bool:
    """Returns whether a folder is registered under a scheme."""
    return f"{scheme}:" in _folders
