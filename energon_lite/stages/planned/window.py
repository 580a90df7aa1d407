"""One window of a plan: which samples of the order share a pack, from their stored lengths.

Axes: N samples of the window, U units (samples, or parts of those that are too long), P packs,
R resources, S streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import context_of
from energon_lite.core.errors import StateError
from energon_lite.core.keys import GIVEN_AGAIN, whole
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import SkipRecord, StreamContext, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.overlong import left_out
from energon_lite.stages.planned.order import OrderReader, Refs, joined, keys_of

# In place of the first token: the unit is a whole sample; or one that is given again, and then the
# number of the repetition stands in place of the last token.
WHOLE, AGAIN = -1, -2


@dataclass
class Notes:
    """What the plan left out, to be counted once, by the stream that drew it.

    Attributes:
        records: samples that are in no pack.
        draws: how many of them, by source.
        overlong: samples that were too long for a pack, by source.
    """

    records: list[SkipRecord]
    draws: Counter[str]
    overlong: Counter[str]

    def count(self) -> None:
        """Counts it in the current context."""
        context = current_context()
        for source, number in self.draws.items():
            context.cost(source).draws += number
        for source, number in self.overlong.items():
            context.cost(source).overlong += number
        for record in self.records:
            context.count_skip(record)


class Units(NamedTuple):
    """Samples, and parts of samples, that are to be packed.

    Attributes:
        refs: shape (U,), ascending; which of the samples.
        starts: shape (U,); first token of a part, `WHOLE`, or `AGAIN`.
        stops: shape (U,); the token after the last; number of the repetition.
        lengths: shape (U, R).
    """

    refs: Int64Array
    starts: Int64Array
    stops: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, eq=False)
class PlannedWindow:
    """What one stream gives of a window.

    Attributes:
        refs: the samples of the window; those that came over from the one before are first.
        lengths: shape (N, R); of the samples.
        units: what is packed.
        packs: P packs of units, in the order in which the stream gives them.
        costs: shape (P,); by the packing's cost model, 0 without one.
        carried: restore keys of what waits for the next window.
        is_last: whether no window follows.
        notes: what was left out.
        num_lists: shape (S,); how many lists each stream has of a plan that is shared.
    """

    refs: Refs
    lengths: Int64Array
    units: Units
    packs: Lists
    costs: Float64Array
    carried: tuple[RestoreKey, ...]
    is_last: bool
    notes: Notes
    num_lists: Int64Array | None = None


class LengthsOf(Protocol):
    """Returns the lengths of a source's samples by its name; (n,) for each resource, or more."""

    def __call__(self, source: str) -> tuple[Int64Array, ...]:
        """Opens them."""


class Arranged(NamedTuple):
    """What becomes of the units of a window.

    Attributes:
        units: what was to be arranged, and further rows of those that are given again.
        packs: P lists of units that the stream gives, in their order.
        costs: shape (P,); of each list.
        waiting: shape (W,); units that wait for the next window; after the last one nothing does,
            and they are left out.
        num_lists: shape (S,); how many lists each stream has of a plan that is shared.
    """

    units: Units
    packs: Lists
    costs: Float64Array
    waiting: Int64Array
    num_lists: Int64Array | None = None


