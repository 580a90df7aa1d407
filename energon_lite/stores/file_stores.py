"""File stores: files that are read one by one, by key, from a folder or from prepared tars.

A store is read-only and picklable, and any number of threads may read from it. Open files and
connections belong to one process: a store that was forked or unpickled opens its own.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.samples import SourceInfo, add_source_info
from energon_lite.core.state import JSON
from energon_lite.decoding.media_metadata import read_media_metadata
from energon_lite.decoding.sample_decoder import FileStoreDecoder
from energon_lite.storage import files
from energon_lite.storage.jsonl import line_offsets
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.nvmeta import META, fingerprint, read_info
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase, Part
from energon_lite.storage.tar import first_keys, sample_headers, split_name

T_co = TypeVar("T_co", covariant=True)

# Tars that a store keeps open.
_MAX_OPEN = 64
# One system call returns no more than about 2 GiB.
_MAX_AT_ONCE = 1 << 30
# Where the system shows the path of an open file.
_DESCRIPTORS = Path("/proc/self/fd")


class MissingFileError(KeyError, FileNotFoundError):
    """A store has no file of this key."""

    def __str__(self) -> str:
        """Returns the text as it is; a `KeyError` quotes it."""
        return str(self.args[0]) if self.args else ""


class FileStore(Generic[T_co]):
    """Files that are read one by one, by key. A subclass has `__getitem__` and `get_path`."""

    def __getitem__(self, key: str) -> tuple[T_co, SourceInfo]:
        """Reads one file.

        Returns:
            The content, and where it comes from.

        Raises:
            KeyError: There is no such file.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__")

    def get(self, key: str, sample: Any = None) -> T_co:
        """Reads one file, and appends its source to `sample`.

        Args:
            key: the key of the file.
            sample: a sample or crude sample that uses the file.

        Raises:
            KeyError: There is no such file.
        """
        data, source = self[key]
        if sample is not None:
            add_source_info(sample, source)
        return data

    def get_raw(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file without decoding it; a store that decodes has its own method."""
        data: Any
        data, source = self[key]
        return data, source

    def decode_raw(self, key: str, data: bytes) -> T_co:
        """Returns what `self[key]` returns, of the bytes that `get_raw` returned."""
        del key
        decoded: Any = data
        return decoded  # type: ignore[no-any-return]

    def get_path(self) -> str:
        """Returns the path of the store."""
        raise NotImplementedError(f"{type(self).__name__} has no get_path")

    def get_media_metadata(self, key: str) -> Any:
        """Returns the stored metadata of an image, a video or a recording.

        Raises:
            RuntimeError: The store has no media metadata.
            KeyError: There is none of this file.
        """
        raise RuntimeError(f"{self}: has no media metadata, as that of {key!r}")

    def config(self) -> dict[str, JSON]:
        """Returns what decides the content, for comparison with checkpoints."""
        return {"store": type(self).__name__}

    def __str__(self) -> str:
        """Names the class and the path."""
        return f"{type(self).__name__}({self.get_path()!r})"


class FileStoreWrapper(FileStore[T_co]):
    """A store over another store, to which all is passed on.

    Args:
        inner: the other store.
    """

    def __init__(self, inner: FileStore[Any]) -> None:
        self.inner = inner

    def __getitem__(self, key: str) -> tuple[T_co, SourceInfo]:
        """Reads one file of the other store."""
        return self.inner[key]

    def get_raw(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file of the other store without decoding it."""
        return self.inner.get_raw(key)

    def decode_raw(self, key: str, data: bytes) -> T_co:
        """Decodes as the other store."""
        decoded: T_co = self.inner.decode_raw(key, data)
        return decoded

    def get_path(self) -> str:
        """Returns the path of the other store."""
        return self.inner.get_path()

    def get_media_metadata(self, key: str) -> Any:
        """Returns the metadata that the other store has."""
        return self.inner.get_media_metadata(key)

    def config(self) -> dict[str, JSON]:
        """Returns the configuration of the other store."""
        return self.inner.config()

    def __str__(self) -> str:
        """Names the class and the other store."""
        return f"{type(self).__name__}({self.inner})"


class DecodeFileStore(FileStoreWrapper[Any]):
    """A store that decodes the files of another one.

    Args:
        inner: the store of bytes.
        decoder: decodes a file by its key.
    """

    def __init__(self, inner: FileStore[bytes], *, decoder: FileStoreDecoder) -> None:
        super().__init__(inner)
        self.decoder = decoder

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Reads and decodes one file."""
        data, source = self.inner[key]
        return self.decoder.decode(key, data), source

    def decode_raw(self, key: str, data: bytes) -> Any:
        """Decodes the bytes of a file."""
        return self.decoder.decode(key, self.inner.decode_raw(key, data))


class PrimaryFileStore(FileStoreWrapper[T_co]):
    """The store of the samples themselves: a key `.wav` is that of the current sample.

    Args:
        inner: the store of the dataset.
        current_key: the key of the current sample.
    """

    def __init__(self, inner: FileStore[T_co], current_key: str) -> None:
        super().__init__(inner)
        self.current_key = current_key

    def __getitem__(self, key: str) -> tuple[T_co, SourceInfo]:
        """Reads one file."""
        return self.inner[self._whole(key)]

    def get_raw(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file without decoding it."""
        return self.inner.get_raw(self._whole(key))

    def decode_raw(self, key: str, data: bytes) -> T_co:
        """Decodes the bytes of a file."""
        return super().decode_raw(self._whole(key), data)

    def get_media_metadata(self, key: str) -> Any:
        """Returns the metadata of one file."""
        return self.inner.get_media_metadata(self._whole(key))

    def _whole(self, key: str) -> str:
        return self.current_key + key if key.startswith(".") else key


class SystemFileStore(FileStore[bytes]):
    """The files of a folder; a key is a path in it.

    No key leads out of the folder: neither `..`, nor an absolute path, nor a link.

    Args:
        base_dir: the folder; None for any file of the system, by its absolute path or relative to
            the working directory.

    Attributes:
        name: stands for the folder in the configuration; by default the last part of its path.
    """

    def __init__(self, base_dir: str | PathLike[str] | None = None) -> None:
        self._root = None if base_dir is None else local_path(base_dir).absolute()
        self._path = "" if self._root is None else str(self._root)
        self._inside = str(Path(os.path.realpath(self._path)) / "_")[:-1]  # ends with a slash
        self.name = "" if self._root is None else self._root.name

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file.

        Raises:
            KeyError: There is no such file.
            ValueError: The key leads out of the folder.
        """
        path = self._path_of(key)
        try:
            data = files.retried(lambda: self._read(key, path), path)
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(f"{self}: no file {key!r}; check the key") from None
        return data, SourceInfo(self._path, key, self._path, (key,))

    def get_path(self) -> str:
        """Returns the folder."""
        return self._path

    def config(self) -> dict[str, JSON]:
        """Returns the name of the folder; what is in it cannot be compared."""
        return {"store": "filesystem", "folder": self.name}

    def get_media_metadata(self, key: str) -> Any:
        """Returns the stored metadata of a file.

        Raises:
            RuntimeError: The folder has no media metadata.
            KeyError: There is none of this file.
        """
        self._path_of(key)
        return _media_metadata(self, self._root, key)

    def _path_of(self, key: str) -> Path:
        """Returns the path of a file, which may still be a link."""
        if self._root is None:
            return Path(key)
        if not key or key.startswith("/") or ".." in key.split("/"):
            raise ValueError(
                f"{self}: key {key!r} leads out of the folder; write a path inside it, without '..'"
            )
        return self._root / key

    def _read(self, key: str, path: Path) -> bytes:
        descriptor = files.open_regular(path)
        try:
            if self._root is not None and self._is_outside(descriptor, path):
                raise ValueError(
                    f"{self}: key {key!r} is a link that leads out of the folder; put the file "
                    "itself there, or use the folder that it is in as a store"
                )
            return _read_at(descriptor, 0, os.fstat(descriptor).st_size, path)
        finally:
            os.close(descriptor)

    def _is_outside(self, descriptor: int, path: Path) -> bool:
        """Returns whether an opened file is not in the folder: by its own path, links resolved."""
        with suppress(OSError):
            # The path of the open file itself: quicker than to follow all links by hand.
            if os.readlink(f"{_DESCRIPTORS}/{descriptor}").startswith(self._inside):  # noqa: PTH115
                return False
        assert self._root is not None
        return files.leads_out(path, self._root)


class WebdatasetFileStore(FileStore[bytes]):
    """The files in the tars of a prepared dataset; a key is the path of a member in its tar.

    Args:
        dataset_path: the folder of the dataset.

    Raises:
        FileNotFoundError: The folder is not prepared, or has no `index.sqlite`.
        DatasetFormatError: `.info.json` is invalid.
    """

    def __init__(self, dataset_path: str | PathLike[str]) -> None:
        self._root = local_path(dataset_path).absolute()
        self._path = str(self._root)
        index = self._root / META / INDEX_SQLITE
        if not files.is_there(index):
            raise FileNotFoundError(
                f"{self._path} has no {META}/{INDEX_SQLITE}, in which files are found by key; run "
                f"`energon-lite prepare {self._path}`, or read a plain folder as "
                f"filesystem://{self._path}"
            )
        info = read_info(self._root)
        self._shards, self._counts = tuple(info.shard_counts), tuple(info.shard_counts.values())
        self._open: _OpenTars | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path only: another process opens its own files."""
        return type(self), (self._path,)

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file.

        Raises:
            KeyError: There is no such file.
            ValueError: The key can be that of no file of a sample.
        """
        names = split_name(key)
        if names is None:
            raise ValueError(
                f"{self}: {key!r} can be no key; write the path of a file in its tar, with a dot "
                "after the sample's key, as 'folder/0001.jpg'"
            )
        tars = self._tars()
        found = tars.index().find_part(*names)
        if found is None:
            raise self._missing(key, *names)
        shard = found.tar_file_id
        if not 0 <= shard < len(self._shards):
            raise tars.index().error(f"has a shard {shard}, of {len(self._shards)} in .info.json")
        try:
            data = tars.read(shard, found)
        except OSError as error:
            path = self._root / self._shards[shard]
            data = files.retried(lambda: tars.read(shard, found), path, first=error)
        if found.is_sample:
            data = self._part_of(data, key, found)
        return data, SourceInfo(self._path, key, self._shards[shard], (key,))

    def get_path(self) -> str:
        """Returns the folder of the dataset."""
        return self._path

    def config(self) -> dict[str, JSON]:
        """Returns a hash of the data."""
        return {"store": "webdataset", "data": self._fingerprint}

    def get_media_metadata(self, key: str) -> Any:
        """Returns the stored metadata of a file.

        Raises:
            RuntimeError: The dataset has no media metadata.
            KeyError: There is none of this file.
        """
        return _media_metadata(self, self._root, key)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._root, self._shards, self._counts, ())[0]

    def _tars(self) -> _OpenTars:
        tars = self._open
        if tars is None or tars.process != os.getpid():
            tars = self._open = _OpenTars(self._root, self._shards)
        return tars

    def _missing(self, key: str, sample_key: str, part: str) -> MissingFileError:
        there = self._tars().index().parts_of(sample_key)
        if there is None:
            return MissingFileError(
                f"{self}: no file {key!r}: no sample has the key {sample_key!r}"
            )
        has = f"; it has {', '.join(there[:10])}" if there else ""
        return MissingFileError(f"{self}: sample {sample_key!r} has no part {part!r}{has}")

    def _part_of(self, data: bytes, key: str, sample: Part) -> bytes:
        """Finds a file in the bytes of its sample, where an old index has no parts."""
        found = [h for h in sample_headers(data, 0, len(data), sample.offset) if h.name == key]
        if not found:
            raise self._missing(key, *(split_name(key) or ("", "")))
        start = found[-1].data - sample.offset
        return data[start : start + found[-1].size]


class JsonlFileStore(FileStore[bytes]):
    """The lines of a JSONL file; the key of the i-th sample, counted from 0, is `i.json`.

    Args:
        jsonl_path: the file; without an index it is read once.
        sample_filter: whether the sample of a key (`i`) is in the store; by default all are.
        index_cache_size: without effect.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: Its index is of another content.
    """

    def __init__(
        self,
        jsonl_path: str | PathLike[str],
        sample_filter: Callable[[str], bool] | None = None,
        index_cache_size: int = 5,
    ) -> None:
        del index_cache_size
        self._file = local_path(jsonl_path).absolute()
        self._filter = sample_filter
        self._size_bytes = _OpenTar(self._file).size_bytes
        self._offsets = line_offsets(self._file, self._size_bytes)
        self._open: tuple[int, _OpenTar] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path only: another process opens the file itself."""
        return type(self), (str(self._file), self._filter)

    def __len__(self) -> int:
        """Counts the samples."""
        return len(self._offsets) - 1

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one line.

        Raises:
            KeyError: There is no such sample.
            ValueError: The key can be that of no line.
        """
        name = key.removesuffix(".json")
        if not (name.isdecimal() and name.isascii() and key.endswith(".json")):
            raise ValueError(f"{self}: {key!r} can be no key; write the number of a line, '0.json'")
        number = int(name[:20])
        is_there = number < len(self) and str(number) == name
        if not is_there or not (self._filter is None or self._filter(name)):
            raise MissingFileError(f"{self}: no file {key!r}; it has {len(self)} samples")
        start, stop = self._offsets[number : number + 2].tolist()
        data = files.retried(lambda: self._read(start, stop), self._file)
        return data, SourceInfo(str(self._file), number, self._file.name, (key,))

    def get_path(self) -> str:
        """Returns the path of the file."""
        return str(self._file)

    def config(self) -> dict[str, JSON]:
        """Returns the size of the file and the number of its samples."""
        return {"store": "jsonl", "samples": len(self), "size_bytes": self._size_bytes}

    def _read(self, start: int, stop: int) -> bytes:
        process, file = self._open or (0, None)
        if file is None or process != os.getpid():
            file = _OpenTar(self._file)
            if file.size_bytes != self._size_bytes:
                raise DatasetFormatError(
                    f"{self._file} has {file.size_bytes} bytes, and had {self._size_bytes} when it "
                    "was opened; restore it, or begin a run of the new data"
                )
            self._open = (os.getpid(), file)
        try:
            return _read_at(file.descriptor, start, stop - start, self._file)
        except OSError:
            self._open = None
            raise


# Connections that were open when this process was forked: they may be neither used nor closed.
_inherited: list[IndexDatabase] = []


class _Connection:
    """An index that is open until the thread ends which opened it."""

    def __init__(self, index: IndexDatabase) -> None:
        self.index = index
        self._process = os.getpid()

    def __del__(self) -> None:
        """Closes the index in the process that opened it."""
        if self._process != os.getpid():
            _inherited.append(self.index)
            return
        with suppress(sqlite3.ProgrammingError):  # by another thread
            self.index.__exit__()


class _OpenTars:
    """What one process has open of a dataset: a connection for each thread, and some tars.

    Args:
        root: the folder of the dataset.
        shards: the names of its tars.
    """

    def __init__(self, root: Path, shards: tuple[str, ...]) -> None:
        self.process = os.getpid()
        self._root = root
        self._shards = shards
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._tars: OrderedDict[int, _OpenTar] = OrderedDict()
        # The file of each tar whose first key was compared with the index.
        self._compared: dict[int, tuple[int, ...]] = {}

    def index(self) -> IndexDatabase:
        """Returns the connection of this thread."""
        found: _Connection | None = getattr(self._of_thread, "connection", None)
        if found is None:
            found = self._of_thread.connection = _Connection(IndexDatabase(self._root))
        return found.index

    def read(self, shard: int, part: Part) -> bytes:
        """Reads a range of a tar.

        Raises:
            OSError: It cannot be read; the tar is opened again for the next try.
            DatasetFormatError: It ends before the range does, or is not the one that was indexed.
        """
        tar = self._tar(shard)
        if part.offset < 0 or part.size < 0 or part.offset + part.size > tar.size_bytes:
            self._close(shard)
            raise DatasetFormatError(
                f"{tar.path}: a file should have {part.size} bytes from byte {part.offset} on, but "
                f"the tar has {tar.size_bytes}: it is truncated, or was replaced after preparing. "
                f"Restore it, or run `energon-lite prepare {self._root} --tar-index-only`"
            )
        try:
            return _read_at(tar.descriptor, part.offset, part.size, tar.path)
        except OSError:
            self._close(shard)
            raise

    def _tar(self, shard: int) -> _OpenTar:
        with self._lock:
            tar = self._tars.get(shard)
            if tar is not None:
                self._tars.move_to_end(shard)
                return tar
        try:
            tar = _OpenTar(self._root / self._shards[shard])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                with self._lock:
                    self._tars.clear()
            raise
        self._compare(shard, tar)
        with self._lock:
            self._tars[shard] = tar
            # A thread that still reads from a tar keeps it open.
            while len(self._tars) > _MAX_OPEN:
                self._tars.popitem(last=False)
        return tar

    def _compare(self, shard: int, tar: _OpenTar) -> None:
        """Checks that the first key of a tar is that of the index, once for each file."""
        if self._compared.get(shard) == tar.identity:
            return
        stored = self.index().keys_at([(shard, 0)]).get((shard, 0))
        keys = first_keys(tar.descriptor, tar.size_bytes)[:1]
        if stored is not None and keys not in ([], [stored]):
            raise DatasetFormatError(
                f"{tar.path}: its first sample has the key {keys[0]!r}, where {INDEX_SQLITE} has "
                f"{stored!r}: the tar was replaced after preparing. Restore it, or run "
                f"`energon-lite prepare {self._root} --tar-index-only`"
            )
        self._compared[shard] = tar.identity

    def _close(self, shard: int) -> None:
        with self._lock:
            self._tars.pop(shard, None)


class _OpenTar:
    """A tar that is open as long as this object is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self.descriptor = files.open_regular(path)
        status = os.fstat(self.descriptor)
        self.size_bytes = status.st_size
        # A new file may get the inode of the one that it replaces.
        self.identity = (status.st_ino, status.st_size, status.st_mtime_ns)

    def __del__(self) -> None:
        """Closes the file."""
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)


def _read_at(descriptor: int, offset: int, size: int, path: Path) -> bytes:
    """Reads a range of an open file.

    Raises:
        OSError: The file ends before, or cannot be read.
    """
    if size <= _MAX_AT_ONCE:
        data = os.pread(descriptor, size, offset)
        if len(data) == size:
            return data
    target = bytearray(size)
    num_read = files.read_into(descriptor, memoryview(target), offset)
    if num_read < size:
        text = f"reading ended at byte {offset + num_read}, before byte {offset + size}"
        raise OSError(errno.EIO, text, str(path))
    return bytes(target)


def _media_metadata(store: FileStore[Any], root: Path | None, key: str) -> Any:
    if root is None:
        raise RuntimeError(f"{store}: media metadata of {key!r} need a store with a folder")
    return read_media_metadata(root, key)
