"""The objects of the test server: bytes in memory, or files that are read where they lie."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ReadRange = Callable[[int, int], bytes]


@dataclass(frozen=True)
class StoredObject:
    """One version of an object.

    Args:
        name: bucket and key, `bucket/folder/file`.
        data: the bytes, or the file that has them.
        size: number of bytes.
        etag: with its quotes.
        modified: seconds since 1970.
    """

    name: str
    data: bytes | Path
    size: int
    etag: str
    modified: float

    @contextmanager
    def opened(self) -> Iterator[ReadRange]:
        """Yields a function that reads `[start, stop)` of this version, also if it is replaced."""
        if isinstance(self.data, bytes):
            view = memoryview(self.data)
            yield lambda start, stop: bytes(view[start:stop])
            return
        file = os.open(self.data, os.O_RDONLY)
        try:
            yield lambda start, stop: os.pread(file, stop - start, start)
        finally:
            os.close(file)


@dataclass(frozen=True)
class Page:
    """One page of a list, sorted by name.

    Args:
        objects: those that no delimiter hides.
        prefixes: names up to and with the delimiter.
        next_name: the name after which the next page starts; empty on the last page.
    """

    objects: list[StoredObject]
    prefixes: list[str]
    next_name: str


class ObjectTable:
    """Objects by name, over the files of a folder.

    Args:
        root: the folder; its file `a/b` is the object `a/b` of every bucket. It is never written.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._objects: dict[str, StoredObject] = {}
        self._deleted: set[str] = set()

    def clear(self) -> None:
        """Forgets all that was written and deleted."""
        self._objects.clear()
        self._deleted.clear()

    def put(self, name: str, data: bytes | Path) -> StoredObject:
        """Writes or replaces an object; the ETag of bytes is their MD5."""
        if isinstance(data, Path):
            found = self._from_file(name, data)
        else:
            etag = f'"{hashlib.md5(data).hexdigest()}"'
            found = StoredObject(name, data, len(data), etag, time.time())
        self._objects[name] = found
        self._deleted.discard(name)
        return found

    def delete(self, name: str) -> None:
        """Deletes an object, if it exists."""
        self._objects.pop(name, None)
        self._deleted.add(name)

    def find(self, name: str) -> StoredObject | None:
        """Returns an object, or None."""
        found = self._objects.get(name)
        if found is not None and isinstance(found.data, Path):  # the file may have been replaced
            return self._from_file(name, found.data)
        if found is not None or self._root is None or name in self._deleted:
            return found
        key = name.partition("/")[2]
        path = self._root / key
        if not key or ".." in key.split("/") or not path.is_file():
            return None
        return self._from_file(name, path)

    def page(self, bucket: str, prefix: str, delimiter: str, after: str, limit: int) -> Page:
        """Lists the keys of a bucket that begin with `prefix` and come after `after`.

        Each object and each common prefix counts as one of `limit`.
        """
        objects: list[StoredObject] = []
        prefixes: list[str] = []
        last = ""
        for key in self._keys(bucket):
            if not key.startswith(prefix) or key <= after:
                continue
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            common = prefix + head + mark if mark else ""
            if common and common in (after, last):
                continue
            if len(objects) + len(prefixes) == limit:
                return Page(objects, prefixes, last)
            if common:
                prefixes.append(common)
            elif (found := self.find(f"{bucket}/{key}")) is not None:
                objects.append(found)
            last = common or key
        return Page(objects, prefixes, "")

    def _keys(self, bucket: str) -> list[str]:
        """The sorted keys of a bucket."""
        head = f"{bucket}/"
        keys = {name[len(head) :] for name in self._objects if name.startswith(head)}
        if self._root is not None:
            for folder, _, files in os.walk(self._root):
                relative = Path(folder).relative_to(self._root)
                keys.update((relative / file).as_posix() for file in files)
        return sorted(key for key in keys if head + key not in self._deleted)

    @staticmethod
    def _from_file(name: str, path: Path) -> StoredObject:
        stat = path.stat()
        etag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        return StoredObject(name, path, stat.st_size, etag, stat.st_mtime)