class Planner(ABC):
    """Plans the windows of one stream.

    Args:
        names: of the sources.
        lengths: opens their lengths.
        window: samples of each stream in a window.
        stream: whose lists are planned.
    """

    def __init__(self, names: list[str], lengths: LengthsOf, window: int, stream: Stream) -> None:
        self._names = names
        self._open = lengths
        self._window = window
        self._stream = stream
        self._lengths: dict[int, tuple[Int64Array, ...]] = {}

    @abstractmethod
    def _units(
        self, refs: Refs, lengths: Int64Array, carried: Sequence[RestoreKey], notes: Notes
    ) -> Units:
        """Returns what is to be arranged of N samples; the first are those in `carried`."""

    @abstractmethod
    def _arranged(
        self, refs: Refs, units: Units, num_carried: int, number: int, is_last: bool
    ) -> Arranged:
        """Arranges the units of window `number`."""

    def plan(
        self, number: int, carried: Sequence[RestoreKey], readers: Sequence[OrderReader]
    ) -> PlannedWindow:
        """Plans the next window.

        Args:
            number: of the window in the pass.
            carried: what waited for it.
            readers: the order; of this stream, or of all streams, where they plan together.

        Raises:
            StateError: A key in `carried` is of no source here.
            FatalSampleError: A sample is too long, and that is to be an error.
        """
        taken = [reader.take(self._window) for reader in readers]
        is_last = all(len(refs) < self._window for refs in taken)
        refs = joined([self._refs(carried), *taken])
        lengths = self._lengths_of(refs)
        notes = Notes([], Counter(), Counter())
        units = self._units(refs, lengths, carried, notes)
        arranged = self._arranged(refs, units, len(carried), number, is_last)
        units, packs, costs, waiting, num_lists = arranged
        keys = tuple(unit_keys(refs, units, waiting, self._names))
        if is_last:
            self._note_left_over(keys, notes)
            keys = ()
        return PlannedWindow(refs, lengths, units, packs, costs, keys, is_last, notes, num_lists)

    def _refs(self, keys: Sequence[RestoreKey]) -> Refs:
        rows = [whole(key) for key in keys]
        unknown = [row[0] for row in rows if row[0] not in self._names]
        if unknown:
            raise StateError(
                f"The checkpoint's plan holds a sample of {unknown[0]!r}, which is "
                "no source here; it was edited or damaged."
            )
        columns = [[self._names.index(row[0]) for row in rows]]
        columns += [[row[i] for row in rows] for i in (1, 2, 3)]
        return Refs(*(np.array(column, dtype=np.int64) for column in columns))

    def _lengths_of(self, refs: Refs) -> Int64Array:
        """Looks the lengths up; shape (N, R)."""
        if not len(refs):
            return np.empty((0, len(self._open(self._names[0]))), dtype=np.int64)
        order = np.argsort(refs.sources, kind="stable")
        numbers, firsts = np.unique(refs.sources[order], return_index=True)
        found: Any = None
        for number, own in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            if number not in self._lengths:
                self._lengths[number] = self._open(self._names[number])
            columns = self._lengths[number]
            if found is None:
                found = np.empty((len(refs), len(columns)), dtype=np.int64)
            for place, column in enumerate(columns):
                found[own, place] = column[refs.indices[own]]
        lengths: Int64Array = found
        return lengths

    def _key_of(self, refs: Refs, number: int) -> RestoreKey:
        return keys_of(refs.chosen(slice(number, number + 1)), self._names)[0]

    def _is_own(self, key: RestoreKey) -> bool:
        """Whether it was this stream that drew a sample; others plan with it, too."""
        drawn_by: int = whole(key)[3] % self._stream.num_streams
        return drawn_by == self._stream.index

    def _without_length(self, key: RestoreKey, index: str, notes: Notes) -> None:
        """Records a sample that was skipped, or failed, when it was measured."""
        if self._is_own(key):
            apart = StreamContext(self._stream, max_skip_rate=1.0)
            with context_of(apart):
                why = f"has length 0 in index {index!r}: it was skipped when measured"
                left_out(key, SKIPPED, why)
            notes.records.extend(apart.take_records())
            notes.draws[key[0]] += 1

    def _note_left_over(self, keys: Sequence[RestoreKey], notes: Notes) -> None:
        apart = StreamContext(self._stream, max_skip_rate=1.0)
        with context_of(apart):
            for key in keys:
                if self._is_own(key):
                    left_out(key, SKIPPED, "left over at the end of the data")
                    notes.draws[whole(key)[0]] += 1
        notes.records.extend(apart.take_records())


def unit_keys(refs: Refs, units: Units, which: Any, names: list[str]) -> list[RestoreKey]:
    """Returns the restore keys of units: of samples, of parts of samples, or of repetitions."""
    chosen = units.refs[which]
    keys = keys_of(refs.chosen(chosen), names)
    starts, stops = units.starts[which], units.stops[which]
    for i in np.flatnonzero(starts != WHOLE).tolist():
        if starts[i] == AGAIN:
            keys[i] = (GIVEN_AGAIN, int(stops[i]), keys[i])
        else:
            keys[i] = ("piece", int(starts[i]), int(stops[i]), keys[i])
    return keys
