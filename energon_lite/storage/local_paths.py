"""Paths of datasets: local ones, as text, `Path` or `file://`; remote ones are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

# `Path("s3://bucket/x")` has become "s3:/bucket/x"; no scheme has one letter only.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns the local path that a user's path means.

    Raises:
        ValueError: It is an address of a remote store.
        TypeError: It is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{path!r} is a {type(path).__name__}; give the path of a dataset")
    return Path(local_text(os.fspath(path)))


def local_text(written: str) -> str:
    """Returns a path without `file://`.

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
    raise ValueError(
        f"{written!r} is remote ({scheme[1]}://). Remote paths: not in this version; copy "
        "or mount the data and write its local path"
    )
