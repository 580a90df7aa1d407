"""Restore keys as rows of integers, for windows of thousands of samples.

A snapshot travels with each batch. As tuples, 10,000 keys would take 2 ms on their way from a
worker; as an array they take a tenth of that, and become tuples only when somebody saves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.core.state import RestoreKey

IntArray = npt.NDArray[np.signedinteger[Any]]
GroupKey = Any  # a text, number, bool, None, or a tuple of these

# Columns of a row: source, epoch, index, sample; of one in a window also length and group.
KEY_COLUMNS, COLUMNS = 4, 6
_LARGEST = 1 << 62


def compact(rows: npt.NDArray[np.int64]) -> IntArray:
    """Copies rows, in four bytes for each number if they are all small."""
    is_small = not rows.size or rows.max() < 1 << 31
    return rows.astype(np.int32 if is_small else np.int64)


class KeyTable:
    """Turns restore keys of a stream into rows, and back.

    The key of a sample as it comes from its source is a row of four integers. Keys of any other
    shape, as generator hooks make them, are kept as they are beside it.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self.others: dict[int, RestoreKey] = {}
        self._num_others = 0

    def row(self, key: RestoreKey) -> tuple[int, int, int, int]:
        """Gives the row of a key, which is then held."""
        if len(key) == 4:
            source, epoch, index, sample = key
            if (
                type(source) is str
                and type(epoch) is type(index) is type(sample) is int
                and 0 <= epoch | index | sample < _LARGEST
            ):
                return self.sources.setdefault(source, len(self.sources)), epoch, index, sample
        number = self._num_others
        self._num_others += 1
        self.others[number] = key
        return -1, number, 0, 0

    def release(self, rows: IntArray) -> list[RestoreKey]:
        """Gives the keys of rows, which are no longer held."""
        keys = KeyRows(tuple(self.sources), self.others).keys(rows)
        for source, number, *_ in rows.tolist() if self.others else ():
            if source < 0:
                del self.others[number]
        return keys

    def frozen(self) -> KeyRows:
        """Gives what reads rows, also when this has changed."""
        return KeyRows(tuple(self.sources), dict(self.others))


@dataclass(frozen=True)
class KeyRows:
    """What rows mean: names of sources, and the keys that are no rows."""

    sources: tuple[str, ...]
    others: dict[int, RestoreKey]

    def keys(self, rows: IntArray) -> list[RestoreKey]:
        """Gives the keys of rows."""
        sources, others = self.sources, self.others
        return [
            (sources[row[0]], row[1], row[2], row[3]) if row[0] >= 0 else others[row[1]]
            for row in rows.tolist()
        ]


class Window:
    """Samples that are read for a window: their rows, and they themselves."""

    def __init__(self) -> None:
        self._rows = array("q")
        self.samples: list[Any] = []
        self.groups: dict[GroupKey, int] = {}

    def __len__(self) -> int:
        """Counts the samples."""
        return len(self.samples)

    def add(
        self, row: tuple[int, int, int, int], length: int, group: GroupKey, sample: Any
    ) -> None:
        """Adds a sample."""
        number = self.groups.setdefault(group, len(self.groups))
        self._rows.extend((*row, length, number))
        self.samples.append(sample)

    def rows(self) -> npt.NDArray[np.int64]:
        """Copies the rows, shape (N, 6)."""
        # A view would forbid that the array grows.
        return np.frombuffer(self._rows, np.int64).reshape(-1, COLUMNS).copy()

    def carried(self, places: npt.NDArray[np.int64]) -> Window:
        """Gives a window that begins with some of the samples."""
        other, names = Window(), list(self.groups)
        for place, row in zip(places.tolist(), self.rows()[places].tolist(), strict=True):
            other.add((row[0], row[1], row[2], row[3]), row[4], names[row[5]], self.samples[place])
        return other


@dataclass(frozen=True)
class HeldFields(Mapping[str, Any]):
    """The fields of a snapshot, made of arrays when somebody looks at them.

    Attributes:
        counts: fields that are numbers.
        table: what the rows mean.
        batches: rows of the samples in batches to come, shape (M, 4).
        edges: where these batches begin and end, from 0 to M.
        window: rows of the samples of the next window, shape (N, 6).
        groups: the names of its groups.
    """

    counts: dict[str, int]
    table: KeyRows
    batches: IntArray
    edges: npt.NDArray[np.int64]
    window: IntArray
    groups: tuple[GroupKey, ...]

    def __getitem__(self, name: str) -> Any:
        """Gives one field."""
        if name == "held":
            keys = self.table.keys(self.batches)
            return tuple(tuple(keys[a:b]) for a, b in pairwise(self.edges.tolist()))
        if name == "groups":
            return tuple(self._group(i, group) for i, group in enumerate(self.groups))
        return self.counts[name]

    def _group(self, number: int, group: GroupKey) -> tuple[Any, ...]:
        rows = self.window[self.window[:, 5] == number]
        return group, tuple(self.table.keys(rows)), rows[:, KEY_COLUMNS : KEY_COLUMNS + 1]

    def __iter__(self) -> Iterator[str]:
        """Gives the names of the fields."""
        yield from (*self.counts, "held", "groups")

    def __len__(self) -> int:
        """Counts the fields."""
        return len(self.counts) + 2
