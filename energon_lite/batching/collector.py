"""Chooses which buffered samples form the next list.

Axes: N samples, R resources, C columns of a collector's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import number_groups
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.state import MAX_COUNT


class Samples(NamedTuple):
    """The numbers by which a collector knows samples.

    Attributes:
        numbers: shape (N,), rising.
        groups: shape (N,); numbers of their groups, which mean nothing but themselves.
        lengths: shape (N, R); of each resource, tokens first.
    """

    numbers: Int64Array
    groups: Int64Array
    lengths: Int64Array


class CollectorState(NamedTuple):
    """The state of a collector.

    Attributes:
        counts: integers, texts and tuples of these, by name. Nothing in them names a sample.
        unsorted: returns shape (N, 1 + C), a row for each buffered sample, in any order: its number
            and what the collector must know besides its group and its lengths, such as the batch it
            belongs to. Samples in `kept` are among them. It can be pickled and, as a snapshot is
            taken with each list and seldom saved, defers what takes long. None for all buffered
            samples, and nothing else to know of them.
    """

    counts: dict[str, Any]
    unsorted: Callable[[], Int64Array] | None = None

    def rows(self, buffered: Sequence[int] | Int64Array = ()) -> Int64Array:
        """Returns the rows by number.

        Args:
            buffered: numbers of all buffered samples, for a collector that has no rows.
        """
        if self.unsorted is None:
            return np.array(buffered, np.int64).reshape(-1, 1)
        rows_NC = self.unsorted()
        return rows_NC[np.argsort(rows_NC[:, 0])]


class Collector(ABC):
    """Decides which buffered samples form the next list.

    A collector knows numbers, groups and lengths; it has no samples. Its caller adds samples until
    `next` returns a list, and forgets the samples of that list.

    Attributes:
        num_columns: C, the columns of its state.
        groups: those that the collector knows also when none of their samples is buffered.
        kept: samples that were in a list and may come in a later one again. The caller keeps their
            restore keys; in a list such a repetition of sample n is written as `~n`.
    """

    num_columns: int = 0
    kept: Collection[int] = ()
    groups: Collection[int] = ()

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """Samples that may be added before the next list can be complete; 0 if one is."""

    @abstractmethod
    def add(self, samples: Samples) -> Sequence[int]:
        """Adds samples; their numbers rise over all calls.

        Args:
            samples: at most `num_wanted`, but for parts of the last one.

        Returns:
            Those of the samples that it does not take, to be counted as dropped: more of a group
            than its share takes.

        Raises:
            ValueError: Samples cannot be batched in this way; the message has the remedy.
        """

    @abstractmethod
    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the samples of the next list, and forgets them.

        Args:
            cycle: number of the batch in its stream.
            has_ended: whether no more samples come.

        Returns:
            Numbers of samples; None to add more, or, when the data have ended, at the end.
        """

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no list when `next` has returned None at the end."""
        return ()

    @abstractmethod
    def state(self) -> CollectorState:
        """Returns what `restore` needs, as copies."""

    @abstractmethod
    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes a fresh collector from a state.

        Args:
            counts: as they were saved.
            samples: those that are buffered. Samples of sources that were removed since are
                missing: lists that have become empty are dropped.
            columns_NC: shape (N, C); as they were saved.

        Raises:
            ValueError, TypeError, KeyError: The state is invalid.
        """


