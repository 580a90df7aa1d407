"""Which tars a folder has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.prepare.splits import compile_pattern
from energon_lite.storage.nvmeta import META

_PACKED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_EXCLUDING = r"--exclude '\.tgz$'"


class Shard(NamedTuple):
    """A tar file of the dataset: its path relative to the dataset, and where it is."""

    name: str
    path: Path


def find_shards(
    root: Path, exclude: str | None = None, paths: Iterable[Path | str] | None = None
) -> list[Shard]:
    """Finds the tar files of a dataset, sorted by name.

    Args:
        root: the dataset's folder; links to folders are followed.
        exclude: regular expression; a tar whose relative path holds a match is left out.
        paths: only these tars, relative to `root` or below it.

    Raises:
        FileNotFoundError: There is no tar.
        DatasetFormatError: A tar is compressed.
        ValueError: `exclude` is no regular expression.
    """
    names = [_relative(root, path) for path in paths] if paths is not None else _walk(root)
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
            f"files). Unpack it (`gunzip -c x.tgz > x.tar`) and remove it, or exclude it with "
            f"{_EXCLUDING}"
        )
    if not names:
        raise FileNotFoundError(f"{root}: there is no .tar file in this folder or below it")
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{root / missing[0]} does not exist")
    return [Shard(name, root / name) for name in sorted(set(names))]


def local_root(path: str | os.PathLike[str]) -> Path:
    """Checks that `path` is a local folder.

    Raises:
        ValueError: It is an address of a remote store.
        FileNotFoundError: It does not exist.
        NotADirectoryError: It is a file.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{path}: only local folders can be prepared; copy the dataset first")
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is a file; give the folder that holds the .tar files")
    return root


def _relative(root: Path, path: Path | str) -> str:
    whole = root / path
    try:
        return whole.relative_to(root).as_posix()
    except ValueError:
        raise ValueError(f"{whole} is not below the dataset {root}") from None


def _walk(root: Path) -> list[str]:
    names: list[str] = []
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back up
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        if META in subfolders:
            subfolders.remove(META)
        place = Path(folder).relative_to(root)
        names += [(place / f).as_posix() for f in files if f.endswith((".tar", *_PACKED))]
    return names
