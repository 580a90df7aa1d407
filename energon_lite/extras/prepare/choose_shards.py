"""Finds the tars of a folder, and which of them belong to which split part."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path, PurePath
from typing import NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.prepare.other_data import how_to_convert
from energon_lite.formats.nvmeta import META, is_utf8, no_folder
from energon_lite.storage import files
from energon_lite.storage.braces import expand
from energon_lite.storage.local_paths import local_path

_PACKED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_TARS = (".tar", *_PACKED)
_EXCLUDING = r"(?i)\.(tgz|tar\.\w+)$"  # matches each of these, and no .tar
_GLOB = re.compile(r"[*?\[]")
_GLOB_WORD = re.compile(r"\*\*/|\*\*|\[!?[^]/]+\]|.", re.DOTALL)
RATIO_PARTS = ("train", "val", "test")

Share = float | str | Fraction
Ratio = str | Sequence[Share] | Sequence[tuple[str, Share]] | Mapping[str, Share]


# --------------------------------------------------------------------------------- split parts


def compile_pattern(pattern: str, what: str) -> re.Pattern[str]:
    """Compiles a regular expression, the value of the option `what`."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{what}: {pattern!r} is no regular expression ({error}).{_glob_hint(pattern)}"
        ) from None


def _glob_hint(pattern: str) -> str:
    # A star after a character, not after a dot, a group, a set or a class: `train-*.tar`.
    if re.search(r"(?<![.)\]}])(?<!\\[a-zA-Z])\*", pattern):
        fixed = pattern.replace(".", r"\.").replace("*", ".*")
        return f" It is a regular expression and looks like a glob; try '{fixed}'"
    return " It is a regular expression, matched from the start of the shard's relative path"


def parse_ratio(ratio: Ratio) -> dict[str, Fraction]:
    """Reads the share of each split part; decimals are taken exactly.

    Args:
        ratio: two or three shares, of train, val and test; 1 for train alone; or shares by name.

    Raises:
        ValueError: They are not numbers of at least 0, one of them above.

    Example:
        >>> {part: int(share * 10) for part, share in parse_ratio("0.5, 0.3, 0.2").items()}
        {'train': 5, 'val': 3, 'test': 2}
    """
    named = _named_shares(ratio)
    try:
        shares = {part: Fraction(str(share).strip()) for part, share in named.items()}
    except (ValueError, ZeroDivisionError):
        shares = {}
    if not shares or min(shares.values()) < 0 or not any(shares.values()):
        raise ValueError(
            f"split ratio {ratio!r}: give two or three numbers for train,val,test such as 8,1,1 "
            "(0 for a part without shards), or 1 for train alone"
        )
    return shares


def _named_shares(ratio: Ratio) -> dict[str, object]:
    if isinstance(ratio, Mapping):
        return dict(ratio)
    shares = ratio.split(",") if isinstance(ratio, str) else list(ratio)
    if shares and all(isinstance(share, tuple | list) for share in shares):
        return dict(shares)  # type: ignore[arg-type]  # pairs
    is_known = len(shares) in (2, 3) or [str(share).strip() for share in shares] == ["1"]
    return dict(zip(RATIO_PARTS, shares, strict=False)) if is_known else {}


def refuse(message: str) -> None:
    """Raises a ValueError: what is odd about a split is an error."""
    raise ValueError(message)


def split_by_ratio(
    names: Sequence[str],
    shares: Mapping[str, Fraction],
    shuffle_seed: int | None = None,
) -> dict[str, list[str]]:
    """Assigns shards to split parts, in order.

    The cuts are exact, so no shard is lost; the last share above 0 takes the rest.

    Args:
        names: the shards.
        shares: what `parse_ratio` returned.
        shuffle_seed: shuffles the shards first.

    Example:
        >>> parts = split_by_ratio([str(i) for i in range(10)], parse_ratio("7,2,1"))
        >>> [len(part) for part in parts.values()]
        [7, 2, 1]
    """
    order = list(names)
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    total = sum(shares.values())
    parts: dict[str, list[str]] = {}
    reached, start = Fraction(0), 0
    for part, share in shares.items():
        reached += share
        stop = int(len(order) * reached / total)
        parts[part] = order[start:stop]
        start = stop
    return parts