class OneByOne(Collector):
    """A collector to which samples are added one by one; by default any may complete a list."""

    @property
    def num_wanted(self) -> int:
        """One sample."""
        return 1

    @abstractmethod
    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Adds a sample.

        Returns:
            Whether a list may be complete.
        """

    def add(self, samples: Samples) -> Sequence[int]:
        """Adds samples."""
        for number, group, lengths in zip(*map(np.ndarray.tolist, samples), strict=True):
            self.add_one(number, group, lengths)
        return ()


def saved_count(counts: Mapping[str, Any], name: str) -> int:
    """Returns a count of a collector's state.

    Raises:
        ValueError: There is none, or it is no count.
    """
    value = counts.get(name)
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name}={value!r:.80} is no count")
    return value


_MOST_BLOCKS = 16
# In place of the number of a list.
_WAITS, _LEFT_OVER = -1, -2


class WindowCollector(Collector):
    """Reads a window of samples, cuts it into lists, and returns them one by one.

    Columns: the number of a sample's list among those to come, and its place there. In place of
    that number: `_WAITS` for the next window, and whether it waited before; or `_LEFT_OVER`.

    Args:
        window: samples that are read for a window, besides those that wait for it.
    """

    num_columns = 2

    def __init__(self, window: int) -> None:
        self._window = window
        self._num_read = self._num_windows = 0
        self._lists = Lists(np.empty(0, np.int64), np.zeros(1, np.int64))  # of the last window
        self._num_returned = 0  # of its lists
        self._leftover: Int64Array = self._lists.indices
        self._blocks: list[tuple[Samples, BoolArray]] = []  # of the next window

    @abstractmethod
    def _cut(
        self, samples: Samples, waited_N: BoolArray, is_last: bool
    ) -> tuple[Lists, Int64Array]:
        """Cuts a window into lists.

        Args:
            samples: the window, in the order in which it was read.
            waited_N: shape (N,); whether a sample waited for this window.
            is_last: whether no window follows.

        Returns:
            Lists of positions in the window, `~p` for a position that is repeated; and, rising, the
            positions that wait for the next window, or are dropped after the last one.
        """

    @property
    def _has_lists(self) -> bool:
        return self._num_returned < len(self._lists)

    @property
    def num_due(self) -> int:
        """Samples of the next window that must be read before the next list is returned."""
        return 0 if self._has_lists else self._window

    @property
    def num_wanted(self) -> int:
        """Samples that are still to be read before the next list."""
        return max(1, self.num_due - self._num_read)

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the window."""
        self._blocks.append((samples, np.zeros(len(samples.numbers), np.bool_)))
        self._num_read += len(samples.numbers)
        return ()

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next list of the window, once as much as is due was read."""
        if not self._is_due(has_ended):
            return None
        found: list[int] = self._lists[self._num_returned].tolist()
        self._num_returned += 1
        return found

    def next_window(self, has_ended: bool) -> Lists:
        """Returns all lists that are left of a window; none to add more, or at the end."""
        first = self._num_returned if self._is_due(has_ended) else len(self._lists)
        self._num_returned = max(first, len(self._lists))
        return self._lists.reordered(np.arange(first, len(self._lists)))

    def _is_due(self, has_ended: bool) -> bool:
        """Returns whether there is a next list; cuts a window where one is due."""
        while has_ended or self._num_read >= self.num_due:
            if self._has_lists:
                return True
            if not self._blocks:
                return False
            self._begin(is_last=has_ended)
        return False

    def _begin(self, is_last: bool) -> None:
        """Cuts the window that was read into lists."""
        samples, waited = self._joined()
        # Groups are numbered as they come, so that it does not matter who numbered them before.
        groups = np.zeros_like(samples.groups)
        if (samples.groups != samples.groups[:1]).any():  # there may be none at all
            groups = number_groups(samples.groups)
        lists, rest = self._cut(samples._replace(groups=groups), waited, is_last)
        self._lists = lists.renumbered(samples.numbers.__getitem__)
        self._num_returned = 0
        self._num_windows += 1
        self._num_read = 0
        self._blocks = []
        if is_last:
            self._leftover = samples.numbers[rest]
        elif len(rest):
            own = Samples(*(column[rest] for column in samples))
            self._blocks = [(own, np.ones(len(rest), np.bool_))]

    def _joined(self) -> tuple[Samples, BoolArray]:
        """Returns the samples of the next window, and whether they waited before."""
        blocks, waited = zip(*self._blocks, strict=True)
        samples = Samples(*map(np.concatenate, zip(*blocks, strict=True)))
        self._blocks = [(samples, np.concatenate(waited))]
        return self._blocks[0]

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no list at the end of the data."""
        rest: list[int] = self._leftover.tolist()
        self._leftover = self._leftover[:0]
        return rest

    def state(self) -> CollectorState:
        """Returns the samples with their lists and places."""
        counts = {"windows": self._num_windows, "window_read": self._num_read}
        if len(self._blocks) > _MOST_BLOCKS:  # each of which costs time here
            self._joined()
        waiting = [(samples.numbers, waited) for samples, waited in self._blocks]
        offsets = self._lists.offsets[self._num_returned :]
        left = Lists(self._lists.indices[offsets[0] :], offsets - offsets[0])
        return CollectorState(counts, partial(_rows_of_window, left, waiting, self._leftover))

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It lacks a count.
        """
        self._num_windows = saved_count(counts, "windows")
        self._num_read = saved_count(counts, "window_read")
        lists_N, places_N = columns_NC.T
        is_waiting = lists_N == _WAITS
        if is_waiting.any():
            own = Samples(*(column[is_waiting] for column in samples))
            self._blocks = [(own, places_N[is_waiting] > 0)]
        self._leftover = samples.numbers[lists_N == _LEFT_OVER]
        order = np.lexsort((places_N, lists_N))
        order = order[lists_N[order] >= 0]
        ends = np.flatnonzero(np.diff(lists_N[order], append=-1)) + 1
        self._lists = Lists(samples.numbers[order], np.append(0, ends))


def _rows_of_window(
    lists: Lists, waiting: list[tuple[Int64Array, BoolArray]], leftover: Int64Array
) -> Int64Array:
    """Returns samples with their lists and places, and those of no list."""
    sizes = np.diff(lists.offsets)
    places = np.arange(len(lists.indices)) - np.repeat(lists.offsets[:-1], sizes)
    rows = [np.column_stack([lists.indices, np.repeat(np.arange(len(sizes)), sizes), places])]
    for numbers, waited in waiting:
        rows.append(np.column_stack([numbers, np.full(len(waited), _WAITS), waited]))
    left = np.full(len(leftover), _LEFT_OVER)
    return np.concatenate([*rows, np.column_stack([leftover, left, left])])
