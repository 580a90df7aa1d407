"""Samples that wait for a list, and what a snapshot has of them: rows of one array of integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, Samples
from energon_lite.core.arrays import Int64Array
from energon_lite.core.key_columns import KeyTable, keys_of_rows
from energon_lite.core.state import MAX_COUNT, RestoreKey

# Number, group, lengths and restore key of a sample.
Unit = tuple[int, int, Sequence[int], RestoreKey]
# Rows of a small buffer.
_FEWEST = 256


class SampleBuffer:
    """Samples by number, with their restore keys, groups and lengths.

    Each has a row: number, group, lengths, and what a `KeyTable` makes of its key. Rows are added
    and never changed, so that a snapshot is a view of them. It has rows of samples that were taken
    since, too, which its reader omits; when there is no room, they are left behind in a new array.

    Args:
        num_lengths: R, the resources of a sample.

    Attributes:
        samples: by number, rising, as the next one.
        keys: of the samples.
        new: those without a row.
    """

    def __init__(self, num_lengths: int) -> None:
        self.samples: dict[int, Any] = {}
        self.keys: dict[int, RestoreKey] = {}
        self.new: list[Unit] = []
        self._first_key = 2 + num_lengths
        self._table = KeyTable()
        self._array = np.empty((0, self._first_key + 1), np.int64)
        self._num_rows = 0

    def add(self, units: Sequence[Unit], samples: Sequence[Any]) -> None:
        """Adds samples; they get rows before the next snapshot."""
        for unit, sample in zip(units, samples, strict=True):
            self.keys[unit[0]], self.samples[unit[0]] = unit[3], sample
        self.new += units

    def _add_rows(self, keys: Sequence[RestoreKey], *columns: Any) -> None:
        own, at = self._table.rows(keys), self._first_key
        start, stop, width = self._num_rows, self._num_rows + len(keys), at + own.shape[1]
        if stop > len(self._array) or width > self._array.shape[1]:
            self._make_room(len(keys), width)
            own = self._table.rows(keys)  # the table may be another one
            start, stop = self._num_rows, self._num_rows + len(keys)
        rows = self._array[start:stop]
        rows[:, 0], rows[:, 1], rows[:, 2:at] = columns
        rows[:, at:width] = own
        self._num_rows = stop

    def _make_room(self, num: int, width: int) -> None:
        """Begins a new array, with the rows of what is buffered and room for more."""
        old = self._array[: self._num_rows]
        left = np.fromiter(self.keys, np.int64, len(self.keys))
        old = old[np.isin(old[:, 0], left, assume_unique=True)]
        if len(self._table) > len(old) + _FEWEST:  # entries of keys that were taken pile up
            self._table = KeyTable()
            keys = self._table.rows([self.keys[number] for number in old[:, 0].tolist()])
            old = np.column_stack([old[:, : self._first_key], keys])
        width = max(width, old.shape[1])
        self._array = np.zeros((max(_FEWEST, 2 * (len(old) + num)), width), np.int64)
        self._array[: len(old), : old.shape[1]] = old
        self._num_rows = len(old)

    def taken(self, numbers: Iterable[int]) -> tuple[list[RestoreKey], list[Any]]:
        """Returns keys and samples, and forgets them."""
        numbers = list(numbers)
        return list(map(self.keys.pop, numbers)), list(map(self.samples.pop, numbers))

    def rows(self) -> Int64Array:
        """Returns the rows from the first sample on, of which some may have been taken."""
        if self.new:
            *columns, keys = zip(*self.new, strict=True)
            self.new = []
            self._add_rows(keys, *columns)
        rows = self._array[: self._num_rows]
        return rows[np.searchsorted(rows[:, 0], next(iter(self.keys), MAX_COUNT)) :]

    def rows_of(self, numbers: Sequence[int]) -> Samples:
        """Returns what is known of some of the samples."""
        rows = self.rows()
        rows = rows[np.searchsorted(rows[:, 0], numbers)]
        return Samples(rows[:, 0], rows[:, 1], rows[:, 2 : self._first_key])

    def fields(self, known: dict[str, Any], state: CollectorState) -> SnapshotFields:
        """Returns the fields of a snapshot: what is known, what is buffered, and the collector's.

        It costs the same for any number of samples.
        """
        rows, words = self.rows(), self._table.words()
        return SnapshotFields(known, state, rows, words, self._first_key)


class SnapshotFields(Mapping[str, Any]):
    """The fields of a snapshot; keys and rows are made when somebody looks at them."""

    def __init__(
        self, known: dict[str, Any], state: CollectorState, rows: Int64Array, words: bytes, at: int
    ) -> None:
        self._known = {**known, "counts": state.counts}
        self._state, self._rows, self._words, self._first_key = state, rows, words, at

    def __getitem__(self, name: str) -> Any:
        if name not in ("keys", "rows"):
            return self._known[name]
        own = self._state.rows()
        rows = self._rows[np.searchsorted(self._rows[:, 0], own[:, 0])]
        if name == "keys":
            return tuple(keys_of_rows(self._words, rows[:, self._first_key :]))
        columns = np.column_stack([rows[:, : self._first_key], own[:, 1:]])
        return tuple(map(tuple, columns.tolist()))

    def __iter__(self) -> Iterator[str]:
        yield from (*self._known, "keys", "rows")

    def __len__(self) -> int:
        return len(self._known) + 2
