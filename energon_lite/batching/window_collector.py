"""Lists that are cut from windows of samples; what makes no good list waits for the next window."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import Collector, CollectorState, Samples, saved_count
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import BoolArray, Int64Array

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
        self._ready: list[list[int]] = []  # the same
        self._leftover: Int64Array = self._lists.indices
        self._blocks: list[tuple[Samples, BoolArray]] = []  # of the next window

    @abstractmethod
    def _cut(
        self, samples: Samples, waited_N: BoolArray, is_last: bool
    ) -> tuple[list[Int64Array], Int64Array]:
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
        return self._num_returned < len(self._ready)

    @property
    def num_due(self) -> int:
        """Samples of the next window that must be read before the next list is returned."""
        return 0 if self._has_lists else self._window

    @property
    def num_wanted(self) -> int:
        """Samples that are still to be read before the next list."""
        return max(1, self.num_due - self._num_read)

    @property
    def is_between_windows(self) -> bool:
        """Whether no list is left and nothing of the next window was read."""
        return not self._has_lists and not self._num_read

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the window."""
        self._blocks.append((samples, np.zeros(len(samples.numbers), np.bool_)))
        self._num_read += len(samples.numbers)
        return ()

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next list of the window, once as much as is due was read."""
        while has_ended or self._num_read >= self.num_due:
            if self._has_lists:
                self._num_returned += 1
                return self._ready[self._num_returned - 1]
            if not self._blocks:
                return None
            self._begin(is_last=has_ended)
        return None

    def _begin(self, is_last: bool) -> None:
        """Cuts the window that was read into lists."""
        samples, waited = self._joined()
        # Groups are numbered as they come, so that it does not matter who numbered them before.
        _, firsts, of_N = np.unique(samples.groups, return_index=True, return_inverse=True)
        groups = np.argsort(np.argsort(firsts))[of_N]
        lists, rest = self._cut(samples._replace(groups=groups), waited, is_last)
        places = np.concatenate([rest[:0], *lists])
        numbers = samples.numbers[np.where(places < 0, ~places, places)]
        numbers = np.where(places < 0, ~numbers, numbers)
        offsets = np.cumsum([0, *map(len, lists)])
        self._lists, self._num_returned = Lists(numbers, offsets), 0
        self._ready = self._lists.tolist()
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
        offsets = self._lists.offsets[self._num_returned :]
        sizes = np.diff(offsets)
        numbers = self._lists.indices[offsets[0] :]
        places = np.arange(len(numbers)) - np.repeat(offsets[:-1] - offsets[0], sizes)
        rows = [np.column_stack([numbers, np.repeat(np.arange(len(sizes)), sizes), places])]
        if self._blocks:
            samples, waited = self._joined()
            rows.append(np.column_stack([samples.numbers, np.full(len(waited), _WAITS), waited]))
        left = np.full(len(self._leftover), _LEFT_OVER)
        rows.append(np.column_stack([self._leftover, left, left]))
        rows_N3 = np.concatenate(rows)
        counts = {"windows": self._num_windows, "window_read": self._num_read}
        return CollectorState(counts, rows_N3[:, 0], rows_N3[:, 1:])

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
        self._ready = self._lists.tolist()
