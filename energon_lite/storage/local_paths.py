"""Paths of datasets: local ones, as text, `Path`, `file://` or `EPath`; remote ones are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from energon_lite.storage.byte_file import is_registered, registered

# `Path("s3://bucket/x")` has become "s3:/bucket/x"; no scheme has one letter only.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")


def local_path(path: str | os.PathLike[str]) -> PurePath:
    """Returns the path that a user's path means: the one way in for paths of users.

    Returns:
        A local path, or the name `memory:/a/b` for `memory://a/b` where "memory" is registered
        (`storage.byte_file`); a `PurePath` for all that it is used for.

    Raises:
        ValueError: It is an address of a store that is not registered.
        TypeError: It is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{path!r} is a {type(path).__name__}; give the path of a dataset")
    if isinstance(path, Path) and path.is_absolute():
        return path
    text = local_text(os.fspath(path))
    elsewhere = PurePath(text)
    return elsewhere if registered(elsewhere) else Path(text)


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
        f"{written!r} is remote ({scheme[1]}://). Remote paths: not in this version; copy "
        "or mount the data and write its local path"
    )
