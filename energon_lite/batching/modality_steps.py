"""Steps of one group and of similar lengths, for all streams or ranks together.

Axes: N samples, K groups, S steps, G samples of a step.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from energon_lite.batching.collector import Samples, WindowCollector
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import ModalitySplit
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.seeds import random_words


def step_groups(
    order_N: Int64Array,
    lengths: Int64Array,
    groups: Int64Array,
    *,
    step_size: int,
    window: int,
    end: Literal["pad", "drop"],
    least_windows: int = 4,
) -> Int64Array:
    """Cuts each group into windows of steps, and each window, sorted by length, into steps.

    Windows are of one group, so that a small group has windows as large as any; what fills no step
    goes from each to the next. Samples are sorted twice, in windows half a window apart: the second
    ones have the short halves of two windows, or the long ones of two, by turns. Each is as large
    as the first ones, but of half the range of lengths, so that half as much is padded.

    O(N log N) time.

    Args:
        order_N: shape (N,); sample indices in the order in which they are read.
        lengths: of all samples, by index.
        groups: of all samples, by index; numbers from 0.
        step_size: samples of a step, G.
        window: steps of a window, at most.
        least_windows: of each group, if it has as many steps. Of a whole epoch there should be
            some: in one window of all of a group its samples would meet the same others each time.
        end: of the samples of each group that fill no step, "drop" drops those that are read
            last; to "pad" repeats those that are read first, in turn if there are too few.

    Returns:
        Shape (S, G); sample indices, group after group, in each step the longest first.
    """
    by_group_N = order_N[np.argsort(groups[order_N], kind="stable")]
    counts_K = np.bincount(groups)
    steps_K = counts_K // step_size if end == "drop" else -(-counts_K // step_size)
    # Steps, and for each the number of its group and its place in there.
    groups_S = np.repeat(np.arange(len(counts_K)), steps_K)
    places_S = np.arange(len(groups_S)) - np.repeat(np.cumsum(steps_K) - steps_K, steps_K)
    places_SG = places_S[:, None] * step_size + np.arange(step_size)
    places_SG %= counts_K[groups_S, None]  # beyond the last one, the first ones again
    firsts_K = np.cumsum(counts_K) - counts_K
    indices = by_group_N[places_SG + firsts_K[groups_S, None]].ravel()

    windows_S, halves_S = _windows_of_steps(steps_K, window, groups_S, places_S, least_windows)
    windows = np.repeat(windows_S, step_size)
    signs = 1 - windows % 2 * 2  # from short to long and back
    first = np.lexsort((signs * lengths[indices], windows))
    second = np.lexsort((-lengths[indices[first]], np.repeat((halves_S + 1) // 2, step_size)))
    return indices[first[second]].reshape(len(groups_S), step_size)


def _windows_of_steps(
    steps_K: Int64Array,
    window: int,
    groups_S: Int64Array,
    places_S: Int64Array,
    least_windows: int = 4,
) -> tuple[Int64Array, Int64Array]:
    """Returns window and half window of each step, shape (S,), counted over all groups.

    A group's windows differ by one step at most, and its last half stays alone.
    """
    counts_K = np.maximum(-(-steps_K // window), np.minimum(steps_K, least_windows))
    # A window number is skipped after each group, so that halves of two groups never meet.
    firsts_K = np.cumsum(counts_K + 1) - counts_K
    steps_S, counts_S = steps_K[groups_S], counts_K[groups_S]
    windows_S = places_S * counts_S // np.maximum(steps_S, 1)
    starts_S = -(-windows_S * steps_S // np.maximum(counts_S, 1))
    ends_S = -(-(windows_S + 1) * steps_S // np.maximum(counts_S, 1))
    is_second_S = 2 * (places_S - starts_S) >= ends_S - starts_S
    windows_S = windows_S + firsts_K[groups_S]
    return windows_S, 2 * windows_S + is_second_S


class ModalitySteps(WindowCollector):
    """Sorts each group of a window by length, cuts it into steps, and shuffles the steps.

    A step has a batch of each stream; its samples are dealt to the streams in turn, so that all
    streams have batches of one group and of similar lengths. What fills no step waits for the next
    window.

    Args:
        split: windows of a group, and what becomes of the rest at the end of the data.
        batch_size: samples of a batch.
        window: samples of all streams that are planned together.
        index: number of the stream.
        num_streams: number of streams.
        key: for the order of steps; the same in all streams.

    Attributes:
        num_lists: shape (S,); batches that each stream has had so far.
    """

    def __init__(
        self,
        split: ModalitySplit,
        batch_size: int,
        window: int,
        index: int,
        num_streams: int,
        key: int,
    ) -> None:
        super().__init__(window)
        self.num_lists = np.zeros(num_streams, np.int64)
        self._split = split
        self._index = index
        self._num_streams = num_streams
        self._step_size = batch_size * num_streams
        self._key = key

    def _cut(
        self, samples: Samples, waited_N: BoolArray, is_last: bool
    ) -> tuple[Lists, Int64Array]:
        tokens, groups = samples.lengths[:, 0], samples.groups
        # The last of each group fill no step; in the next window they are the first.
        found = step_groups(
            np.arange(len(tokens)), tokens, groups,
            step_size=self._step_size, window=self._split.window, end="drop", least_windows=1,
        )  # fmt: skip
        steps = list(found[self._order(tokens[found[:, 0]])])
        rest = np.setdiff1d(np.arange(len(tokens)), found)
        if is_last and self._split.end != "drop":
            for group in np.unique(groups[rest]).tolist():
                step = rest[groups[rest] == group]
                if self._split.end == "pad":  # with the group's samples in turn, from the first on
                    own = np.flatnonzero(groups == group)
                    step = np.append(step, ~np.resize(own, self._step_size - len(step)))
                places = np.where(step < 0, ~step, step)
                steps.append(step[np.argsort(-tokens[places], kind="stable")])
            rest = rest[:0]
        sizes = np.array([len(step) for step in steps], dtype=np.int64)
        self.num_lists += (sizes[:, None] > np.arange(self._num_streams)).sum(axis=0)
        # Since steps are sorted, all streams get samples of similar lengths.
        lists = [step[self._index :: self._num_streams] for step in steps]
        return Lists.of([own for own in lists if len(own)]), rest

    def _order(self, longest: Int64Array) -> Int64Array:
        """Returns an order of steps: random, or for the first window from long to short."""
        if self._split.longest_first and not self._num_windows:
            return np.argsort(-longest, kind="stable")
        words = random_words(self._key, self._num_windows, size=len(longest))
        return np.argsort(words, kind="stable")
