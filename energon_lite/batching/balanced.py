"""Packs in an order in which all streams have packs of similar cost at the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, OneByOne, Samples, saved_count
from energon_lite.batching.quantile_sync import quantile_sync
from energon_lite.core.arrays import Int64Array


class BalancedOrder(OneByOne):
    """Returns packs one by one, in the order that `quantile_sync` has for each window of them.

    Length: the cost of a pack, as the 64 bits of a float. Column: the pack's place among those
    that come next, or -1 if it belongs to the next window.

    Args:
        window: packs of a window.
        seed: the same in all streams.
    """

    num_columns = 1

    def __init__(self, window: int, seed: int) -> None:
        self._window = window
        self._seed = seed
        self._num_windows = 0
        self._order: list[int] = []  # the next one last
        self._waiting: dict[int, int] = {}  # number and cost

    @property
    def _is_full(self) -> bool:
        return len(self._order) + len(self._waiting) >= self._window

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Adds a pack to the next window."""
        self._waiting[number] = lengths[0]
        return self._is_full

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next pack, as a list of one."""
        if not self._is_full and not has_ended:
            return None
        if not self._order:
            if not self._waiting:
                return None
            numbers = np.fromiter(self._waiting, np.int64, len(self._waiting))
            costs = np.fromiter(self._waiting.values(), np.int64, len(numbers)).view(np.float64)
            order = quantile_sync(costs, self._window, self._seed, self._num_windows)
            self._order = numbers[order[::-1]].tolist()
            self._waiting = {}
            self._num_windows += 1
        return (self._order.pop(),)

    def leftover(self) -> Sequence[int]:
        """Returns nothing: every pack is returned."""
        return ()

    def state(self) -> CollectorState:
        """Returns the windows begun, and the place of each pack."""
        numbers = np.array([*self._order[::-1], *self._waiting], np.int64)
        places = np.concatenate([np.arange(len(self._order)), np.full(len(self._waiting), -1)])
        return CollectorState({"windows": self._num_windows}, numbers, places[:, None])

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It buffers more packs than it can, or one has no cost.
        """
        costs = np.ascontiguousarray(samples.lengths[:, 0]).view(np.float64)
        if (
            len(samples.numbers) >= max(2, self._window)
            or not (costs >= 0).all()
            or np.isinf(costs).any()
        ):
            raise ValueError("it buffers packs that it cannot have, or that have no cost")
        is_waiting = columns_NC[:, 0] < 0
        self._num_windows = saved_count(counts, "windows")
        self._waiting = dict(
            zip(
                samples.numbers[is_waiting].tolist(),
                samples.lengths[is_waiting, 0].tolist(),
                strict=True,
            )
        )
        order = np.argsort(-columns_NC[:, 0], kind="stable")
        self._order = samples.numbers[order[: len(order) - len(self._waiting)]].tolist()