def split_by_patterns(
    names: Sequence[str],
    patterns: Iterable[tuple[str, str]],
    on_odd: Callable[[str], None] = refuse,
) -> dict[str, list[str]]:
    """Returns the shards that the patterns of each split part match, in the order of `names`.

    Args:
        names: the shards, relative to the dataset.
        patterns: (part, pattern); a pattern is brace-expanded, then matched as a regular
            expression from the start of the name. A part may have several.
        on_odd: called with an error text where a pattern matches no shard, or a shard belongs to
            two parts; by default raises a ValueError.

    Raises:
        ValueError: A pattern is malformed.
    """
    owner: dict[str, str] = {}
    parts: dict[str, set[str]] = {}
    for part, text in patterns:
        members = parts.setdefault(part, set())
        try:
            expanded = expand(text)
        except ValueError as error:
            raise ValueError(f"split part {part!r}: pattern {text!r}: {error}") from None
        regexes = [compile_pattern(one, f"split part {part!r}") for one in expanded]
        matched = [name for name in names if any(regex.match(name) for regex in regexes)]
        if not matched:
            on_odd(
                f"split part {part!r}: pattern {text!r} matches none of the {len(names)} shards "
                f"(the first is {names[0]!r}).{_glob_hint(text)}"
            )
        for name in matched:
            if owner.setdefault(name, part) != part:
                on_odd(
                    f"shard {name!r} matches the patterns of both {owner[name]!r} and {part!r}; "
                    "change one, so that no sample is in two split parts"
                )
        members.update(matched)
    return {part: [n for n in names if n in members] for part, members in parts.items()}


