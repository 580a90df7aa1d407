"""Which tars a folder has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.prepare.splits import compile_pattern
from energon_lite.storage.braces import expand
from energon_lite.storage.files import errors_of, is_there
from energon_lite.storage.local_paths import local_path, local_text
from energon_lite.storage.nvmeta import META, is_utf8

_PACKED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_EXCLUDING = r"\.(tgz|tar\.\w+)$"  # matches each of these, and no .tar
_GLOB = re.compile(r"[*?\[]")


class Shard(NamedTuple):
    """A tar file of the dataset: its path relative to the dataset, and where it is."""

    name: str
    path: Path


def find_shards(
    root: Path, exclude: str | None = None, paths: Iterable[str | os.PathLike[str]] | None = None
) -> list[Shard]:
    """Finds the tar files of a dataset.

    Args:
        root: the dataset's folder; links to folders are followed.
        exclude: regular expression; a tar whose relative path holds a match is skipped.
        paths: only these tars, relative to `root` or below it: names, brace patterns and globs.

    Returns:
        Each tar once: sorted by name, or in the order of `paths`.

    Raises:
        FileNotFoundError: There is no tar, or a path leads to none.
        DatasetFormatError: A tar is compressed.
        ValueError: `exclude` is no regular expression.
    """
    names = sorted(_walk(root)) if paths is None else _named(root, paths)
    if exclude is not None:
        pattern = compile_pattern(exclude, "exclude")
        left = [name for name in names if not pattern.search(name)]
        if names and not left:
            raise FileNotFoundError(f"{root}: exclude {exclude!r} leaves none of {len(names)} tars")
        names = left
    packed = sorted(name for name in names if name.endswith(_PACKED))
    if packed:
        raise DatasetFormatError(
            f"{root / packed[0]}: a compressed tar has no random access ({len(packed)} such "
            f"files). Unpack it (`gunzip -c x.tgz > x.tar`) and remove it, or exclude all such "
            rf"files with --exclude '{_EXCLUDING}'"
        )
    if not names:
        raise FileNotFoundError(
            f"{root}: there is no .tar file in this folder or below it"
            if paths is None
            else f"{root}: no tar was named; give paths below this folder, or None for all"
        )
    for name in names:
        if not (name.isascii() or is_utf8(name)):
            raise DatasetFormatError(
                f"{str(root / name)!a}: the name is not UTF-8; rename the tar, or exclude it"
            )
    return [Shard(name, root / name) for name in names]


def size_of(shard: Shard) -> int:
    """Returns the size of a tar.

    Raises:
        FileNotFoundError: It is a link that leads nowhere.
    """
    try:
        with errors_of(shard.path):
            return shard.path.stat().st_size
    except FileNotFoundError:
        to = os.path.realpath(shard.path)
        raise FileNotFoundError(
            f"{shard.path} is a link to {to}, which is not there; remove the link, or exclude it "
            "(--exclude)"
        ) from None


def _named(root: Path, paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expands brace patterns and globs, in order; each name once."""
    names: dict[str, None] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        text = _relative(root, path)
        try:
            # What is there under this very name is no pattern.
            expanded = [text] if (root / text).is_file() else expand(text)
        except ValueError as error:
            raise ValueError(f"path {text!r}: {error}") from None
        for name in expanded:
            found = [name] if (root / name).is_file() else _globbed(root, name)
            if not found:
                of = "" if name == text else f" (of path {text!r})"
                what = "matches no .tar file" if _GLOB.search(name) else "does not exist"
                raise FileNotFoundError(f"{root / name} {what}{of}")
            names.update(dict.fromkeys(found))
    return list(names)


def _globbed(root: Path, pattern: str) -> list[str]:
    if not _GLOB.search(pattern):
        return []
    found = (path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file())
    return sorted(name for name in found if name.endswith((".tar", *_PACKED)))


def local_root(path: str | os.PathLike[str]) -> Path:
    """Checks that `path` is a local folder.

    Raises:
        ValueError: It is an address of a remote store, or a JSONL file.
        FileNotFoundError: It does not exist.
        NotADirectoryError: It is a file.
    """
    root = local_path(path)
    if not is_there(root):
        raise FileNotFoundError(f"{root} does not exist")
    if root.suffix == ".jsonl" and root.is_file():
        raise ValueError(f"{root}: this version does not read JSONL datasets; write tar shards")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is a file; give the folder that holds the .tar files")
    return root


def _relative(root: Path, path: str | os.PathLike[str]) -> str:
    path = Path(local_text(os.fspath(path)))
    try:
        inside = path.relative_to(root.absolute()) if path.is_absolute() else path
    except ValueError:
        inside = Path("..")
    if ".." in inside.parts:
        raise ValueError(f"{path} is not below the dataset {root}; link the tar there (`ln -s`)")
    return inside.as_posix()


def _walk(root: Path) -> list[str]:
    """Returns the tars in a folder and below it; a folder that cannot be read is an error."""
    names: list[str] = []
    seen: set[tuple[int, int]] = set()
    folders, links = [root], list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        with errors_of(folder):
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:  # a link that leads back up
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _is_folder(entry):
                        if entry.name != META:
                            (links if entry.is_symlink() else folders).append(Path(entry.path))
                    elif entry.name.endswith((".tar", *_PACKED)):
                        names.append(Path(entry.path).relative_to(root).as_posix())
        if not folders:
            links.sort(reverse=True)
    return names


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: an error if it is called x.tar
        return False
