"""References to what a stream reads next, as arrays: the order of sources without bytes.

Axes: N samples.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.state import Snapshot
from energon_lite.core.stream_context import StreamContext
from energon_lite.core.topology import Stream

# Positions that are looked up at once, as fewer cost nearly as much: few at first, then four times
# as many each time, up to a most.
_FEWEST, MOST_ORDERED = 64, 8192
_NOTHING = np.empty((2, 0), dtype=np.int64)


class Refs(NamedTuple):
    """Samples that are to be read.

    Attributes:
        sources: shape (N,); numbers of their sources.
        epochs: shape (N,).
        indices: shape (N,); which sample of the source.
    """

    sources: Int64Array
    epochs: Int64Array
    indices: Int64Array

    def behind(self, number: int) -> Refs:
        """Returns those after the first `number`."""
        return Refs(*(column[number:] for column in self))


NO_REFS = Refs(*np.empty((3, 0), np.int64))


class RefOrder(ABC):
    """A stream's place in the order of some sources; nothing is read.

    Attributes:
        sources: what the numbers of the references stand for.
        mean_bytes: of a sample.
        kind: the kind of samples (`SampleLoader.kind`) that most sources have, if there are several
            sources; None if no samples of different sources can be decoded together.
        stream: the stream.
        num_due: how many references may be passed over now.
    """

    sources: Sequence[Any]
    mean_bytes: float
    stream: Stream
    kind: tuple[Any, ...] | None = None
    num_due: int = sys.maxsize

    @abstractmethod
    def ahead(self, n: int) -> Refs:
        """Returns about the next `n` references; none only at the end."""

    @abstractmethod
    def pass_over(self, n: int) -> None:
        """Advances by `n` references, at most as many as `ahead` returned."""

    def draws(self, n: int, context: StreamContext) -> Sequence[int]:
        """Numbers the draws of the next `n` references, over all sources of the pipeline."""
        step = self.stream.num_streams
        first = context.sample_index
        context.sample_index = stop = first + n * step
        return range(first, stop, step)

    def snapshot(self) -> Snapshot:
        """Returns the place; not of an order that something else keeps."""
        raise NotImplementedError

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot."""
        raise NotImplementedError


class BlockOrder(Protocol):
    """The order of one source, by position; few more than `reach` are to be looked up at once."""

    reach: int

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices, both (N,), of up to `count` positions."""


class OrderAhead:
    """An order, looked up for more positions at once each time.

    Args:
        order: the order.
        most: positions that are looked up at once, if no more are needed.

    Attributes:
        most: the same, within the reach of the order.
    """

    __slots__ = ("_ahead", "_num", "_order", "_start", "most")

    def __init__(self, order: BlockOrder, most: int = MOST_ORDERED) -> None:
        self._order, self.most = order, min(most, order.reach)
        self._num = min(_FEWEST, self.most)
        # Epochs and sample indices, shape (2, N), of the positions from `_start` on.
        self._start, self._ahead = 0, _NOTHING

    def at(self, position: int, n: int) -> Int64Array:
        """Returns epochs and sample indices of up to `n` positions; forgets those before them.

        Returns:
            Shape (2, N).
        """
        first = position - self._start
        if not 0 <= first <= self._ahead.shape[1]:
            self._start, self._ahead, first = position, _NOTHING, 0
        missing = first + n - self._ahead.shape[1]
        if missing > 0:
            own = self._ahead[:, first:]
            num = self._num * -(-missing // self._num)
            more = np.array(self._order.block(position + own.shape[1], num))
            self._num = min(4 * self._num, self.most)
            self._start, first = position, 0
            self._ahead = np.concatenate([own, more], axis=1)
        return self._ahead[:, first : first + n]
