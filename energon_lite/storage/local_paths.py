"""Paths of datasets: local ones, as text, `Path`, `file://` or `EPath`, and addresses of stores."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from urllib.parse import quote

from energon_lite.storage.byte_file import Address, is_registered, registered

# `Path("s3://bucket/x")` has become "s3:/bucket/x"; no scheme has one letter only.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")

# A path up to its first name with a variable of a shell.
_VARIABLE = re.compile(r"[^$]*\$\{?[A-Za-z_][^/]*")


def local_path(path: str | os.PathLike[str]) -> PurePath:
    """Returns the path that a user's path means: the one way in for paths of users.

    A leading `~` is expanded, variables are not.

    Returns:
        A local path, or an `Address` of a registered folder; a `PurePath` for all that it is used
        for.

    Raises:
        ValueError: It is an address of a store that is not registered.
        FileNotFoundError: It has a variable, as in `$HOME/data`, that is not expanded.
        TypeError: It is no path.
    """
    if isinstance(path, Path) and path.is_absolute():
        return path
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{path!r:.80} is a {type(path).__name__}; give the path of a dataset, or for several "
            "a dict as in a metadataset: {'splits': {'train': {'blend': [{'path': ...}, ...]}}}"
        )
    text = os.path.expanduser(local_text(os.fspath(path)))  # noqa: PTH111  an address is text
    elsewhere = Address(text)
    if registered(elsewhere):
        return elsewhere
    if (start := _VARIABLE.match(text)) and not os.path.lexists(start[0]):
        raise FileNotFoundError(
            f"{text!r} does not exist, and variables in paths are not expanded: pass "
            "os.path.expandvars(path)"
        )
    return Path(text)


def with_meta_dir(path: str | os.PathLike[str], meta_dir: str | os.PathLike[str]) -> PurePath:
    """Returns the path of a dataset whose `.nv-meta` and tar indexes lie in another folder.

    Args:
        path: the folder of the tars.
        meta_dir: the other folder.

    Raises:
        ValueError: The path is that of a file.
    """
    data = local_path(path)
    if data.suffix.lower() in (".yaml", ".yml", ".jsonl"):
        raise ValueError(f"{data}: meta_dir (--meta-dir) is for a folder of tars, not for a file")
    mark = quote(os.fspath(_absolute(local_path(meta_dir))), safe="")
    parts = [part for part in _absolute(data).parts if part != "/"]
    return Address("meta:", f"{len(parts)},{mark}", *parts)


def growing_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a file that grows, such as a log.

    Raises:
        ValueError: It is an address; what lies in a store is written whole.
    """
    found = local_path(path)
    if not isinstance(found, Path):
        raise ValueError(
            f"{found}: this file grows line by line, and objects in stores are written whole; give "
            "a local path, and copy the file there after the run"
        )
    return found


def _absolute(path: PurePath) -> PurePath:
    return path if registered(path) else Path(path).absolute()


def is_absolute(text: str) -> bool:
    """Returns whether a path begins at the root of this machine, or of a registered storage."""
    scheme, mark, _ = text.partition(":/")
    return text.startswith("/") or bool(mark and is_registered(scheme))


def local_text(written: str) -> str:
    """Returns a path without `file://`; one of a registered scheme as it is.

    Raises:
        ValueError: It is of another scheme.

    Example:
        >>> local_text("file:///data/captions"), local_text("data/captions")
        ('/data/captions', 'data/captions')
    """
    scheme = _SCHEME.match(written)
    if scheme is None or (not scheme[2] and Path(written).exists()):
        return written
    if scheme[1].lower() == "file":
        return written[scheme.end() - (not scheme[2]) :]
    if is_registered(scheme[1]):
        return written
    raise ValueError(
        f"{written!r} is remote ({scheme[1]}://), and of no storage that is known here: s3://, "
        "gs://, az://, msc://, http:// and https:// are. Copy or mount the data, and write its "
        "local path"
    )
