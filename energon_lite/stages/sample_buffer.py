"""Samples that wait for a list, and what a snapshot has of them: rows of one array of integers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, Samples
from energon_lite.core import batch_memory
from energon_lite.core.arrays import Int64Array
from energon_lite.core.key_columns import KeyedFields, Keys, KeyTable
from energon_lite.core.state import MAX_COUNT, RestoreKey
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.key_places import KeyPlaces

# Number, group, lengths and restore key of a sample.
Unit = tuple[int, int, Sequence[int], RestoreKey]
# Rows of a small array; samples of a small buffer, whose places are not looked for; and samples
# whose places are looked for together, at least.
_FEWEST, _SMALL, _MANY = 256, 512, 1024


class SampleBuffer:
    """Samples by number, with their restore keys, groups and lengths.

    Each has a row: number, group, lengths, the number of the first snapshot that lacks it, its
    place in the order of its source or -1, and what a `KeyTable` makes of its key. Rows are added,
    and change when their sample is taken, or its place is found; so a snapshot is a view of them,
    with its own number: what was taken later is still in it. When there is no room, rows of samples
    that were taken are left behind in a new array.

    Args:
        num_lengths: R, the resources of a sample.
        places: finds places; None to find none.

    Attributes:
        samples: by number, rising, as the next one.
        keys: of the samples.
        new: those without a row.
    """

    def __init__(self, num_lengths: int, places: KeyPlaces | None = None) -> None:
        self.samples: dict[int, Any] = {}
        self.keys: dict[int, RestoreKey] = {}
        self.new: list[Unit] = []
        self._gone: list[int] = []  # of those with a row, since the last snapshot
        self._last = -1  # number of the last row
        self._at = 2 + num_lengths
        self._table = KeyTable()
        self._array = np.empty((0, self._at + 7), np.int64)  # of keys of sources
        self._memory = batch_memory.num_memories
        self._num_rows = self._num_snapshots = 0
        # Finds places; those of samples below a number were looked for.
        self._places, self._sought, self._num_unsought = places, 0, 0

    def add(self, units: Sequence[Unit], samples: Sequence[Any]) -> None:
        """Adds samples; they get rows before the next snapshot."""
        for unit, sample in zip(units, samples, strict=True):
            self.keys[unit[0]], self.samples[unit[0]] = unit[3], sample
        self.new += units

    def restore(self, units: Sequence[Unit], places: Sequence[int]) -> None:
        """Adds samples that are re-created when they are taken, at known places or -1."""
        self.add(units, [SKIPPED] * len(units))
        self._sought = 1 + next(reversed(self.keys), -1)
        self.rows()[:, self._at + 1] = places

    def _add_rows(self, keys: Sequence[RestoreKey], *columns: Any) -> None:
        own, at = self._table.rows(keys), self._at
        start, stop, width = self._num_rows, self._num_rows + len(keys), at + 2 + own.shape[1]
        is_left = self._memory != batch_memory.num_memories
        if stop > len(self._array) or width > self._array.shape[1] or is_left:
            self._make_room(len(keys), width)
            own = self._table.rows(keys)  # the table may be another one
            start, stop = self._num_rows, self._num_rows + len(keys)
        rows = self._array[start:stop]
        rows[:, 0], rows[:, 1], rows[:, 2:at] = columns
        rows[:, at], rows[:, at + 1], rows[:, at + 2 : width] = MAX_COUNT, -1, own
        self._num_rows = stop

    def _make_room(self, num: int, width: int) -> None:
        """Begins a new array, with the rows of what is buffered and room for more."""
        old = self._array[: self._num_rows]
        left = np.fromiter(self.keys, np.int64, len(self.keys))
        old = old[np.isin(old[:, 0], left, assume_unique=True)]
        if len(self._table) > len(old) + _FEWEST:  # entries of keys that were taken pile up
            self._table = KeyTable()
            keys = self._table.rows([self.keys[number] for number in old[:, 0].tolist()])
            old = np.column_stack([old[:, : self._at + 2], keys])
        width = max(width, old.shape[1], self._array.shape[1])
        shape = max(_FEWEST, 2 * (len(old) + num)), width
        # Columns lie together: numbers are searched. A worker process shares it.
        self._array = batch_memory.new_block(shape[::-1], np.int64).T
        self._memory = batch_memory.num_memories
        self._array[:] = 0
        self._array[: len(old), : old.shape[1]] = old
        self._num_rows = len(old)

    def taken(self, numbers: Iterable[int]) -> tuple[list[RestoreKey], list[Any]]:
        """Returns keys and samples, and forgets them."""
        numbers, last = list(numbers), self._last
        self._gone += [number for number in numbers if number <= last]
        return list(map(self.keys.pop, numbers)), list(map(self.samples.pop, numbers))

    def rows(self) -> Int64Array:
        """Returns the rows from the first sample on, of which some may have been taken."""
        if self._gone:
            places = self._array[: self._num_rows, 0].searchsorted(self._gone)
            self._array[places, self._at] = self._num_snapshots
            self._gone = []
        left = self.keys
        new, self.new = [unit for unit in self.new if unit[0] in left], []
        if new:
            *columns, keys = zip(*new, strict=True)
            self._add_rows(keys, *columns)
            self._last = new[-1][0]
        rows = self._array[: self._num_rows]
        self._num_unsought += len(new)
        if self._num_unsought > max(_MANY, len(left) // 8) and len(left) > _SMALL and self._places:
            self._seek(self._places, rows[bisect_left(rows[:, 0], self._sought) :])
        return rows[bisect_left(rows[:, 0], next(iter(left), MAX_COUNT)) :]

    def _seek(self, places: KeyPlaces, rows: Int64Array) -> None:
        """Finds the places of samples in the orders of their sources."""
        found = Keys(self._table.words(), rows[:, self._at + 2 :])
        for name, own in found.sources():
            rows[own, self._at + 1] = places.places(name, *found.rows[own, 2:4].T)
        self._sought, self._num_unsought = self._last + 1, 0

    def rows_of(self, numbers: Sequence[int]) -> Samples:
        """Returns what is known of some of the samples."""
        rows = self.rows()
        rows = rows[np.searchsorted(rows[:, 0], numbers)]
        return Samples(rows[:, 0], rows[:, 1], rows[:, 2 : self._at])

    def fields(self, known: dict[str, Any], state: CollectorState) -> SnapshotFields:
        """Returns the fields of a snapshot: what is known, what is buffered, and the collector's.

        It costs the same for any number of samples.
        """
        rows, words, num = self.rows(), self._table.words(), self._num_snapshots
        self._num_snapshots += 1
        known, own = {**known, "counts": state.counts}, (self._at, num, self._sought)
        return SnapshotFields(known, state, rows, words, *own)


@dataclass(eq=False, repr=False)
class SnapshotFields(KeyedFields):
    """The fields of a snapshot; keys and rows are made when somebody looks at them."""

    state: CollectorState
    buffered: Int64Array
    words: bytes
    at: int
    number: int
    sought: int

    def table(self) -> tuple[Keys, Int64Array]:
        """Returns the restore keys; and number, group, lengths and the collector's columns."""
        numbers, at = self.buffered[:, 0], self.at
        own = self.state.rows(numbers[self.buffered[:, at] > self.number])
        rows = self.buffered[np.searchsorted(numbers, own[:, 0])]
        places = np.where(rows[:, 0] < self.sought, rows[:, at + 1], -1)  # those found since
        keys = Keys(self.words, rows[:, at + 2 :]).placed(places)
        return keys, np.column_stack([rows[:, :at], own[:, 1:]])
