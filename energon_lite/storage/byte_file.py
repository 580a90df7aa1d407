"""The door for storage: `ByteFile`, an open file of data, and `Folder`, a place that has files.

A storage is one `Folder`. After `register("memory", folder)`, the path `memory://a/b` names `a/b`
in that folder, wherever a path of data is taken: of a dataset, in a metadataset, in `--meta-dir`.
As a `PurePath` it is an `Address`. Paths of no registered scheme are files of this machine
(`storage.local`).
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from energon_lite.core.arguments import at_least
from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.names.energon_modules import import_name

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")


_REMOTE = "energon_lite.extras.remote"


class Address(PurePosixPath):
    """The path of a file in a registered folder, written as its users do: `memory://a/b`.

    Where the metadata of a dataset lie elsewhere, it is shown as the place of the file itself.
    """

    def __fspath__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __str__(self) -> str:
        if self.parts[:1] != ("meta:",):
            return self.__fspath__()
        return str(import_name(f"{_REMOTE}.meta_elsewhere:place_of")(PurePath(*self.parts[1:])))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PurePath) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


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


class ExpectedReads(NamedTuple):
    """The reads that a process will make of a dataset.

    Attributes:
        name: of the dataset, as of all files in its folder.
        num_samples: samples of an epoch.
        num_bytes: bytes of these.
        share: the part of all draws that are of the dataset.
        num_streams: streams of this process.
        window: samples of the shuffle window of a stream; 0 for none.
        slice_length: samples of a slice.
        interleave: slices that a stream draws from at a time.
        num_ranks: processes of this machine that read as much.
    """

    name: PurePath
    num_samples: int
    num_bytes: int
    share: float
    num_streams: int
    window: int
    slice_length: int
    interleave: int
    num_ranks: int = 1


class ByteFile(ABC):
    """A file that is open for reading as long as this object is used, by any number of threads.

    Attributes:
        path: where it is, for messages.
        size_bytes: its size when it was opened.
        identity: differs between files that had the name one after the other.
        is_surplus: whether it should not stay open, as half of what the process may have open is.
        is_versioned: whether a file of another identity has other content, for all that is known.
    """

    path: PurePath
    size_bytes: int
    identity: Hashable = None
    is_surplus = is_versioned = False

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

    def cut_at(self, bounds: Int64Array) -> None:
        """Notes where parts begin that are needed at about the same time, ascending: slices.

        A storage that fetches more than it is asked for does not fetch beyond them.
        """
        del bounds

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

    def statuses(self, names: Sequence[PurePath]) -> list[Status | None]:
        """Returns the facts about several names; see `status`."""
        return [*map(self.status, names)]

    def prefetch(self, names: Sequence[PurePath], stop: int) -> None:
        """Asks for the first `stop` bytes of files that will be opened soon; does not wait."""
        del names, stop

    def is_well(self, name: PurePath) -> bool:
        """Whether a file can be read from the storage itself now, and not from a cache.

        Then the storage works, and what cannot be read beside it is bad. Never of storage that may
        refuse some files for a while.
        """
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

    def expect(self, reads: Sequence[ExpectedReads]) -> list[tuple[int, int]]:
        """Notes what the run of this process will read, before it begins.

        Returns:
            For each dataset, within how many samples neighbours should be fetched together, 0 for
            each sample alone; and how many bytes a stream should ask for ahead, 0 for no limit.

        Raises:
            ValueError: It cannot be done with the place that there is.
        """
        return [(0, 0)] * len(reads)

    def transfers(self, names: Sequence[PurePath]) -> dict[PurePath, dict[str, float]]:
        """Returns what was fetched for each of some datasets of this storage; see `Stats`."""
        del names
        return {}

    def write(self, name: PurePath, data: bytes) -> None:
        """Writes a file, whole or not at all, and makes the folders above it.

        Raises:
            NotLocalError: The storage is only read.
        """
        del data
        self.real_path(name)

    def write_file(self, name: PurePath, file: Path) -> None:
        """Writes a file with the content of a local one; see `write`."""
        self.write(name, file.read_bytes())

    def write_over(self, name: PurePath, data: bytes, identity: Hashable) -> None:
        """Writes a file where the one of this identity is; None: where there is none.

        It is also well if the content is there already.

        Raises:
            FileExistsError: Another file has the name now.
        """
        found = self.status(name)
        if (found and found.identity) == identity:
            self.write(name, data)
        elif found is None or self.open(name).read(0, found.size_bytes) != data:
            text = "another program has written or removed it meanwhile"
            raise FileExistsError(errno.EEXIST, text, str(name))

    def remove(self, name: PurePath) -> None:
        """Removes a file, if it is there.

        Raises:
            NotLocalError: The storage is only read.
        """
        self.real_path(name).unlink(missing_ok=True)


# JSON, in the environment, which processes that are started have, too.
_CACHE = "ENERGON_LITE_CACHE"


def set_cache(settings: Mapping[str, Any]) -> None:
    """Sets where this process keeps what is fetched from object stores, over epochs and runs.

    Args:
        settings: `path`, a folder on a disk of this machine; and `max_bytes`, of all that is there.

    Raises:
        ValueError: A setting is wrong.
    """
    known = {"path", "max_bytes"}
    if not isinstance(settings, Mapping) or set(settings) != known:
        raise ValueError(f"cache={settings!r} must be {{'path': folder, 'max_bytes': number}}")
    size = at_least("cache: max_bytes", settings["max_bytes"], 1 << 20)
    path = str(Path(settings["path"]).expanduser().absolute())  # it may not exist yet
    os.environ[_CACHE] = json.dumps({"path": path, "max_bytes": size})


def current_cache() -> dict[str, Any] | None:
    """Returns the settings of `set_cache`; None without."""
    text = os.environ.get(_CACHE)
    return json.loads(text) if text else None


_folders: dict[str, Folder] = {}
# Object stores, and datasets in two places; what reads them is imported on first use.
_STORES = {
    **dict.fromkeys(("s3:", "gs:", "az:", "http:", "https:", "msc:"), "remote_folder:RemoteFolder"),
    "meta:": "meta_elsewhere:MetaElsewhere",
}


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
    scheme, mark, name = os.fspath(path).partition(":/")
    if not (mark and is_registered(scheme)):
        return None
    if f"{scheme}:" not in _folders:
        make = import_name(f"{_REMOTE}.{_STORES[scheme + ':']}")
        register(scheme, make(scheme))
    return _folders[f"{scheme}:"], PurePath(name.lstrip("/"))


def is_registered(scheme: str) -> bool:
    """Returns whether a folder is registered under a scheme."""
    return f"{scheme}:" in _folders or f"{scheme}:" in _STORES