def patterns_of(
    parts: Mapping[str, str | Sequence[str]] | Iterable[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Returns (part, pattern) pairs of a mapping (name to one pattern or several) or of pairs."""
    pairs: list[tuple[str, str]] = []
    for part, value in parts.items() if isinstance(parts, Mapping) else parts:
        patterns = [value] if isinstance(value, str) else value
        pairs += [(part, pattern) for pattern in patterns]
    if not pairs:
        raise ValueError("split parts: give at least one part, such as train:'train/.*'")
    return pairs


# ------------------------------------------------------------------------- which tars there are


class Shard(NamedTuple):
    """A tar file of the dataset: its path relative to the dataset, and where it is."""

    name: str
    path: PurePath


def find_shards(
    root: PurePath,
    exclude: str | None = None,
    paths: Iterable[str | os.PathLike[str]] | None = None,
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
    names = sorted(files_below(root, _TARS)) if paths is None else _named_shards(root, paths)
    if exclude is not None:
        num_tars, pattern = len(names), compile_pattern(exclude, "exclude")
        names = [name for name in names if not pattern.search(name)]
        if num_tars and not names:
            raise FileNotFoundError(f"{root}: exclude {exclude!r} leaves none of {num_tars} tars")
    packed = sorted(name for name in names if name.lower().endswith(_PACKED))
    if packed:
        raise DatasetFormatError(
            f"{root / packed[0]}: a compressed tar has no random access ({len(packed)} such "
            f"files). Unpack it (`gunzip -c x.tgz > x.tar`) and remove it, or exclude all such "
            rf"files with --exclude '{_EXCLUDING}'"
        )
    if not names:
        what = f"there is no .tar file in this folder or below it.{how_to_convert(root)}"
        if paths is not None:
            what = "no tar was named; give paths below this folder, or None for all"
        raise FileNotFoundError(f"{root}: {what}")
    for name in names:
        if not is_utf8(name):
            raise DatasetFormatError(
                f"{str(root / name)!a}: the name is not UTF-8; rename the tar, or exclude it"
            )
    return [Shard(name, root / name) for name in names]


def size_of_all(root: PurePath, shards: Sequence[Shard]) -> int:
    """Returns the size of all tars of a folder.

    Raises:
        FileNotFoundError: One is a link that leads nowhere.
    """
    sizes = files.sizes_of(root, [shard.name for shard in shards])
    if -1 in sizes:
        path = shards[sizes.index(-1)].path
        raise FileNotFoundError(
            f"{path} is a link to {files.resolved(path)}, which is not there; remove the link, or "
            "exclude it (--exclude)"
        )
    return sum(sizes)


def _named_shards(root: PurePath, paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expands brace patterns and globs, in order; each name once."""
    names: dict[str, None] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        text = _relative(root, path)
        try:
            # A file of this very name is no pattern.
            expanded = [text] if files.is_file(root / text) else expand(text)
        except ValueError as error:
            raise ValueError(f"path {text!r}: {error}") from None
        for name in expanded:
            found, is_glob = [name], _GLOB.search(name) is not None
            if not files.is_file(root / name):
                found = sorted(_tars_of_glob(root, name)) if is_glob else []
            if not found:
                of = "" if name == text else f" (of path {text!r})"
                what = "matches no .tar file" if is_glob else "does not exist"
                raise FileNotFoundError(f"{root / name} {what}{of}")
            names.update(dict.fromkeys(found))
    return list(names)


def glob_regex(pattern: str) -> str:
    """Returns the regular expression of names below a folder that match a glob.

    Example:
        >>> [bool(re.fullmatch(glob_regex("**/*.tar"), name)) for name in ("a.tar", "b/c/a.tar")]
        [True, True]
    """
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        words.get(word) or (word.replace("[!", "[^") if word[1:] else re.escape(word))
        for word in _GLOB_WORD.findall(pattern)
    )


def _tars_of_glob(root: PurePath, pattern: str) -> list[str]:
    """Returns the tars below a folder that match a glob; elsewhere its `*` ends at a `/`."""
    if not files.is_local(root):
        match = re.compile(glob_regex(pattern)).fullmatch
        return [name for name in files_below(root, _TARS) if match(name)]
    tars = (tar for tar in Path(root).glob(pattern) if tar.is_file())
    return [tar.relative_to(root).as_posix() for tar in tars if tar.name.lower().endswith(_TARS)]


def data_root(path: str | os.PathLike[str]) -> PurePath:
    """Returns the folder at a path of the user's.

    Raises:
        FileNotFoundError: It does not exist.
        NotADirectoryError: It is a file.
    """
    root = local_path(path)
    if not files.is_there(root):
        raise FileNotFoundError(f"{root} does not exist")
    if not files.is_folder(root):
        raise NotADirectoryError(no_folder(root))
    return root


def _relative(root: PurePath, path: str | os.PathLike[str]) -> str:
    path = local_path(path)
    try:
        is_whole = path.is_absolute() or not files.is_local(path)
        inside = path.relative_to(files.absolute(root)) if is_whole else path
    except ValueError:
        inside = PurePath("..")
    if ".." in inside.parts:
        raise ValueError(f"{path} is not below the dataset {root}; link the tar there (`ln -s`)")
    return inside.as_posix()


def files_below(root: PurePath, endings: tuple[str, ...] = ("",)) -> list[str]:
    """Returns the files in a folder and below it whose names end so, relative to the folder.

    `.nv-meta` is passed over. A folder counts once: under its own path, or else under that of the
    first link to it.

    Raises:
        OSError: A folder cannot be read.
    """
    names: list[str] = []
    seen: set[PurePath] = set()
    folders, links = [root], list[PurePath]()
    while folders or links:
        links.sort()
        folder = folders.pop() if folders else links.pop(0)
        real = files.resolved(folder)
        if real in seen:
            continue
        seen.add(real)
        for name in files.entries(folder):
            path = folder / name
            if not name.endswith("/"):
                if name.lower().endswith(endings):
                    names.append(path.relative_to(root).as_posix())
            elif path.name != META:
                (folders if files.resolved(path) == real / path.name else links).append(path)
    return names
