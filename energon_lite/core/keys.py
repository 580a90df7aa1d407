"""Restore keys: their shapes, the samples inside, and what is re-created from them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from energon_lite.core.state import RestoreKey

# The key of a sample that fills up a list, and was given before: (this, number, key). No hook has a
# name with a space.
REPEATED = "repeated"
# Beginnings of the keys of lists.
LISTS = ("batch", "pack")


def leaves(key: RestoreKey) -> Iterator[RestoreKey]:
    """Yields the keys of the source samples inside a restore key.

    Example:
        >>> list(leaves(("batch", 0, ("a", 0, 5, 5), ("a", 0, 6, 6))))
        [('a', 0, 5, 5), ('a', 0, 6, 6)]
    """
    nested = [entry for entry in key if type(entry) is tuple]
    if not nested:
        yield key
    for entry in nested:
        if entry and type(entry[-1]) is int:  # to recurse would take most of the time
            yield entry
        else:
            yield from leaves(entry)


def contents(key: RestoreKey) -> Iterator[tuple[RestoreKey, RestoreKey, bool]]:
    """Yields the samples inside a restore key, parts and repetitions included.

    Of the items that a generator function makes of one batch, the first has all samples of it.

    Yields:
        The key of the sample in its list, the key of its source sample, and whether it is the first
        item, or part, of this source sample.

    Example:
        >>> list(contents(("pack", 0, ("piece", 9, 12, ("a", 0, 5, 5)))))
        [(('piece', 9, 12, ('a', 0, 5, 5)), ('a', 0, 5, 5), False)]
    """
    inner = key[-1] if key else 0
    if type(inner) is not tuple:
        if len(key) == 4:
            yield key, key, True
        return
    is_item = len(key) == 3 and type(key[1]) is int and (key[0] not in LISTS or inner[0] == "batch")
    if not is_item and not is_piece(key):
        for entry in key:
            if type(entry) is tuple:
                yield from contents(entry)
        return
    is_first = key[1] == 0 and key[0] != REPEATED
    if inner[0] in LISTS:
        yield from contents(inner) if is_first else ()
        return
    for _, leaf, is_own_first in contents(inner):
        yield key, leaf, is_first and is_own_first


def first_leaf(key: RestoreKey) -> RestoreKey:
    """Returns the key of the first source sample inside a restore key."""
    while type(key[-1]) is tuple:
        # An item of a generator hook has one input.
        key = key[2] if len(key) == 3 else next(entry for entry in key if type(entry) is tuple)
    return key


def name_of_key(key: RestoreKey) -> str:
    """Names the samples of a restore key by source and number, as `text/train[5]`."""
    return ", ".join(
        f"{leaf[0]}[{leaf[2]}]" if len(leaf) == 4 else str(leaf) for leaf in leaves(key)
    )


def whole(key: RestoreKey) -> RestoreKey:
    """Returns the key of the sample of which a key in a list may be a piece, or a repetition."""
    inner: RestoreKey = key[-1] if is_piece(key) or is_again(key) else key
    return inner


def is_again(key: RestoreKey) -> bool:
    """Returns whether a key in a list is that of a sample that was given before."""
    return len(key) == 3 and key[0] == REPEATED


def is_piece(key: RestoreKey) -> bool:
    """Returns whether a key in a pack is that of a part of a sample."""
    return len(key) == 4 and key[0] == "piece" and isinstance(key[3], tuple)


class Siblings:
    """Items that are to be re-created, by the input of a generator hook that they were made of.

    Args:
        keys: restore keys of the items, or of lists of them.
    """

    def __init__(self, keys: Iterable[RestoreKey]) -> None:
        self._numbers: dict[tuple[str, RestoreKey], set[int]] = {}
        self._made: dict[RestoreKey, Any] = {}
        for key in keys:
            self._add(key)

    def _add(self, key: RestoreKey) -> None:
        for place, entry in enumerate(key):
            if isinstance(entry, tuple):
                if place == 2 == len(key) - 1 and isinstance(key[1], int):
                    self._numbers.setdefault((key[0], entry), set()).add(key[1])
                self._add(entry)

    def numbers(self, hook: str, key: RestoreKey) -> set[int]:
        """Returns, once, which items of a hook and an input are to be re-created."""
        return self._numbers.pop((hook, key), set())

    def keep(self, made: dict[RestoreKey, Any]) -> None:
        """Keeps items until they are taken."""
        self._made.update(made)

    def take(self, key: RestoreKey, default: Any) -> Any:
        """Returns an item that was made with a sibling."""
        return self._made.pop(key, default)
