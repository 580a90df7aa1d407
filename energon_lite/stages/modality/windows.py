"""The windows of one group in one stream: sorted by length, cut into lists, given in an order."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_lite.batching.key_rows import KEY_COLUMNS, IntArray, KeyRows, KeyTable, compact
from energon_lite.batching.quantile_sync import quantile_sync
from energon_lite.core.arrays import Int64Array
from energon_lite.core.state import RestoreKey
from energon_lite.core.user_function import SKIPPED

# The first window has as many lists, so that the first one does not wait for many; each further one
# has twice as many. After so many windows all are of their full size.
_FIRST_WINDOW, _NUM_SHORT = 8, 62
# Columns of a row: those of the key, and the tokens.
_COLUMNS = KEY_COLUMNS + 1


class Held(NamedTuple):
    """A sample that waits: its key, itself, `SKIPPED` after a resume, and its tokens."""

    key: RestoreKey
    sample: Any
    length: int


class GroupWindows:
    """What one stream holds of one group.

    Args:
        batch_size: samples of a list.
        longest_first: whether the first window is given from long to short.
        window: lists of a window, when all have been read ahead.
        key: the same in all streams.
    """

    def __init__(self, batch_size: int, longest_first: bool, window: int, key: int) -> None:
        self._batch_size = batch_size
        self._longest_first = longest_first
        self._window = window
        self._key = key
        self.number = 0  # windows begun
        self.batches: list[list[Held]] = []  # what is left of the last one, the next to give last
        self.waiting: list[Held] = []
        self.num_seen = self.num_surplus = 0  # samples read, and those of them left out
        self.given: list[Held] = []  # the last list, where others may have to be filled up
        # The same as `batches`, in the order of giving, and `waiting`, as rows for snapshots.
        self._table = KeyTable()
        self._rows_NK = np.empty((0, _COLUMNS), dtype=np.int64)
        self._ahead = array("q")

    @property
    def num_held(self) -> int:
        """Samples that are not given yet."""
        return len(self.waiting) + sum(map(len, self.batches))

    @property
    def has_come(self) -> bool:
        """Whether there was ever a sample of the group."""
        return bool(self.number or self.waiting)

    def size(self, number: int) -> int:
        """Returns the lists of a window, by its number."""
        if self._longest_first or number > _NUM_SHORT:
            return self._window
        return min(self._window, _FIRST_WINDOW << number)

    @property
    def num_wanted(self) -> int:
        """How many samples are to wait before the next list is given.

        Example:
            A window of 4 lists of 10 follows one of 2. When the second of the 2 is given 20 wait;
            the others are read when the window of 4 begins.
        """
        size = self.size(self.number)
        if not self.batches:
            return size * self._batch_size
        last = self.size(self.number - 1)
        num_given = last - len(self.batches)
        return -(-num_given * size // last) * self._batch_size

    def begin_window(self) -> None:
        """Sorts the next window by length, as far as it makes whole lists, and cuts it."""
        size, step = self.size(self.number), self._batch_size
        num_lists = min(size, len(self.waiting) // step)
        if not num_lists:
            return
        # Those that came first; what does not fill a list stays for the next window.
        num = num_lists * step
        rows_NK = np.array(self._ahead[: num * _COLUMNS]).reshape(num, _COLUMNS)
        places = quantile_sync(np.arange(num_lists), size, self._key, self.number)
        if self._longest_first and not self.number:
            places = np.arange(num_lists)[::-1]
        order = np.argsort(rows_NK[:, KEY_COLUMNS], kind="stable").reshape(num_lists, step)[places]
        self._rows_NK = rows_NK[order.ravel()]
        self.batches = [[self.waiting[i] for i in batch] for batch in order[::-1].tolist()]
        del self.waiting[:num], self._ahead[: num * _COLUMNS]
        self.number += 1

    def add(self, held: Held) -> None:
        """Takes a sample, for one of the next windows."""
        self.waiting.append(held)
        self._ahead.extend((*self._table.row(held.key), held.length))

    def take(self) -> list[Held]:
        """Takes the next list of the window."""
        batch = self.batches.pop()
        self._table.release(self._rows_NK[: len(batch), :KEY_COLUMNS])
        self._rows_NK = self._rows_NK[len(batch) :]
        return batch

    def take_waiting(self) -> list[Held]:
        """Takes what is in no window."""
        rest, self.waiting = self.waiting, []
        self._table.release(self._waiting_rows()[:, :KEY_COLUMNS])
        self._ahead = array("q")
        return rest

    def _waiting_rows(self) -> Int64Array:
        return np.array(self._ahead, dtype=np.int64).reshape(-1, _COLUMNS)

    def state(self) -> GroupState:
        """Returns what is held, as a cheap value."""
        return GroupState(
            (self.number, self.num_seen, self.num_surplus),
            self._table.frozen(),
            compact(self._waiting_rows()),
            compact(self._rows_NK),
            self._batch_size,
            tuple([held.key for held in self.given]),
        )

    def restore(self, counts: Any, keys: Any, rows: npt.ArrayLike, given: Any) -> None:
        """Goes on from a state.

        Raises:
            TypeError: It is damaged.
            ValueError: The same.
        """
        number, num_seen, num_surplus = map(operator.index, counts)
        if not 0 <= num_surplus <= num_seen or number < 0:
            raise ValueError(f"{counts!r:.80} are no counts of windows, samples and surplus")
        rows_N2 = np.array(rows, dtype=np.int64).reshape(len(keys), 2)
        held = [
            Held(_checked(key), SKIPPED, length)
            for key, length in zip(keys, rows_N2[:, 0].tolist(), strict=True)
        ]
        turns = rows_N2[:, 1].tolist()
        batches: dict[int, list[Held]] = {}
        for entry, turn in zip(held, turns, strict=True):
            batches.setdefault(turn, []).append(entry)
        waiting = batches.pop(-1, [])
        limit = self.size(number - 1) if number else 0
        if len(batches) > limit or any(len(b) > self._batch_size for b in batches.values()):
            raise ValueError(f"window {number} holds {len(held)} samples in {len(batches)} lists")
        self.number, self.num_seen, self.num_surplus = number, num_seen, num_surplus
        found = [batches[turn] for turn in sorted(batches, reverse=True)]
        self.batches = [batch for batch in found if len(batch) == self._batch_size]
        self._table = KeyTable()
        rows = [
            (*self._table.row(entry.key), entry.length)
            for entry in itertools.chain.from_iterable(reversed(self.batches))
        ]
        self._rows_NK = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)
        # Of a source that was taken out of the run, lists may lack samples: they are made anew.
        short = [batch for batch in found if len(batch) < self._batch_size]
        self.waiting, self._ahead = [], array("q")
        for entry in itertools.chain(*short, waiting):
            self.add(entry)
        self.given = [Held(_checked(key), SKIPPED, 0) for key in given]


@dataclass(frozen=True)
class GroupState:
    """What one stream holds of one group, made of arrays.

    Attributes:
        counts: windows begun, samples read, and of these left out as surplus.
        table: what the rows mean.
        waiting: rows of samples in no window yet, shape (N, 6).
        batches: rows of those in the lists to come, in their order, shape (M, 6).
        batch_size: samples of a list.
        given: keys of the last list, where others may have to be filled up.
    """

    counts: tuple[int, int, int]
    table: KeyRows
    waiting: IntArray
    batches: IntArray
    batch_size: int
    given: tuple[RestoreKey, ...]

    def fields(self) -> tuple[Any, ...]:
        """Returns the counts, keys held, a row (tokens, turn or -1) for each, and keys given."""
        rows = np.concatenate([self.waiting, self.batches])
        keys = self.table.keys(rows[:, :KEY_COLUMNS])
        turns = np.full(len(rows), -1)
        turns[len(self.waiting) :] = np.arange(len(self.batches)) // self.batch_size
        columns = np.column_stack([rows[:, KEY_COLUMNS], turns])
        return self.counts, tuple(keys), columns, self.given


@dataclass(frozen=True)
class SplitFields(Mapping[str, Any]):
    """The fields of a snapshot of all groups; restore keys are made when somebody looks at them.

    A snapshot travels with each batch: as tuples, 1,500 keys took 0.5 ms on their way.

    Attributes:
        counts: fields that are numbers.
        groups: of each group what is held.
    """

    counts: dict[str, int]
    groups: tuple[GroupState, ...]

    def __getitem__(self, name: str) -> Any:
        """Returns one field."""
        if name == "groups":
            return tuple([group.fields() for group in self.groups])
        return self.counts[name]

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the fields."""
        yield from (*self.counts, "groups")

    def __len__(self) -> int:
        """Counts the fields."""
        return len(self.counts) + 1


def _checked(key: Any) -> RestoreKey:
    if not isinstance(key, tuple) or not key:
        raise ValueError(f"{key!r:.80} is no restore key")
    return key
