"""Restore keys as rows of integers, for windows of thousands of samples.

A snapshot travels with each batch. As tuples, 10,000 keys would take 2 ms on their way from a
worker; as an array they take a tenth of that, and become tuples only when somebody saves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.core.arrays import Int64Array
from energon_lite.core.state import RestoreKey

IntArray = npt.NDArray[np.signedinteger[Any]]
GroupKey = Any  # a text, number, bool, None, or a tuple of these

# Columns of a row: number of (hook, source), epoch, index, sample, number of the hook's item; in a
# window also length and group.
KEY_COLUMNS, COLUMNS = 5, 7
Row = tuple[int, int, int, int, int]
_LARGEST = 1 << 62


def compact(rows: Int64Array) -> IntArray:
    """Copies rows, in four bytes for each number if they are all small."""
    is_small = not rows.size or rows.max() < 1 << 31
    return rows.astype(np.int32 if is_small else np.int64)


class KeyTable:
    """Turns restore keys of a stream into rows, and back.

    The key of a sample as it comes from its source, or of an item that a generator hook made of
    one, is a row of five integers. Keys of any other shape are kept as they are beside it.
    """

    def __init__(self) -> None:
        self.names: dict[tuple[str | None, str], int] = {}
        self.others: dict[int, RestoreKey] = {}
        self._num_others = 0
        # Of the last item of a generator hook: the hook, its input, and their columns.
        self._last: tuple[Any, ...] = (None, None, ())

    def row(self, key: RestoreKey) -> Row:
        """Returns the row of a key, which is then held."""
        hook, number, leaf = None, 0, key
        if len(key) == 3 and type(key[2]) is tuple and type(key[0]) is str:
            hook, number, leaf = key
            last_hook, last_leaf, columns = self._last
            if (
                leaf is last_leaf
                and hook == last_hook
                and type(number) is int
                and 0 <= number < _LARGEST
            ):
                return (*columns, number)
        if len(leaf) == 4:
            source, epoch, index, sample = leaf
            if (
                type(source) is str
                and type(epoch) is type(index) is type(sample) is type(number) is int
                and 0 <= epoch | index | sample | number < _LARGEST
            ):
                name = self.names.setdefault((hook, source), len(self.names))
                self._last = (hook, leaf, (name, epoch, index, sample))
                return name, epoch, index, sample, number
        place = self._num_others
        self._num_others += 1
        self.others[place] = key
        return -1, place, 0, 0, 0

    def release(self, rows: IntArray) -> list[RestoreKey]:
        """Returns the keys of rows, which are no longer held."""
        keys = KeyRows(tuple(self.names), self.others).keys(rows)
        for name, place, *_ in rows.tolist() if self.others else ():
            if name < 0:
                del self.others[place]
        return keys

    def frozen(self) -> KeyRows:
        """Returns what reads rows, also when this has changed."""
        return KeyRows(tuple(self.names), dict(self.others))


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


class KeyArray:
    """The restore keys of a buffer's items, in their order."""

    def __init__(self, keys: Iterable[RestoreKey] = ()) -> None:
        self._table = KeyTable()
        self._rows = array("q")
        for key in keys:
            self.add(key)

    def add(self, key: RestoreKey) -> None:
        """Adds the key of the last item."""
        self._rows.extend(self._table.row(key))

    def take(self, place: int) -> None:
        """Removes the key at a place, which the last one takes."""
        rows, first = self._rows, place * KEY_COLUMNS
        if self._table.others and rows[first] < 0:
            del self._table.others[rows[first + 1]]
        rows[first : first + KEY_COLUMNS] = rows[-KEY_COLUMNS:]
        del rows[-KEY_COLUMNS:]

    def fields(self, counts: dict[str, int]) -> BufferFields:
        """Returns the fields of a snapshot, with the keys as `held`."""
        rows = np.frombuffer(self._rows, np.int64).reshape(-1, KEY_COLUMNS)
        return BufferFields(counts, self._table.frozen(), compact(rows))


@dataclass(frozen=True)
class BufferFields(Mapping[str, Any]):
    """The fields of a snapshot of a buffer; keys are made when somebody looks at them.

    Attributes:
        counts: fields that are numbers.
        table: what the rows mean.
        rows: of the items held, shape (N, 5).
    """

    counts: dict[str, int]
    table: KeyRows
    rows: IntArray

    def __getitem__(self, name: str) -> Any:
        """Returns one field."""
        return tuple(self.table.keys(self.rows)) if name == "held" else self.counts[name]

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the fields."""
        yield from (*self.counts, "held")

    def __len__(self) -> int:
        """Counts the fields."""
        return len(self.counts) + 1


class Window:
    """Samples that are read for a window: their rows, and they themselves."""

    def __init__(self) -> None:
        self._rows = array("q")
        self.samples: list[Any] = []
        self.groups: dict[GroupKey, int] = {}

    def __len__(self) -> int:
        """Counts the samples."""
        return len(self.samples)

    def add(self, row: Row, length: int, group: GroupKey, sample: Any) -> None:
        """Adds a sample."""
        number = self.groups.setdefault(group, len(self.groups))
        self._rows.extend((*row, length, number))
        self.samples.append(sample)

    def rows(self) -> Int64Array:
        """Copies the rows, shape (N, 7)."""
        # A view would forbid that the array grows.
        return np.frombuffer(self._rows, np.int64).reshape(-1, COLUMNS).copy()

    def carried(self, places: Int64Array) -> Window:
        """Returns a window that begins with some of the samples."""
        other, names = Window(), list(self.groups)
        for place, row in zip(places.tolist(), self.rows()[places].tolist(), strict=True):
            *key, length, group = row
            other.add(tuple(key), length, names[group], self.samples[place])
        return other


@dataclass(frozen=True)
class HeldFields(Mapping[str, Any]):
    """The fields of a snapshot, made of arrays when somebody looks at them.

    Attributes:
        counts: fields that are numbers.
        table: what the rows mean.
        batches: rows of the samples in batches to come, shape (M, 5).
        edges: where these batches begin and end, from 0 to M.
        window: rows of the samples of the next window, shape (N, 7).
        groups: the names of its groups.
    """

    counts: dict[str, int]
    table: KeyRows
    batches: IntArray
    edges: Int64Array
    window: IntArray
    groups: tuple[GroupKey, ...]

    def __getitem__(self, name: str) -> Any:
        """Returns one field."""
        if name == "held":
            keys = self.table.keys(self.batches)
            return tuple(tuple(keys[a:b]) for a, b in pairwise(self.edges.tolist()))
        if name == "groups":
            return tuple(self._group(i, group) for i, group in enumerate(self.groups))
        return self.counts[name]

    def _group(self, number: int, group: GroupKey) -> tuple[Any, ...]:
        rows = self.window[self.window[:, -1] == number]
        return (
            group,
            tuple(self.table.keys(rows[:, :KEY_COLUMNS])),
            rows[:, KEY_COLUMNS : KEY_COLUMNS + 1],
        )

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the fields."""
        yield from (*self.counts, "held", "groups")

    def __len__(self) -> int:
        """Counts the fields."""
        return len(self.counts) + 2
