"""Which shard belongs to which split part: pure functions on names."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from energon_lite.storage.braces import expand

RATIO_PARTS = ("train", "val", "test")


def compile_pattern(pattern: str, what: str) -> re.Pattern[str]:
    """Compiles a regular expression that a user gave as the option `what`."""
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


def parse_ratio(ratio: str | Sequence[float | str | Fraction]) -> tuple[Fraction, ...]:
    """Reads shares of train, val and test (or of train and val); decimals are taken exactly.

    Raises:
        ValueError: They are not two or three numbers of at least 0, one of them above.

    Example:
        >>> parse_ratio("0.5, 0.3, 0.2") == parse_ratio([5, 3, 2])
        False
        >>> [int(share * 10) for share in parse_ratio("0.5, 0.3, 0.2")]
        [5, 3, 2]
    """
    texts = ratio.split(",") if isinstance(ratio, str) else [str(share) for share in ratio]
    try:
        shares = tuple(Fraction(text.strip()) for text in texts)
    except (ValueError, ZeroDivisionError):
        shares = ()
    if len(shares) not in (2, 3) or min(shares) < 0 or sum(shares) == 0:
        raise ValueError(
            f"split ratio {ratio!r}: give three numbers for train,val,test such as 8,1,1 "
            "(0 for a part without shards)"
        )
    return shares


def split_by_ratio(
    names: Sequence[str], shares: Sequence[Fraction], shuffle_seed: int | None = None
) -> dict[str, list[str]]:
    """Deals shards to train, val and test, in order.

    The cuts are exact, so no shard is lost; the last share above 0 takes the rest.

    Args:
        names: the shards.
        shares: what `parse_ratio` gave.
        shuffle_seed: shuffles the shards first.

    Raises:
        ValueError: A share above 0 would get no shard.

    Example:
        >>> parts = split_by_ratio([str(i) for i in range(10)], parse_ratio("7,2,1"))
        >>> [len(part) for part in parts.values()]
        [7, 2, 1]
    """
    order = list(names)
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    total = sum(shares)
    parts: dict[str, list[str]] = {}
    reached, start = Fraction(0), 0
    for part, share in zip(RATIO_PARTS, shares, strict=False):
        reached += share
        stop = int(len(order) * reached / total)
        parts[part] = order[start:stop]
        if share and stop == start:
            raise ValueError(
                f"split ratio {','.join(map(str, shares))} leaves {part!r} empty: there are only "
                f"{len(order)} shards. Set its share to 0, make it larger, or write more shards"
            )
        start = stop
    return parts


def split_by_patterns(
    names: Sequence[str], patterns: Iterable[tuple[str, str]]
) -> dict[str, list[str]]:
    """Gives each split part the shards that its patterns match, in the order of `names`.

    Args:
        names: the shards, relative to the dataset.
        patterns: (part, pattern); a pattern is brace-expanded, then matched as a regular
            expression from the start of the name. A part may have several.

    Raises:
        ValueError: A pattern matches no shard, or a shard belongs to two parts.
    """
    owner: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for part, text in patterns:
        members = parts.setdefault(part, [])
        try:
            expanded = expand(text)
        except ValueError as error:
            raise ValueError(f"split part {part!r}: pattern {text!r}: {error}") from None
        regexes = [compile_pattern(one, f"split part {part!r}") for one in expanded]
        matched = [name for name in names if any(regex.match(name) for regex in regexes)]
        if not matched:
            raise ValueError(
                f"split part {part!r}: pattern {text!r} matches none of the {len(names)} shards "
                f"(the first is {names[0]!r}).{_glob_hint(text)}"
            )
        for name in matched:
            if owner.setdefault(name, part) != part:
                raise ValueError(
                    f"shard {name!r} matches the patterns of both {owner[name]!r} and {part!r}; "
                    "change one, so that no sample is in two split parts"
                )
        members += [name for name in matched if name not in members]
    order = {name: index for index, name in enumerate(names)}
    return {part: sorted(members, key=order.__getitem__) for part, members in parts.items()}


def patterns_of(
    parts: Mapping[str, str | Sequence[str]] | Iterable[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Gives (part, pattern) pairs of a mapping (name to one pattern or several) or of pairs."""
    pairs: list[tuple[str, str]] = []
    for part, value in parts.items() if isinstance(parts, Mapping) else parts:
        patterns = [value] if isinstance(value, str) else value
        pairs += [(part, pattern) for pattern in patterns]
    if not pairs:
        raise ValueError("split parts: give at least one part, such as train:'train/.*'")
    return pairs
