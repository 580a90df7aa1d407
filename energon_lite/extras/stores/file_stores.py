"""File stores: files that are read one by one, by key, from a folder or from prepared tars.

A store is read-only and picklable, and any number of threads may read from it. Open files and
connections belong to one process: a store that was forked or unpickled opens its own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from os import PathLike
from pathlib import PurePath
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.file_store import FileStore
from energon_lite.core.samples import SourceInfo
from energon_lite.core.state import JSON
from energon_lite.extras.jsonl.jsonl import line_offsets
from energon_lite.extras.stores.open_tars import OpenTars
from energon_lite.formats.nvmeta import META, fingerprint, read_info
from energon_lite.formats.sqlite import INDEX_SQLITE
from energon_lite.formats.tar import sample_headers, split_name
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

# Errors of the system after which the storage may come back.
_WAITED_FOR = files.PASSING | files.FULL
# Files that are read to find out whether it is there.
_NEIGHBOURS_TRIED = 2


class MissingFileError(KeyError, FileNotFoundError):
    """A store has no file of this key."""

    def __str__(self) -> str:
        """Returns the text as it is; a `KeyError` quotes it."""
        return str(self.args[0]) if self.args else ""


class _LocalFileStore(FileStore[bytes]):
    """A store of a folder or file.

    Args:
        path: its path; empty for no folder.
    """

    _read_metadata = LazyFunction("energon_lite.extras.media.media_metadata:read_media_metadata")

    def __init__(self, path: str) -> None:
        self._path = path
        self._patience = files.Patience(PurePath(path))

    def get_path(self) -> str:
        """Returns the path of the folder or the file."""
        return self._path

    def get_media_metadata(self, key: str) -> Any:
        """Returns the stored metadata of a file.

        Raises:
            RuntimeError: The folder has no media metadata.
            KeyError: There is none of this file.
        """
        if not self._path:
            raise RuntimeError(f"{self}: media metadata of {key!r} need a store with a folder")
        return self._read_metadata(PurePath(self._path), key)

    def _patiently(self, attempt: Callable[[], bytes], path: PurePath) -> bytes:
        """Reads from a file, and waits while its storage is away."""
        try:
            return attempt()
        except OSError as error:
            is_missing = isinstance(error, MissingFileError)
            if is_missing or (files.is_local(path) and error.errno not in _WAITED_FOR):
                raise
            return self._patience.retried(
                attempt, path, lambda: _neighbours_can_be_read(path), error
            )


class SystemFileStore(_LocalFileStore):
    """The files of a folder; a key is a path in it.

    No key leads out of the folder: neither `..`, nor an absolute path, nor a link.

    Args:
        base_dir: the folder; None for any file of the system, by its absolute path or relative to
            the working directory.

    Attributes:
        name: stands for the folder in the configuration; by default the last part of its path.
    """

    def __init__(self, base_dir: str | PathLike[str] | None = None) -> None:
        self._root = None if base_dir is None else files.absolute(local_path(base_dir))
        super().__init__("" if self._root is None else str(self._root))
        self._first = next(iter(self._names()), None)
        self.name = "" if self._root is None else self._root.name

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file.

        Raises:
            KeyError: There is no such file.
            ValueError: The key leads out of the folder.
            FatalSampleError: The storage of the folder is away.
        """
        path = self._path_of(key)
        data = self._patiently(lambda: self._read(key, path), path)
        return data, SourceInfo(self._path, key, self._path, (key,))

    def get_media_metadata(self, key: str) -> Any:
        """Returns the stored metadata of a file.

        Raises:
            RuntimeError: The folder has no media metadata.
            KeyError: There is none of this file.
            ValueError: The key leads out of the folder.
        """
        self._path_of(key)
        return super().get_media_metadata(key)

    def config(self) -> dict[str, JSON]:
        """Returns the name of the folder; what is in it cannot be compared."""
        return {"store": "filesystem", "folder": self.name}

    def _path_of(self, key: str) -> PurePath:
        """Returns the path of a file, which may still be a link."""
        if self._root is None:
            return PurePath(key)
        if not key or key.startswith("/") or ".." in key.split("/"):
            raise ValueError(
                f"{self}: key {key!r} leads out of the folder; write a path inside it, without '..'"
            )
        return self._root / key

    def _read(self, key: str, path: PurePath) -> bytes:
        try:
            file = files.open_at_once(path)
        except (FileNotFoundError, NotADirectoryError):
            if self._is_away():
                text = "the folder is empty or missing, and had files when it was opened"
                raise OSError(errno.ESTALE, text, self._path) from None
            raise MissingFileError(f"{self}: no file {key!r}; check the key") from None
        if self._root is not None and files.leads_out(path, self._root):
            raise ValueError(
                f"{self}: key {key!r} is a link that leads out of the folder; put the file "
                "itself there, or use the folder that it is in as a store"
            )
        return file.read(0, file.size_bytes)

    def _is_away(self) -> bool:
        """Returns whether all that was in the folder is gone, as if it were not mounted."""
        if self._root is None or self._first is None or files.is_there(self._root / self._first):
            return False
        return not self._names()

    def _names(self) -> list[str]:
        """Returns what is in the folder; nothing where it is missing."""
        if self._root is not None:
            with suppress(OSError):
                return files.entries(self._root)
        return []


