"""The order of a source, looked up for many positions at once, and some of them ahead."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from energon_lite.core.arrays import Int64Array

# Positions that are looked up at once, as fewer cost nearly as much: few at first, then four times
# as many each time, up to a most.
_FEWEST, _MOST = 64, 2048
_NOTHING: Any = np.empty((2, 0), dtype=np.int8)


class BlockOrder(Protocol):
    """What a source cursor reads, by position."""

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices, both (N,), of up to `count` positions."""


class OrderAhead:
    """An order, looked up for more positions at once each time.

    What was looked up is kept in the smallest type: a stream has orders of many sources.

    Args:
        order: the order.
        most: positions that are looked up at once, if no more are needed.
    """

    __slots__ = ("_ahead", "_most", "_num", "_order", "_start")

    def __init__(self, order: BlockOrder, most: int = _MOST) -> None:
        self._order, self._most = order, most
        self._num = min(_FEWEST, most)
        # Epochs and sample indices, shape (2, N), of the positions from `_start` on.
        self._start, self._ahead = 0, _NOTHING

    def at(self, position: int, n: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices of up to `n` positions; forgets those before them."""
        first = position - self._start
        if not 0 <= first <= self._ahead.shape[1]:
            self._start, self._ahead, first = position, _NOTHING, 0
        missing = first + n - self._ahead.shape[1]
        if missing > 0:
            own = self._ahead[:, first:]
            num = self._num * -(-missing // self._num)
            more = np.array(self._order.block(position + own.shape[1], num))
            self._num = min(4 * self._num, self._most)
            self._start, first = position, 0
            found = np.concatenate([own, more], axis=1)
            # Signed, as unsigned ones less signed ones may be floats.
            self._ahead = found.astype(np.min_scalar_type(~found.max(initial=0)))
        epochs, indices = self._ahead[:, first : first + n]
        return epochs, indices
