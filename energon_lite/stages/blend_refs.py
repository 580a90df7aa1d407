"""The order of a blend of sources, without reading them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of
from energon_lite.core.state import COLUMN, COUNT, FLAG, TEXT, Names, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.sources.refs import MOST_ORDERED, NO_REFS, OrderAhead, RefOrder, Refs
from energon_lite.stages.choosers import BySamples

_NOTHING = np.empty(0, np.int64)
# Positions of all sources together that are ordered at once.
_ORDERED_OF_ALL = 256 << 10
# Where weights are constant and the blend is exact, the position of a source is the number of its
# draws, which follows from the number of the next draw: a state has only how far it is `ahead`, and
# nothing where none is. With schedules, and in mode "random", it has the positions.
_STATE = {"draw": COUNT, "ahead": COLUMN, "counted": FLAG, "order": TEXT, "stream": COLUMN}


class BlendRefs(RefOrder):
    """A stream's place in a blend of sources: the number of the next draw, and their positions.

    A sample that fails uses its draw up, so nothing that is read changes the order. Draws of
    sources that have ended are passed over. So the position of a source is the number of its draws,
    but not where a blend was edited, or where all others have ended: by how much is saved.

    Args:
        spec: the `BlendDataset`.
        chooser: which source each draw takes.
        stream: the stream.
    """

    def __init__(self, spec: Any, chooser: BySamples, stream: Stream) -> None:
        self.sources, self.mean_bytes, self.kind = spec.leaves, spec.mean_bytes, spec.kind
        self.stream = stream
        self._ends_first = spec.until == "first"
        most, sources = max(1, min(MOST_ORDERED, _ORDERED_OF_ALL // len(spec.leaves))), spec.leaves
        self.order_of = cache(lambda i: OrderAhead(sources[i].order.stream(stream), most))
        self._chooser = chooser
        self._about: dict[str, Any] = {
            "counted": chooser.order.is_counted, "order": hash_of(spec.key, spec.labels),
            "stream": (stream.index, stream.num_streams, stream.pass_index),
        }  # fmt: skip
        self._begin(0, np.zeros(len(spec.leaves), np.int64), _NOTHING)

    def _begin(self, draw: int, positions: Int64Array, ahead: Int64Array) -> None:
        self._ended: set[int] = set()
        # The place before the references that were looked up: the draw, where the sources stand,
        # and how far they are ahead of their draws, or nothing where none is.
        self._draw, self._positions = draw, positions
        self._ahead = ahead if ahead.any() else _NOTHING
        # The sources and draws of these references, and how many were passed over.
        self._drawn = self._draws = _NOTHING
        self._num_passed = 0
        # Whether positions follow from draws: these are counted, and each has found a sample.
        self._has_all = self._chooser.order.is_counted

    def _place(self) -> tuple[int, Int64Array]:
        """Returns the draw, and how far sources are ahead, behind what was passed over."""
        num = self._num_passed
        if not num:
            return self._draw, self._ahead
        draw = max(self._draw, int(self._draws[num - 1]) + 1)
        if self._has_all and draw > self._draw:
            return draw, self._ahead
        taken = np.bincount(self._drawn[:num], minlength=len(self._positions))
        return draw, self._positions + taken - self._chooser.order.counts(draw)

    def _settle(self) -> None:
        """Counts what was passed over."""
        num = self._num_passed
        if num:
            self._draw, self._ahead = self._place()
            self._chooser.pass_over(self._draw - 1)
            self._positions += np.bincount(self._drawn[:num], minlength=len(self._positions))
            self._drawn, self._draws, self._num_passed = self._drawn[num:], self._draws[num:], 0

    def ahead(self, n: int) -> Refs:
        """Returns some of the next `n` references, but for those of sources that have ended."""
        self._settle()
        while True:
            plan, draws = self._chooser.next(n)
            refs, is_there, ended = self._looked_up(plan)
            self._has_all = self._has_all and bool(is_there.all())
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
        sources, first, found = np.flatnonzero(counts), 0, []
        positions = self._positions[sources].tolist()
        turns = zip(sources.tolist(), counts[sources].tolist(), positions, strict=True)
        for source, count, position in turns:
            found.append(self.order_of(source).at(position, count))
            num = found[-1].shape[1]
            if num < count:
                is_there[by_source[first + num : first + count]] = False
                if not num:
                    ended.add(source)
            first += count
        rows = by_source[is_there[by_source]]
        refs.epochs[rows], refs.indices[rows] = np.concatenate(found, axis=1)
        return refs, is_there, ended

    def pass_over(self, n: int) -> None:
        """Advances by `n` references."""
        self._num_passed += n

    def snapshot(self) -> Snapshot:
        """Returns the number of the next draw, and how far sources are ahead of their draws."""
        draw, ahead = self._place()
        fields = {"draw": draw, "ahead": ahead if ahead.any() else (), **self._about}
        return Snapshot("blend", fields)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a place."""
        place = checked_place(snapshot, self._about["order"], len(self.sources))
        self._chooser.restore(snapshot)
        draw, ahead = place["draw"], place["ahead"]
        counts = self._chooser.order.counts(draw)
        if place["counted"]:
            self._begin(draw, counts + ahead, ahead)
        else:
            self._begin(draw, ahead, ahead - counts)


def hash_of(key: int, names: Names) -> str:
    """Returns the name of a blend of these sources, with this key, in a state."""
    return f"{key_of(key, names.text) >> 96:08x}"


def checked_place(snapshot: Snapshot, of: str, num_sources: int) -> dict[str, Any]:
    """Returns the fields of a snapshot of a blend of K sources.

    `ahead`, shape (K,), is by how much sources are ahead of their draws, if these are `counted`;
    else it is their positions.

    Raises:
        StateError: The snapshot is not of the blend with the hash `of`.
    """
    fields = snapshot.expect("blend", 0).checked(_STATE)
    saved, ahead = fields["ahead"], np.zeros(num_sources, np.int64)
    if fields["order"] != of or len(saved) not in (0, num_sources):
        raise StateError(
            "The checkpoint has the state of a blend of other sources, or with another seed, than "
            f"the {num_sources} sources of this pipeline. Build the pipeline as it was when the "
            "state was saved."
        )
    ahead[: len(saved)] = saved
    return {**fields, "ahead": ahead}
