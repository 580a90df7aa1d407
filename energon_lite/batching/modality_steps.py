"""Batches of one group and of similar lengths, cut from windows that all streams share."""

from __future__ import annotations

import numpy as np

from energon_lite.batching.collector import Samples
from energon_lite.batching.length_windows import sort_places
from energon_lite.batching.rules import ModalitySplit
from energon_lite.batching.steps import deal, step_groups
from energon_lite.batching.window_collector import WindowCollector
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.seeds import random_words


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
    ) -> tuple[list[Int64Array], Int64Array]:
        tokens = samples.lengths[:, 0]
        _, groups = np.unique(samples.groups, return_inverse=True)
        # The last of each group fill no step; in the next window they are the first.
        found = step_groups(
            np.arange(len(tokens)), tokens, groups,
            step_size=self._step_size, window=self._split.window, end="drop", least_windows=1,
        )  # fmt: skip
        steps = list(found.indices[self._order(tokens[found.indices[:, 0]])])
        is_left = np.ones(len(tokens), dtype=bool)
        is_left[found.indices] = False
        rest = np.flatnonzero(is_left)
        if is_last and self._split.end != "drop":
            for group in np.unique(groups[rest]).tolist():
                step = rest[groups[rest] == group]
                if self._split.end == "pad":  # with the group's samples in turn, from the first on
                    own = np.flatnonzero(groups == group)
                    step = np.append(step, ~np.resize(own, self._step_size - len(step)))
                places = np.where(step < 0, ~step, step)
                steps.append(step[sort_places(-tokens[places])])
            rest = rest[:0]
        sizes = np.array([len(step) for step in steps], dtype=np.int64)
        self.num_lists += (sizes[:, None] > np.arange(self._num_streams)).sum(axis=0)
        lists = [deal(step, self._index, self._num_streams) for step in steps]
        return [own for own in lists if len(own)], rest

    def _order(self, longest: Int64Array) -> Int64Array:
        """Returns an order of steps: random, or for the first window from long to short."""
        if self._split.longest_first and not self._num_windows:
            return np.argsort(-longest, kind="stable")
        words = random_words(self._key, self._num_windows, size=len(longest))
        return np.argsort(words, kind="stable")
