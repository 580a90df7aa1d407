"""Energon's class of paths: local ones, and addresses in object stores."""

from __future__ import annotations

import functools
import glob
import io
import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path, PurePath
from typing import IO, Any

from energon_lite.extras.prepare.choose_shards import glob_regex
from energon_lite.storage import files
from energon_lite.storage.byte_file import Address
from energon_lite.storage.local_paths import local_path, local_text


def _deep_folders(folder: str, hidden: bool = True, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields a folder and those below it; follows links, but not to folders that they lie in."""
    real = os.path.realpath(folder)
    if real in above:
        return
    yield folder
    for entry in os.scandir(folder):
        if entry.is_dir() and (hidden or not entry.name.startswith(".")):
            yield from _deep_folders(entry.path, hidden, (*above, real))


def _matching(folder: str, pattern: str) -> set[str]:
    """Returns the paths below a folder that match a pattern."""
    head, is_deep, tail = pattern.partition("**")
    if not is_deep:
        names = glob.glob(pattern, root_dir=folder)  # noqa: PTH207 - Path.glob finds hidden names
        return {posixpath.join(folder, name) for name in names}
    bases = _matching(folder, head) if head else {folder}
    folders = [deep for base in bases for deep in _deep_folders(base, hidden=False)]
    return {path for deep in folders for path in _matching(deep, tail.lstrip("/") or "*")}


def _addresses_below(folder: PurePath) -> Iterator[PurePath]:
    """Yields the files below a folder in a store."""
    for name in files.entries(folder):
        if name.endswith("/"):
            yield from _addresses_below(folder / name)
        else:
            yield folder / name


class _Upload(io.BytesIO):
    """A file that is written to a store when it is closed."""

    def __init__(self, place: PurePath) -> None:
        super().__init__()
        self._place = place

    def close(self) -> None:
        if not self.closed:
            files.write_atomically(self._place, self.getvalue())
        super().close()


@functools.total_ordering
class EPath:
    """An absolute path or an address, with the methods that Energon's path class has.

    It is a `PathLike`: every function of this library that takes a path takes it. It equals its own
    text, such as the paths in `__sources__`. `..` is resolved by text alone.

    Args:
        initial_path: text or path; a relative one starts at the working directory.

    Raises:
        ValueError: It is an address of no storage that is known.
    """

    __slots__ = ("_path",)

    def __init__(self, initial_path: str | PathLike[str]) -> None:
        text = local_text(os.fspath(initial_path))
        address = Address(posixpath.normpath(text))
        is_local = files.is_local(address)
        whole = posixpath.normpath(posixpath.join(Path.cwd(), text)) if is_local else address
        self._path = os.fspath(whole)

    def __fspath__(self) -> str:
        return self._path

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"EPath({self._path!r})"

    def __eq__(self, other: object) -> bool:
        path = other._path if isinstance(other, EPath) else other
        return self._path == path if isinstance(path, str) else NotImplemented

    def __lt__(self, other: EPath) -> bool:
        return self._path < other._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __truediv__(self, other: str | PathLike[str]) -> EPath:
        """Joins; an absolute `other` replaces the path."""
        text = os.fspath(other)
        return EPath(text if "://" in text else posixpath.join(self._path, text))

    @property
    def url(self) -> str:
        """The path as text."""
        return self._path

    display_name = url

    @property
    def name(self) -> str:
        """The last component."""
        return posixpath.basename(self._path)

    @property
    def parent(self) -> EPath:
        """The folder; that of the root, or of a bucket, is itself."""
        place = self._place
        return EPath(place.parent if len(place.parts) > 2 or self.is_local() else place)

    @property
    def _place(self) -> PurePath:
        return local_path(self._path)

    def is_local(self) -> bool:
        """Returns whether it is a path of this machine."""
        return files.is_local(self._place)

    def local_path(self) -> Path:
        """Returns the path as a `pathlib.Path`.

        Raises:
            ValueError: It is an address.
        """
        if not self.is_local():
            raise ValueError(
                f"{self} is an address, not a local path; use the methods of EPath that read, "
                "write and list, and size() for stat()"
            )
        return Path(self._path)

    def with_suffix(self, suffix: str) -> EPath:
        """Replaces what comes after the last dot of the name."""
        return EPath(self._place.with_suffix(suffix))

    def relative_to(self, other: EPath) -> str:
        """Returns the path below a folder, as text.

        Raises:
            ValueError: The path is not below `other`.
        """
        return str(self._place.relative_to(other))

    def is_file(self) -> bool:
        """Returns whether there is such a file; not in a bucket that does not exist."""
        with suppress(FileNotFoundError):
            return files.is_file(self._place)
        return False

    def is_dir(self) -> bool:
        """Returns whether there is such a folder."""
        return files.is_folder(self._place)

    def stat(self) -> os.stat_result:
        """Returns size, times and rights of a local file, as `pathlib.Path.stat`."""
        return self.local_path().stat()

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return files.size_of(self._place)

    def open(
        self, mode: str = "r", block_size: int | None = None, prefetch_file: bool = False
    ) -> IO[Any]:
        """Opens the file; makes its folder where it is written.

        What is written to an address is kept in memory, and written whole when it is closed.

        Args:
            mode: "r", "rb", "w" or "wb"; text is UTF-8.
            block_size: accepted, without effect: for remote files in Energon.
            prefetch_file: accepted, without effect: for remote files in Energon.
        """
        del block_size, prefetch_file
        if not self.is_local():
            is_read = "r" in mode
            file: Any = files.open_bytes(self._place).stream() if is_read else _Upload(self._place)
            return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")
        if "r" not in mode:
            self.parent.mkdir(parents=True)
        return self.local_path().open(mode, encoding=None if "b" in mode else "utf-8")

    def read_text(self) -> str:
        """Returns what the file holds, as text."""
        with self.open() as file:
            return str(file.read())

    def read_bytes(self) -> bytes:
        """Returns what the file holds."""
        with self.open("rb") as file:
            return bytes(file.read())

    def write_text(self, text: str) -> None:
        """Writes the file, and makes its folder."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """Writes the file, and makes its folder."""
        with self.open("wb") as file:
            file.write(data)

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Makes the local folder. Energon's makes none: there, writing a file does."""
        if self.is_local():
            self.local_path().mkdir(exist_ok=exist_ok, parents=parents)

    def glob(self, pattern: str) -> Iterator[EPath]:
        """Yields what matches a pattern below the folder, sorted.

        `**` stands for the folder and all folders below it, also those that are links. Hidden names
        match a pattern that begins with a dot. Of an address, only files are found.
        """
        if not self.is_local():
            matches = re.compile(glob_regex(pattern)).fullmatch
            return (path for path in self.walk() if matches(path.relative_to(self)))
        return map(EPath, sorted(_matching(self._path, pattern)))

    def walk(self) -> Iterator[EPath]:
        """Yields all files below the folder, sorted, also those in folders that are links."""
        if not self.is_local():
            return map(EPath, sorted(_addresses_below(self._place)))
        found = (path for folder in _deep_folders(self._path) for path in Path(folder).iterdir())
        return map(EPath, sorted(path for path in found if path.is_file()))

    def copy(self, target: EPath) -> None:
        """Copies the file, and makes the folder of the copy."""
        with self.open("rb") as file, target.open("wb") as copy:
            shutil.copyfileobj(file, copy)

    def move(self, target: EPath) -> None:
        """Moves the file, and makes the folder it goes to."""
        if self.is_local() and target.is_local():
            target.parent.mkdir(parents=True)
            shutil.move(self, target)
        else:
            self.copy(target)
            self.unlink()

    def unlink(self) -> None:
        """Deletes the file."""
        if self.is_local():
            self.local_path().unlink()
        else:
            files.remove(self._place)
