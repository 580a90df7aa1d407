"""Which shard belongs to which split part: pure functions on names."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from energon_lite.storage.braces import expand

RATIO_PARTS = ("train", "val", "test")

Share = float | str | Fraction
Ratio = str | Sequence[Share] | Sequence[tuple[str, Share]] | Mapping[str, Share]


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


def parse_ratio(ratio: Ratio) -> dict[str, Fraction]:
    """Reads the share of each split part; decimals are taken exactly.

    Args:
        ratio: two or three shares, of train, val and test; or shares by name.

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
            f"split ratio {ratio!r}: give three numbers for train,val,test such as 8,1,1 "
            "(0 for a part without shards)"
        )
    return shares


def _named_shares(ratio: Ratio) -> dict[str, object]:
    if isinstance(ratio, Mapping):
        return dict(ratio)
    shares = ratio.split(",") if isinstance(ratio, str) else list(ratio)
    if shares and all(isinstance(share, tuple | list) for share in shares):
        return dict(shares)  # type: ignore[arg-type]  # pairs
    return dict(zip(RATIO_PARTS, shares, strict=False)) if len(shares) in (2, 3) else {}


def refuse(message: str) -> None:
    """Raises a ValueError: what is odd about a split is an error."""
    raise ValueError(message)


def split_by_ratio(
    names: Sequence[str],
    shares: Mapping[str, Fraction],
    shuffle_seed: int | None = None,
    on_odd: Callable[[str], None] = refuse,
) -> dict[str, list[str]]:
    """Deals shards to split parts, in order.

    The cuts are exact, so no shard is lost; the last share above 0 takes the rest.

    Args:
        names: the shards.
        shares: what `parse_ratio` returned.
        shuffle_seed: shuffles the shards first.
        on_odd: called with what is wrong where a share above 0 gets no shard; by default raises
            a ValueError.

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
        if share and stop == start:
            on_odd(
                f"split ratio {','.join(map(str, shares.values()))} leaves {part!r} empty: there "
                f"are only {len(order)} shards. Set its share to 0, make it larger, or write more "
                "shards"
            )
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
        on_odd: called with what is wrong where a pattern matches no shard, or a shard belongs to
            two parts; by default raises a ValueError.

    Raises:
        ValueError: A pattern is malformed.
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
        members += [name for name in matched if name not in members]
    order = {name: index for index, name in enumerate(names)}
    return {part: sorted(members, key=order.__getitem__) for part, members in parts.items()}


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
