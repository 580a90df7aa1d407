"""Energon's class of paths, for local ones."""

from __future__ import annotations

import functools
import glob
import os
import posixpath
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any

from energon_lite.storage.local_paths import local_text


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


@functools.total_ordering
class EPath:
    """An absolute local path, with the methods that Energon's path class has.

    It is a `PathLike`: every function that takes a path takes it. It equals its own text, such as
    the paths in `__sources__`. `..` is resolved by text alone.

    Args:
        initial_path: text or path; a relative one starts at the working directory.

    Raises:
        ValueError: The path is a remote one (`s3://...`), which this version does not read.
    """

    __slots__ = ("_path",)

    def __init__(self, initial_path: str | PathLike[str]) -> None:
        text = local_text(os.fspath(initial_path))
        self._path = posixpath.normpath(posixpath.join(Path.cwd(), text))

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
        """The folder."""
        return EPath(posixpath.dirname(self._path))

    def is_local(self) -> bool:
        """Returns True: remote paths are refused."""
        return True

    def local_path(self) -> Path:
        """Returns the path as a `pathlib.Path`."""
        return Path(self._path)

    def with_suffix(self, suffix: str) -> EPath:
        """Replaces what comes after the last dot of the name."""
        return EPath(self.local_path().with_suffix(suffix))

    def relative_to(self, other: EPath) -> str:
        """Returns the path below a folder, as text.

        Raises:
            ValueError: The path is not below `other`.
        """
        return str(self.local_path().relative_to(other))

    def is_file(self) -> bool:
        """Returns whether there is such a file."""
        return self.local_path().is_file()

    def is_dir(self) -> bool:
        """Returns whether there is such a folder."""
        return self.local_path().is_dir()

    def stat(self) -> os.stat_result:
        """Returns size, times and rights, as `pathlib.Path.stat`."""
        return self.local_path().stat()

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return self.stat().st_size

    def open(
        self, mode: str = "r", block_size: int | None = None, prefetch_file: bool = False
    ) -> IO[Any]:
        """Opens the file; makes its folder where it is written.

        Args:
            mode: "r", "rb", "w" or "wb"; text is UTF-8.
            block_size: accepted, without effect: for remote files in Energon.
            prefetch_file: accepted, without effect: for remote files in Energon.
        """
        del block_size, prefetch_file
        if "r" not in mode:
            self.parent.mkdir(parents=True)
        return self.local_path().open(mode, encoding=None if "b" in mode else "utf-8")

    def read_text(self) -> str:
        """Returns what the file holds, as text."""
        return self.local_path().read_text(encoding="utf-8")

    def read_bytes(self) -> bytes:
        """Returns what the file holds."""
        return self.local_path().read_bytes()

    def write_text(self, text: str) -> None:
        """Writes the file, and makes its folder."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """Writes the file, and makes its folder."""
        with self.open("wb") as file:
            file.write(data)

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Makes the folder. Energon's makes none: there, writing a file does."""
        self.local_path().mkdir(exist_ok=exist_ok, parents=parents)

    def glob(self, pattern: str) -> Iterator[EPath]:
        """Yields what matches a pattern below the folder, sorted.

        `**` stands for the folder and all folders below it, also those that are links. Hidden names
        match a pattern that begins with a dot.
        """
        return map(EPath, sorted(_matching(self._path, pattern)))

    def walk(self) -> Iterator[EPath]:
        """Yields all files below the folder, sorted, also those in folders that are links."""
        found = (path for folder in _deep_folders(self._path) for path in Path(folder).iterdir())
        return map(EPath, sorted(path for path in found if path.is_file()))

    def copy(self, target: EPath) -> None:
        """Copies the file, and makes the folder of the copy."""
        target.parent.mkdir(parents=True)
        shutil.copyfile(self, target)

    def move(self, target: EPath) -> None:
        """Moves the file, and makes the folder it goes to."""
        target.parent.mkdir(parents=True)
        shutil.move(self, target)

    def unlink(self) -> None:
        """Deletes the file."""
        self.local_path().unlink()