def _neighbours_can_be_read(path: PurePath) -> bool:
    """Returns whether a file beside this one can be read, or there is none and the folder can."""
    try:
        names = files.entries(path.parent)
    except OSError:
        return False
    others = [name for name in names if not name.endswith("/") and name != path.name]
    tried = [path.parent / name for name in others[:_NEIGHBOURS_TRIED]]
    return any(map(files.can_read, tried)) if tried else files.is_local(path)


class WebdatasetFileStore(_LocalFileStore):
    """The files in the tars of a prepared dataset; a key is the path of a member in its tar.

    Args:
        dataset_path: the folder of the dataset.

    Raises:
        FileNotFoundError: The folder is not prepared, or has no `index.sqlite`.
        DatasetFormatError: `.info.json` is invalid.
    """

    def __init__(self, dataset_path: str | PathLike[str]) -> None:
        self._root = files.absolute(local_path(dataset_path))
        super().__init__(str(self._root))
        index = self._root / META / INDEX_SQLITE
        if not files.is_there(index):
            raise FileNotFoundError(
                f"{self._path} has no {META}/{INDEX_SQLITE}, in which files are found by key; run "
                f"`energon-lite prepare {self._path}`, or read a plain folder as "
                f"filesystem://{self._path}"
            )
        info = read_info(self._root)
        self._shards, self._counts = tuple(info.shard_counts), tuple(info.shard_counts.values())
        self._tars = OpenTars(self._root, self._shards)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path only: another process opens its own files."""
        return type(self), (self._root,)

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one file.

        Raises:
            KeyError: There is no such file.
            ValueError: The key can be that of no file of a sample.
            FatalSampleError: The storage of the dataset is away.
        """
        names = split_name(key)
        if names is None:
            raise ValueError(
                f"{self}: {key!r} can be no key; write the path of a file in its tar, with a dot "
                "after the sample's key, as 'folder/0001.jpg'"
            )
        tars = self._tars
        found = tars.ask(lambda index: index.find_part(*names))
        if found is None:
            raise self._missing(*names)
        shard, offset, size, is_sample = found
        if not 0 <= shard < len(self._shards):
            text = f"has a shard {shard}, of {len(self._shards)} in .info.json"
            raise tars.index().error(text)
        data = tars.read(shard, offset, size)
        if is_sample:  # an old index has no parts
            headers = [h for h in sample_headers(data, 0, size, offset) if h.name == key]
            if not headers:
                raise self._missing(*names)
            start = headers[-1].data - offset
            data = data[start : start + headers[-1].size]
        return data, SourceInfo(self._path, key, self._shards[shard], (key,))

    def config(self) -> dict[str, JSON]:
        """Returns a hash of the data."""
        return {"store": "webdataset", "data": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._root, self._shards, self._counts, ())[0]

    def _missing(self, sample_key: str, part: str) -> MissingFileError:
        there = self._tars.ask(lambda index: index.parts_of(sample_key))
        if there is None:
            file = f"{sample_key}.{part}"
            text = f"no file {file!r}: no sample has the key {sample_key!r}"
        else:
            has = f"; it has {', '.join(there[:10])}" if there else ""
            text = f"sample {sample_key!r} has no part {part!r}{has}"
        return MissingFileError(f"{self}: {text}")


class JsonlFileStore(_LocalFileStore):
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
        self._file = files.absolute(local_path(jsonl_path))
        super().__init__(str(self._file))
        self._filter = sample_filter
        self._size_bytes = files.open_bytes(self._file).size_bytes
        self._offsets = line_offsets(self._file, self._size_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles path and filter: another process opens the file itself."""
        return type(self), (self._path, self._filter)

    def __len__(self) -> int:
        """Counts the samples."""
        return len(self._offsets) - 1

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Reads one line.

        Raises:
            KeyError: There is no such sample.
            ValueError: The key can be that of no line.
            FatalSampleError: The storage of the file is away.
        """
        name = key.removesuffix(".json")
        if not (name.isdecimal() and name.isascii() and key.endswith(".json")):
            raise ValueError(f"{self}: {key!r} can be no key; write the number of a line, '0.json'")
        number = int(name[:20])
        is_there = number < len(self) and str(number) == name
        if not is_there or not (self._filter is None or self._filter(name)):
            raise MissingFileError(f"{self}: no file {key!r}; it has {len(self)} samples")
        start, stop = self._offsets[number : number + 2].tolist()
        data = self._patiently(lambda: self._read(start, stop), self._file)
        return data, SourceInfo(self._path, number, self._file.name, (key,))

    def config(self) -> dict[str, JSON]:
        """Returns the size of the file and the number of its samples."""
        return {"store": "jsonl", "samples": len(self), "size_bytes": self._size_bytes}

    def _read(self, start: int, stop: int) -> bytes:
        file = files.open_at_once(self._file)
        if file.size_bytes != self._size_bytes:
            raise DatasetFormatError(
                f"{self._file} has {file.size_bytes} bytes, and had {self._size_bytes} when it was "
                "opened; restore it, or begin a run of the new data"
            )
        line = file.read(start, stop)
        bare = line.strip()  # JSON does not allow all that is blank here
        return line if line.strip(b" \t\r\n") == bare else bare
