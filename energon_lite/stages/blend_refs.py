"""The order of a blend of sources, without reading them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.sources.refs import MOST_ORDERED, NO_REFS, OrderAhead, RefOrder, Refs
from energon_lite.sources.source import SourcePlaces
from energon_lite.stages.choosers import BySamples

# Positions of all sources together that are ordered at once.
_ORDERED_OF_ALL = 256 << 10


class BlendRefs(RefOrder):
    """A stream's place in a blend of sources: the number of the next draw, and their positions.

    A sample that fails uses its draw up, so nothing that is read changes the order. Draws of
    sources that have ended are passed over.

    Args:
        spec: the `BlendDataset`.
        chooser: which source each draw takes.
        stream: the stream.
    """

    def __init__(self, spec: Any, chooser: BySamples, stream: Stream) -> None:
        self.sources, self.mean_bytes, self.kind = spec.leaves, spec.mean_bytes, spec.kind
        self.stream = stream
        self._name, self._labels = spec.name, spec.labels
        self._ends_first = spec.until == "first"
        most, sources = max(1, min(MOST_ORDERED, _ORDERED_OF_ALL // len(spec.leaves))), spec.leaves
        self.order_of = cache(lambda i: OrderAhead(sources[i].order.stream(stream), most))
        self._chooser = chooser
        self._begin(np.zeros(len(spec.leaves), np.int64))

    def _begin(self, positions: Int64Array) -> None:
        self._ended: set[int] = set()
        # Where the sources stood before the references that were looked up; their sources and
        # draws; and how many of them were passed over.
        self._positions = positions
        self._drawn = self._draws = np.empty(0, np.int64)
        self._num_passed = 0

    def _settle(self) -> None:
        """Counts what was passed over."""
        num = self._num_passed
        if num:
            self._chooser.pass_over(int(self._draws[num - 1]))
            counts = np.bincount(self._drawn[:num], minlength=len(self._positions))
            self._positions = self._positions + counts  # snapshots keep the array before
            self._drawn, self._draws, self._num_passed = self._drawn[num:], self._draws[num:], 0

    def ahead(self, n: int) -> Refs:
        """Returns some of the next `n` references, but for those of sources that have ended."""
        self._settle()
        while True:
            plan, draws = self._chooser.next(n)
            refs, is_there, ended = self._looked_up(plan)
            if self._ends_first and not is_there.all():
                is_there[int(is_there.argmin()) :] = False  # it is the end
                if not is_there[0]:
                    return NO_REFS
            elif ended:
                self._ended |= ended
                if len(self._ended) == len(self.sources):
                    return NO_REFS
                self._chooser.leave_out(set(self._ended))
            if is_there.any():
                if is_there.sum() > len(self._drawn):  # fewer may be asked for than are read
                    self._drawn, self._draws = plan[is_there], draws[is_there]
                return refs if is_there.all() else Refs(*(column[is_there] for column in refs))

    def _looked_up(self, plan: Int64Array) -> tuple[Refs, np.ndarray[Any, Any], set[int]]:
        """Returns the references of draws, which of them there are, and which sources have none."""
        refs = Refs(plan, *np.zeros((2, len(plan)), np.int64))
        is_there, ended = np.ones(len(plan), np.bool_), set[int]()
        by_source, counts = argsort(plan), np.bincount(plan)
        sources, first = np.flatnonzero(counts), 0
        positions = self._positions[sources].tolist()
        turns = zip(sources.tolist(), counts[sources].tolist(), positions, strict=True)
        for source, count, position in turns:
            rows = by_source[first : first + count]
            first += count
            epochs, indices = self.order_of(source).at(position, count)
            num = len(indices)
            if num < count:
                is_there[rows[num:]] = False
                rows = rows[:num]
                if not num:
                    ended.add(source)
            refs.epochs[rows], refs.indices[rows] = epochs, indices
        return refs, is_there, ended

    def pass_over(self, n: int) -> None:
        """Advances by `n` references."""
        self._num_passed += n

    def snapshot(self) -> Snapshot:
        """Returns the number of the next draw, and the positions as one array."""
        num = self._num_passed
        if num:
            self._chooser.pass_over(int(self._draws[num - 1]))
        places = SourcePlaces(self._labels, self._positions, self._drawn[:num])
        return Snapshot(self._name, self._chooser.state(), places, self._labels)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a place."""
        snapshot.expect(self._name, len(self.sources))
        self._chooser.restore(snapshot)
        self._begin(SourcePlaces.positions(snapshot.below(self._labels), self._labels))
