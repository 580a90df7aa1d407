"""Batches of samples of similar lengths, cut from sorted windows.

Axes: N samples, B batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, Samples, WindowCollector, saved_count
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Buckets, aligned
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.seeds import random_words


@dataclass(frozen=True, eq=False)
class WindowCut:
    """A window cut into batches.

    Attributes:
        batches: B batches of positions in the window. Each is full, but the last of a group if
            nothing was to be carried over.
        carried: positions of samples that make no full batch; fewer than one batch of each group.
    """

    batches: Lists
    carried: Int64Array


def cut_window(
    lengths_N: Int64Array,
    limits_N: Int64Array,
    groups_N: Int64Array,
    *,
    longest_first: bool = True,
    is_last: bool = False,
) -> WindowCut:
    """Sorts a window by group and length, and cuts it into batches as large as limits allow.

    A batch is of one group, and has at most as many samples as the limit of its longest one.
    Samples that are carried over are the shortest of their group, or the longest if the longest do
    not come first: let windows alternate, and what one window carries over is the first
    that the next one cuts, so that nothing waits for long.

    O(N log N) time.

    Args:
        lengths_N: shape (N,); what to sort by. Of equal ones, those before stay before.
        limits_N: shape (N,); samples in a batch of which this is the longest, at least 1. With the
            longest last and a limit that grows with length, some batches are smaller than they
            could be.
        groups_N: shape (N,); number of each sample's group.
        longest_first: whether to begin with the long ones; groups then come in falling order, too.
        is_last: whether to make smaller batches of what would be carried over.

    Example:
        >>> lengths = np.array([5, 2, 4, 3])
        >>> cut = cut_window(lengths, 10 // lengths, np.zeros_like(lengths))
        >>> cut.batches.tolist(), cut.carried.tolist()
        ([[0, 2]], [3, 1])
    """
    sign = -1 if longest_first else 1
    order_N = np.lexsort((sign * lengths_N, sign * groups_N))
    edges = [0, *(np.flatnonzero(np.diff(groups_N[order_N])) + 1).tolist(), len(order_N)]
    limits_N = limits_N[order_N]
    cut = _cut_falling if longest_first else _cut_rising
    ends, is_carried = [0], np.zeros(len(order_N), bool)
    for start, stop in pairwise(edges):
        found, num_cut = cut(limits_N[start:stop])
        if is_last and num_cut < stop - start:
            found.append(stop - start)
        elif num_cut < stop - start:
            is_carried[start + num_cut : stop] = True
        # What is carried over takes no room in the batches.
        shift = ends[-1]
        ends += [shift + end for end in found]
    batches = Lists(order_N[~is_carried], np.array(ends, np.int64))
    return WindowCut(batches, order_N[is_carried])


def _cut_falling(limits_N: Int64Array) -> tuple[list[int], int]:
    """Cuts from long to short; returns the ends of the full batches, and the last of them."""
    ends, start, num = [], 0, len(limits_N)
    while start < num and (end := start + int(limits_N[start])) <= num:
        ends.append(end)
        start = end
    return ends, start


def _cut_rising(limits_N: Int64Array) -> tuple[list[int], int]:
    """The same from short to long."""
    num = len(limits_N)
    # A batch from s can hold the sample at j if j + 1 - s <= limit[j]. So it ends at the first j
    # for which j + 1 - limit[j] is above s; before s there is none, since limits are at least 1.
    starts_N = np.maximum.accumulate(np.arange(1, num + 1) - limits_N)
    ends, start = [], 0
    while start < num:
        end = int(np.searchsorted(starts_N, start, side="right"))
        if end == num and end - start < limits_N[-1]:
            break  # one more sample would have had room
        ends.append(end)
        start = end
    return ends, start


class BucketCollector(WindowCollector):
    """Sorts windows by group and length, and cuts them into batches as large as the rules allow.

    Batches of a window come in random order. While they are returned, the next window is read at
    the same pace. Samples that make no full batch wait for the next window.

    Args:
        buckets: how large batches are, and the samples of a window.
        batch_size: samples of a batch at most; needed if `buckets` does not say more.
        drops_last: whether samples that make no full batch at the end of the data are dropped.
        key: of the random words; the same in all streams.
    """

    def __init__(
        self, buckets: Buckets, batch_size: int | None, drops_last: bool, key: int
    ) -> None:
        super().__init__(buckets.window)
        self._buckets = buckets
        self._batch_size = batch_size
        self._drops_last = drops_last
        self._key = key
        self._num_cut = 0  # samples of the last window's batches

    @property
    def num_due(self) -> int:
        """Samples of the next window that must be read before the next batch is returned."""
        if not self._has_lists:
            return self._window
        ends = self._lists.offsets[self._num_returned :]
        return self._window * (self._num_cut - int(ends[-1] - ends[1])) // self._num_cut

    def _cut(
        self, samples: Samples, waited_N: BoolArray, is_last: bool
    ) -> tuple[Lists, Int64Array]:
        lengths = samples.lengths[:, 0]
        cut = cut_window(
            lengths,
            np.maximum(self._buckets.list_sizes(lengths, self._batch_size), 1),
            samples.groups,
            longest_first=self._num_windows % 2 == 0,
            is_last=is_last and not self._drops_last,
        )
        self._num_cut = len(cut.batches.indices)
        order = self._order(cut.batches, lengths)
        return cut.batches.reordered(order), np.sort(cut.carried)

    def _order(self, batches: Lists, lengths: Int64Array) -> Int64Array:
        """Returns a random order of batches; the largest one may come first of all."""
        words = random_words(self._key, self._num_windows, size=len(batches))
        order = np.argsort(words, kind="stable")
        if self._buckets.longest_first and self._num_windows == 0 and len(batches):
            longest = np.maximum.reduceat(lengths[batches.indices], batches.offsets[:-1])
            areas = aligned(longest, self._buckets.align) * np.diff(batches.offsets)
            first = int(np.lexsort((longest, areas))[-1])
            order = np.append(first, order[order != first])
        return order

    def state(self) -> CollectorState:
        """Returns the samples with their batches and places."""
        state = super().state()
        return state._replace(counts={**state.counts, "cut": self._num_cut})

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It lacks a count, or has more samples in batches than were cut.
        """
        super().restore(counts, samples, columns_NC)
        self._num_cut, num_left = saved_count(counts, "cut"), len(self._lists.indices)
        if num_left > self._num_cut:
            raise ValueError(f"{num_left} samples are in batches, of {self._num_cut}")
