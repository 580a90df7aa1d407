"""Paths in metadatasets: schemes, variables, the paths they resolve to, and names for these."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import PurePath
from typing import NamedTuple

from energon_lite.storage import files
from energon_lite.storage.local_paths import is_absolute, local_path, local_text

_VARIABLE = re.compile(r"\$\{([^{}]*)\}")


class Target(NamedTuple):
    """A resolved path of a metadataset.

    Attributes:
        path: absolute; `.` and `..` are resolved as text.
        shown: the path for error texts: relative if the path of the root metadataset is.
        label: relative to the folder of the root metadataset; None if an absolute path leads
            there.
    """

    path: PurePath
    shown: str
    label: str | None


class Folder(NamedTuple):
    """A folder that contains a metadataset file; `path`, `shown` and `label` as in `Target`.

    Attributes:
        root: absolute path of the folder of the root metadataset.
    """

    path: PurePath
    shown: str
    label: str | None
    root: PurePath

    def above(self, target: Target) -> Folder:
        """Returns the folder that `target` lies in."""
        label = None if target.label is None else posixpath.dirname(target.label)
        return Folder(target.path.parent, posixpath.dirname(target.shown), label, self.root)

    def find(self, written: str, *, expand: bool) -> Target:
        """Resolves a path of a file in this folder.

        Args:
            written: relative to this folder, or absolute; may start with `file://`.
            expand: whether `${VARIABLE}` and a leading `~` are expanded.

        Raises:
            ValueError: The path has another scheme, leads above the root of the file system, or
                names a variable that is not set.
        """
        local = local_text(written)
        text = expanded(local) if expand else local
        if not text or "\0" in text:
            raise ValueError(f"{written!r} has no path in it; correct it")
        path = joined(self.path, text)
        if not is_absolute(text):
            label = None if self.label is None else normalised(posixpath.join(self.label, text))
            return Target(path, normalised(posixpath.join(self.shown, text)), label)
        if text != local:
            # The value of ${DATA} differs between machines, the written path does not.
            return Target(path, str(path), normalised(local))
        inside = path.relative_to(self.root).as_posix() if self.root in path.parents else None
        return Target(path, str(path), inside)

    def name(self, target: Target) -> str:
        """Returns a name for a target that does not change if the root metadataset is moved."""
        if target.label is not None:
            return target.label
        if self.root in target.path.parents:
            return target.path.relative_to(self.root).as_posix()
        return "/".join(target.path.parts[1:][-2:]) or "/"


def root_folder(source: str) -> Folder:
    """Returns the folder of the root metadataset, `source`."""
    path = joined(files.absolute(PurePath()), source).parent
    return Folder(path, posixpath.dirname(source), "", path)


def expanded(text: str) -> str:
    """Expands `${VARIABLE}` and a leading `~`.

    Raises:
        ValueError: A variable is empty or not set, or the user does not exist.
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], "")
        if not found:
            raise ValueError(f"{text!r}: environment variable {match[1]!r} is not set; set it")
        return found

    result = _VARIABLE.sub(value, text)
    if "${" in _VARIABLE.sub("", text):
        raise ValueError(f"{text!r}: '${{' without a name and '}}' behind it")
    if text.startswith("~"):
        result = os.path.expanduser(result)  # noqa: PTH111  Path.expanduser resolves no '~' as text
        if result.startswith("~"):
            raise ValueError(f"{text!r}: no home folder known for {text.split('/')[0]!r}")
    return result


def joined(folder: PurePath, text: str) -> PurePath:
    """Returns the absolute path of `text` relative to `folder`, resolved as text.

    Raises:
        ValueError: `..` leads above the root of the storage.

    Example:
        >>> str(joined(PurePath("/data/meta"), "../coco/./train"))
        '/data/coco/train'
    """
    path = PurePath(text) if is_absolute(text) else folder / text
    if ".." not in path.parts:
        return local_path(path)
    root, *names = path.parts
    parts: list[str] = []
    for name in names:
        if name != "..":
            parts.append(name)
        elif parts:
            parts.pop()
        else:
            raise ValueError(f"{text!r} leads above the root of the file system; correct it")
    return local_path(PurePath(root, *parts))


def normalised(text: str) -> str:
    """Removes `.` and `..` from a path, except `..` that leaves the folder or follows a variable.

    Example:
        >>> [normalised(text) for text in ("sub/../coco/", "../a", "${DATA}/../b", ".")]
        ['coco', '../a', '${DATA}/../b', '.']
    """
    parts: list[str] = []
    for part in text.split("/"):
        is_closed = not parts or parts[-1] == ".." or parts[-1] == "~" or "${" in parts[-1]
        if part == ".." and not is_closed:
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return ("/" if text.startswith("/") else "") + "/".join(parts) or "."
