"""Writes split files, with numbered names merged into brace patterns; see `storage.braces`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from energon_lite.formats.nvmeta import DEFAULT_SPLIT
from energon_lite.storage.yaml import dump_config

_DIGITS = re.compile(r"([0-9]+)")
_SPECIAL = re.compile(r"([\\{}])")


def split_text(
    parts: Mapping[str, Sequence[str]], exclude: Sequence[str] = (), config: str | None = None
) -> str:
    """Returns the content of a split config, with numbered names merged into brace patterns."""
    content = {
        "split_parts": {name: compress(shards) for name, shards in parts.items()},
        "exclude": compress(exclude),
    }
    return dump_config(content, config or DEFAULT_SPLIT)


def compress(names: Iterable[str]) -> list[str]:
    """Returns patterns that expand to `names`, in the same order.

    Neighbours are merged where they differ in one number only, of the same width, that grows by 1.

    Example:
        >>> compress(["a-8.tar", "a-9.tar", "a-10.tar", "b.tar"])
        ['a-{8..9}.tar', 'a-10.tar', 'b.tar']
    """
    runs: list[tuple[list[str], list[str], int | None]] = []  # first and last name, what counts up
    for name in names:
        tokens = _DIGITS.split(name)
        first, last, field = runs[-1] if runs else ([], [], None)
        step = _counting_field(last, tokens)
        if step is not None and field in (None, step):
            runs[-1] = first, tokens, step
        else:
            runs.append((tokens, tokens, None))
    return [_pattern(*run) for run in runs]


def _counting_field(a: Sequence[str], b: Sequence[str]) -> int | None:
    """Finds the one token in which `b` is `a` plus 1, or returns None."""
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
