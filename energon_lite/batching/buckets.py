"""Batches of samples of one group and of similar lengths, cut from sorted windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, Samples, saved_count
from energon_lite.batching.length_windows import aligned, cut_window
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Buckets
from energon_lite.batching.window_collector import WindowCollector
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.seeds import random_words


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
    ) -> tuple[list[Int64Array], Int64Array]:
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
        return list(cut.batches.reordered(order)), np.sort(cut.carried)

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
        counts, numbers, columns = super().state()
        return CollectorState({**counts, "cut": self._num_cut}, numbers, columns)

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It lacks a count, or has more samples in batches than were cut.
        """
        super().restore(counts, samples, columns_NC)
        self._num_cut, num_left = saved_count(counts, "cut"), len(self._lists.indices)
        if num_left > self._num_cut:
            raise ValueError(f"{num_left} samples are in batches, of {self._num_cut}")
