"""Lists that are cut from windows of samples; what makes no good list waits for the next window."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import Collector, CollectorState, Samples, saved_count
from energon_lite.core.arrays import BoolArray, Int64Array


class WindowCollector(Collector):
    """Reads a window of samples, cuts it into lists, and returns them one by one.

    Columns: the number of a sample's list among those to come, and its place there; for samples
    that wait for the next window -1, and whether they waited before; for those left over -2.

    Args:
        window: samples that are read for a window, besides those that wait for it.
    """

    num_columns = 2

    def __init__(self, window: int) -> None:
        self._window = window
        self._num_read = self._num_windows = 0
        self._lists: deque[list[int]] = deque()
        self._leftover: list[int] = []
        self._blocks: list[tuple[Samples, BoolArray]] = []

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
    def num_wanted(self) -> int:
        """Samples that the window still lacks."""
        return max(1, self._window - self._num_read)

    @property
    def is_between_windows(self) -> bool:
        """Whether no list is left and nothing of the next window was read."""
        return not self._lists and not self._num_read

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the window."""
        self._blocks.append((samples, np.zeros(len(samples.numbers), np.bool_)))
        self._num_read += len(samples.numbers)
        return ()

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next list of the window, once all of the window was read."""
        if not self._lists and self._blocks and (self._num_read >= self._window or has_ended):
            samples, waited = self._joined()
            lists, rest = self._cut(samples, waited, has_ended)
            self._num_windows += 1
            self._num_read = 0
            for places in lists:
                numbers = samples.numbers[np.where(places < 0, ~places, places)]
                self._lists.append(np.where(places < 0, ~numbers, numbers).tolist())
            if has_ended:
                self._leftover = samples.numbers[rest].tolist()
            self._blocks = []
            if len(rest) and not has_ended:
                own = Samples(*(column[rest] for column in samples))
                self._blocks.append((own, np.ones(len(rest), np.bool_)))
        return self._lists.popleft() if self._lists else None

    def _joined(self) -> tuple[Samples, BoolArray]:
        blocks, waited = zip(*self._blocks, strict=True)
        samples = Samples(*map(np.concatenate, zip(*blocks, strict=True)))
        return samples, np.concatenate(waited)

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no list at the end of the data."""
        rest, self._leftover = self._leftover, []
        return rest

    def state(self) -> CollectorState:
        """Returns the samples with their lists and places."""
        rows = [(n, i, place) for i, own in enumerate(self._lists) for place, n in enumerate(own)]
        rows_N3: list[Int64Array] = [np.array(rows, np.int64).reshape(-1, 3)]
        for samples, waited in self._blocks:
            lists = np.full(len(waited), -1)
            rows_N3.append(np.column_stack([samples.numbers, lists, waited]))
        rows_N3.append(np.array([(n, -2, 0) for n in self._leftover], np.int64).reshape(-1, 3))
        numbers, *columns = np.concatenate(rows_N3).T
        counts = {"windows": self._num_windows, "window_read": self._num_read}
        return CollectorState(counts, numbers, np.column_stack(columns))

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It lacks a count.
        """
        self._num_windows = saved_count(counts, "windows")
        self._num_read = saved_count(counts, "window_read")
        is_waiting = columns_NC[:, 0] == -1
        self._leftover = samples.numbers[columns_NC[:, 0] == -2].tolist()
        if is_waiting.any():
            own = Samples(*(column[is_waiting] for column in samples))
            self._blocks = [(own, columns_NC[is_waiting, 1] > 0)]
        lists: dict[int, list[int]] = {}
        for i in np.lexsort(columns_NC.T[::-1]).tolist():
            if columns_NC[i, 0] >= 0:
                lists.setdefault(int(columns_NC[i, 0]), []).append(int(samples.numbers[i]))
        self._lists = deque(lists.values())
