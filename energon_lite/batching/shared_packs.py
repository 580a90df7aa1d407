"""Packs of windows of the samples of all streams, of similar cost at each step.

Axes: P packs, T steps, S streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from energon_lite.batching.balance_orders import NO_PACK, balanced_steps, quantile_sync
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Packing
from energon_lite.batching.window_packs import WindowPacks
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of, random_words


class SharedPacks(WindowPacks):
    """Packs a window of the samples of all streams, and returns the packs of one stream.

    At each step all streams have packs of similar cost (`global_window`) and of one group. Where
    streams are too many to plan for all, parts of them plan windows of `balance_window` whole steps
    each, which come in an order that is the same in all parts (`quantile_sync`).

    Args:
        packing: as in `WindowPacks`, and balance window and cost.
        window: samples of all streams that are packed together.
        index: number of the stream; None for the packs of all streams, step by step, of the steps
            that all of them have.
        num_streams: number of streams.
        key: for the order of steps; the same in all streams.
        packs_per_batch: packs that follow each other and are to be of one group.
        is_part: whether other streams, which are not counted here, make the same steps.

    Attributes:
        num_lists: shape (S,); packs that each stream has had so far.
    """

    def __init__(
        self,
        packing: Packing,
        window: int,
        index: int | None,
        num_streams: int,
        key: int,
        packs_per_batch: int = 1,
        is_part: bool = False,
    ) -> None:
        super().__init__(packing, window)
        self._is_part = is_part
        self.num_lists = np.zeros(num_streams, np.int64)
        self.index = index
        self._num_streams = num_streams
        self._key = key
        self._packs_per_batch = packs_per_batch

    def _multiple(self, is_last: bool) -> int:
        is_synced = self._is_part and not is_last
        per_stream = self._packing.balance_window if is_synced else self._packs_per_batch
        return self._num_streams * per_stream

    def _ordered(self, packs: Lists, groups: Int64Array, lengths: Int64Array) -> Lists:
        costs = self._packing.cost.costs(packs, lengths)
        steps = self._steps(costs, groups)
        if self._is_part:
            steps = self._in_sync(steps, costs)
        self.num_lists += (steps != NO_PACK).sum(axis=0)
        if self.index is None:
            return packs.reordered(steps[(steps != NO_PACK).all(axis=1)].ravel())
        own = steps[:, self.index]
        return packs.reordered(own[own != NO_PACK])

    def _steps(self, costs: Any, groups: Int64Array) -> Int64Array:
        """Returns the pack that each stream has at each step, or none; shape (T, S)."""
        steps = [np.empty((0, self._num_streams), dtype=np.int64)]
        batches = [steps[0][:, 0]]
        for group in np.unique(groups).tolist():
            packs = np.flatnonzero(groups == group)
            plan = balanced_steps(
                costs[packs], self._num_streams, self._packing.balance_window,
                key_of(self._key, group), self._num_windows,
            )  # fmt: skip
            steps.append(np.append(packs, NO_PACK)[plan])  # -1 takes the last
            batches.append(np.arange(len(plan)) // self._packs_per_batch)
        all_steps = np.concatenate(steps)
        return all_steps[self._mixed(all_steps, batches)] if len(steps) > 2 else all_steps

    def _in_sync(self, steps: Int64Array, costs: Any) -> Int64Array:
        """Returns steps in the order of cost that all parts have; counts windows of steps."""
        window, blocks = self._packing.balance_window, [steps[:0]]
        last = len(steps) - (NO_PACK in steps[-1:])  # what some streams lack comes last
        for first in range(0, last, window):
            own = steps[first : min(first + window, last)]
            number = self._num_windows + len(blocks) - 1
            blocks.append(own[quantile_sync(costs[own].sum(axis=1), window, self._key, number)])
        self._num_windows += len(blocks) - 2  # its caller counts one, even if it has no step
        return np.concatenate([*blocks, steps[last:]])

    def _mixed(self, steps: Int64Array, batches: list[Int64Array]) -> Int64Array:
        """Returns an order of the steps of several groups, in which those of a batch stay together.

        Args:
            steps: shape (T, S); group after group.
            batches: of each group, the batch of each step.
        """
        firsts = np.cumsum([0, *(int(own.max(initial=-1)) + 1 for own in batches)])
        of_steps = np.concatenate(
            [own + first for own, first in zip(batches, firsts, strict=False)]
        )
        words = random_words(self._key, self._num_windows, size=int(firsts[-1]))
        # Batches that are not full, or that some streams lack, come last: else those streams would
        # be ahead of the others.
        is_short = np.bincount(of_steps, minlength=len(words)) < self._packs_per_batch
        is_short |= np.bincount(of_steps, (steps == NO_PACK).any(axis=1), len(words)) > 0
        order: Int64Array = np.lexsort((words[of_steps], is_short[of_steps]))
        return order
