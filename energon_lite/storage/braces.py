"""Brace patterns: many numbered names in one."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator
from itertools import product

_TOKEN = re.compile(r"[{},]|[^\\{},]+|\\.|\\", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_NUMBERS = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?([0-9]+))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase

# More shards than a dataset has.
MAX_NAMES = 2_000_000
MAX_CHARACTERS = 256 << 20
_MAX_DEPTH = 50
_MAX_DIGITS = 100


def check_num_names(num_names: int, characters: int = 0, what: str = "expands to") -> None:
    """Refuses more names than a dataset has; a ValueError names both numbers."""
    if num_names > MAX_NAMES or characters > MAX_CHARACTERS:
        size = f" of {characters:,} characters" if characters else ""
        raise ValueError(
            f"{what} {num_names:,} names{size}, where {MAX_NAMES:,} names and "
            f"{MAX_CHARACTERS:,} characters are the most; write smaller ranges"
        )


def expand(pattern: str) -> list[str]:
    """Returns the names of a pattern as bash does: `{a,b}`, `{00..07}`, `{1..9..2}`, nested.

    Raises:
        ValueError: A brace is open or closed without its partner, braces are nested too deeply, or
            the pattern expands to too many names, which are counted before they are made.

    Example:
        >>> expand("data-{00..02}.tar")
        ['data-00.tar', 'data-01.tar', 'data-02.tar']
    """
    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        return [pattern]
    return _sequence(pattern, _TOKEN.finditer(pattern), 0)[0]


def _sequence(
    pattern: str, tokens: Iterator[re.Match[str]], depth: int
) -> tuple[list[str], str, int]:
    """Expands up to the comma or brace that ends it; returns the names, and that with its place."""
    pools: list[list[str]] = []  # alternatives, one after the other
    num_names = 1
    for token in tokens:
        text = token[0]
        if text == "{":
            brace = _brace(pattern, tokens, depth + 1, token.end())
            pools += brace
            num_names *= math.prod(map(len, brace))
            check_num_names(num_names)
        elif depth and text in (",", "}"):
            return _combined_names(pools), text, token.start()
        elif text == "}":
            raise _unbalanced(pattern)
        else:
            pools.append([_ESCAPED.sub(r"\1", text)])
    if depth:
        raise _unbalanced(pattern)
    return _combined_names(pools), "", len(pattern)


def _combined_names(pools: list[list[str]]) -> list[str]:
    num_names = math.prod(map(len, pools))
    check_num_names(num_names, sum(sum(map(len, p)) * num_names // len(p) for p in pools))
    return ["".join(parts) for parts in product(*pools)]


def _unbalanced(pattern: str) -> ValueError:
    remedy = "a brace that is part of a name is written \\{ or \\}"
    return ValueError(f"Unbalanced braces: {pattern!r:.80}; {remedy}")


def _brace(
    pattern: str, tokens: Iterator[re.Match[str]], depth: int, start: int
) -> list[list[str]]:
    """Returns the alternatives of a brace whose content begins at `start`."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} braces inside of one another; write fewer")
    names: list[str] = []
    end, stop, is_list = ",", start, False
    while end == ",":
        part, end, stop = _sequence(pattern, tokens, depth)
        names += part
        check_num_names(len(names))
        is_list |= end == ","
    values = names if is_list else _range(pattern[start:stop])
    # Braces around neither a range nor alternatives stay.
    return [["{"], names, ["}"]] if values is None else [values]


def _range(text: str) -> list[str] | None:
    found = _NUMBERS.fullmatch(text)
    if found is None:
        found = _LETTERS.fullmatch(text)
        if found is None:
            return None
        places = _steps(_ALPHABET.index(found[1]), _ALPHABET.index(found[2]), found[3])
        return [_ALPHABET[place] for place in places]
    ends = found[1], found[2]
    width = max(map(len, ends))
    if width > _MAX_DIGITS:
        raise ValueError(f"a number of {width:,} digits, where {_MAX_DIGITS} are the most")
    is_padded = any(end.lstrip("-").startswith("0") and end not in ("0", "-0") for end in ends)
    numbers = _steps(int(found[1]), int(found[2]), found[3])
    return [f"{number:0{width if is_padded else 0}d}" for number in numbers]


def _steps(start: int, end: int, step: str | None) -> range:
    """Returns the numbers of a range, the end included, upwards or downwards."""
    size = (int(step[:_MAX_DIGITS]) or 1) if step else 1
    numbers = range(start, end + 1, size) if start < end else range(start, end - 1, -size)
    check_num_names((abs(end - start) // size) + 1)
    return numbers
