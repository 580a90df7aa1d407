"""Restore keys as rows of integers, for buffers of thousands of samples.

A snapshot travels with each batch. As tuples, 10,000 keys would take 2 ms on their way from a
worker; as an array they take a tenth of that, and become tuples only when somebody saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.core.arrays import Int64Array
from energon_lite.core.state import RestoreKey

IntArray = npt.NDArray[np.signedinteger[Any]]

# Columns of a row: number of (hook, source), epoch, index, sample, number of the hook's item.
KEY_COLUMNS = 5
_LARGEST = 1 << 62


def compact(rows: Int64Array) -> IntArray:
    """Copies rows, in four bytes for each number if they are all small."""
    is_small = not rows.size or (rows.min() >= -(1 << 31) and rows.max() < 1 << 31)
    return rows.astype(np.int32 if is_small else np.int64)


class KeyTable:
    """Turns restore keys of a stream into rows, and back.

    The key of a sample as it comes from its source, or of an item that a generator hook made of
    one, is a row of five integers. Keys of any other shape are kept as they are beside it.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str | None, str], int] = {}
        self._others: dict[int, RestoreKey] = {}
        self._num_others = 0

    def row(self, key: RestoreKey) -> tuple[int, ...]:
        """Returns the row of a key."""
        hook, number, leaf = None, 0, key
        if len(key) == 3 and type(key[2]) is tuple and type(key[0]) is str:
            hook, number, leaf = key
        if len(leaf) == 4:
            source, epoch, index, sample = leaf
            if (
                type(source) is str
                and type(epoch) is type(index) is type(sample) is type(number) is int
                and 0 <= epoch | index | sample | number < _LARGEST
            ):
                name = self._names.setdefault((hook, source), len(self._names))
                return name, epoch, index, sample, number
        place = self._num_others
        self._num_others += 1
        self._others[place] = key
        return -1, place, 0, 0, 0

    def forget(self, row: Sequence[int]) -> None:
        """Forgets the key of a row."""
        if row[0] < 0:
            del self._others[row[1]]

    def frozen(self) -> KeyRows:
        """Returns what reads rows, also when this has changed."""
        return KeyRows(tuple(self._names), dict(self._others))


@dataclass(frozen=True)
class KeyRows:
    """What rows mean: names of hooks and sources, and the keys that are no rows."""

    names: tuple[tuple[str | None, str], ...]
    others: dict[int, RestoreKey]

    def keys(self, rows: IntArray) -> list[RestoreKey]:
        """Returns the keys of rows."""
        keys: list[RestoreKey] = []
        for name, epoch, index, sample, number in rows.tolist():
            if name < 0:
                keys.append(self.others[epoch])
                continue
            hook, source = self.names[name]
            leaf = (source, epoch, index, sample)
            keys.append(leaf if hook is None else (hook, number, leaf))
        return keys
