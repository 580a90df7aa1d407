"""Brace patterns: many numbered names in one, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from braceexpand import braceexpand

_DIGITS = re.compile(r"([0-9]+)")
_SPECIAL = re.compile(r"([\\{}])")


def expand(pattern: str) -> list[str]:
    """Gives the names of a pattern as bash does: `{a,b}`, `{00..07}`, `{1..9..2}`, nested.

    Raises:
        ValueError: A brace is open or closed without its partner.

    Example:
        >>> expand("data-{00..02}.tar")
        ['data-00.tar', 'data-01.tar', 'data-02.tar']
    """
    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        return [pattern]
    return list(braceexpand(pattern))


def compress(names: Iterable[str]) -> list[str]:
    """Gives patterns that expand to `names`, in the same order.

    Neighbours are merged where they differ in one number only, of the same width, that grows by 1.

    Example:
        >>> compress(["a-8.tar", "a-9.tar", "a-10.tar", "b.tar"])
        ['a-{8..9}.tar', 'a-10.tar', 'b.tar']
    """
    patterns: list[str] = []
    first: list[str] = []
    last: list[str] = []
    field: int | None = None  # which token counts up in the open run; None while it has one name
    for name in names:
        tokens = _DIGITS.split(name)
        step = _counting_field(last, tokens) if last else None
        if step is not None and field in (None, step):
            field = step
        else:
            if first:
                patterns.append(_pattern(first, last, field))
            first, field = tokens, None
        last = tokens
    if first:
        patterns.append(_pattern(first, last, field))
    return patterns


def _counting_field(a: Sequence[str], b: Sequence[str]) -> int | None:
    """Finds the one token in which `b` is `a` plus 1, or gives None."""
    if len(a) != len(b):
        return None
    different = [i for i in range(len(a)) if a[i] != b[i]]
    if len(different) != 1:
        return None
    (i,) = different
    # Odd tokens are the numbers: split("a-08.tar") is ["a-", "08", ".tar"].
    is_next = i % 2 == 1 and len(a[i]) == len(b[i]) and int(b[i]) == int(a[i]) + 1
    return i if is_next else None


def _pattern(first: Sequence[str], last: Sequence[str], field: int | None) -> str:
    texts = [_SPECIAL.sub(r"\\\1", token) for token in first]
    if field is not None:
        texts[field] = f"{{{first[field]}..{last[field]}}}"
    return "".join(texts)
