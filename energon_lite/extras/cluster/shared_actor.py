"""An actor whose deliveries several ranks take, each computed once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from energon_lite.core.topology import RankSlots
from energon_lite.extras.cluster.ray_library import ray
from energon_lite.extras.cluster.sent_values import Info, is_of_several, own_streams, size_of
from energon_lite.extras.cluster.shared_line import SharedLine
from energon_lite.extras.cluster.stream_actor import AFTER_ALL, MOST_IN_GROUP, StreamActor, sent_of
from energon_lite.loader.workers.executor import Pass
from energon_lite.loader.workers.rank_feed import Delivery, Mark, PassStart, StreamStart, due_slots

# Of an object the numbers of the deliveries that are due, and a reference to it.
Share = tuple[list[int], list[Any]]
# How long a share is waited for whose order has not come yet.
_ORDER_SEC = 60.0


@dataclass(eq=False)
class _Place:
    """The place of a consumer: its order, pass and streams, and the next slot due to it."""

    order: int
    job: Pass
    key: Any
    slot: int
    shared: list[int]  # the stream, where other ranks have others of its batches
    is_alone: bool  # with each object
    shares: Any = None
    num_taken: int = 0


class SharedStreamActor(StreamActor):
    """Computes the deliveries of one worker for all ranks that have the same place, or stream.

    Args:
        content: the settings of the run.
        max_bytes: of deliveries that are kept for those that come later.
    """

    def __init__(self, content: bytes, max_bytes: int) -> None:
        super().__init__(content)
        self._content = content
        self._num_consumers, self._max_bytes = 1, max_bytes
        self._name = ""
        self._lines: list[tuple[Any, SharedLine]] = []  # with the pass and the streams of each
        self._places: dict[str, _Place] = {}
        self._table = threading.Condition()  # of the two
        self._num_computed = 0

    def claim(self, name: str, is_needed: bool) -> bool:
        """Returns whether this actor has a name; where it has none and one is needed, it gets it.

        Args:
            name: that of an actor that may have died.
            is_needed: whether it has.
        """
        with self._table:
            self._name = self._name or (name if is_needed else "")
            return self._name == name

    def begin(self, num_consumers: int, consumer: str, order: int, info: Info, job: Pass) -> None:
        """Begins a pass of a consumer.

        Args:
            num_consumers: how many there are.
            consumer: which of them.
            order: one that was overtaken by a later one does nothing.
            info: number of the worker, how many there are, and the seed of global generators.
            job: the pass.
        """
        slots, slot = job.start.slots, next(due_slots(job.start, set(job.others)), 0)
        # By where it begins, a worker may compute other streams.
        key = job.start.pass_index, frozenset(own_streams(job))
        shared = own_streams(job) if is_of_several(job) else []
        is_alone = any(num_consumers == slots.num_ranks_of(stream) for stream in shared)
        place = _Place(order, job, key, slot, shared, is_alone)
        place.shares = self._shares(place)
        with self._table:
            if consumer in self._places and self._places[consumer].order >= order:
                return
            self._num_consumers, self._places[consumer] = num_consumers, place
            lines = [line for other, line in self._lines if other == key and line.has(slot)]
            if all(line.next_slot > AFTER_ALL for line in lines):  # they have failed
                self._lines.append((key, self._new_line(info, job, slot)))
            self._forget()
            self._table.notify_all()

    def take(self, consumer: str, order: int, number: int) -> Share | None:
        """Returns what is due to a consumer of the next object that has something for it.

        It is asked for, and not yielded: what a consumer that is gone left would run on.

        Args:
            consumer: who takes it.
            order: of its pass.
            number: counts what it asks for in this pass, since that may be overtaken.

        Returns:
            None where an object is not kept any more; nothing after the end of the pass.
        """

        def is_next() -> bool:
            own = self._places.get(consumer)
            return own is not None and (own.order, own.num_taken) >= (order, number)

        with self._table:
            is_known = self._table.wait_for(is_next, _ORDER_SEC)
            own = self._places.get(consumer)
            if not is_known or own is None or own.order != order:
                return [], []
        try:
            return next(own.shares, ([], []))
        finally:
            with self._table:
                own.num_taken += 1
                self._table.notify_all()

    def _shares(self, place: _Place) -> Iterator[Share | None]:
        while True:
            try:
                line = self._line_of(place)
                kept = line.object_with(place.slot)
            except LookupError:
                yield None
                return
            if kept is None:
                break
            due = [number for number, slot in enumerate(kept.slots) if slot >= place.slot]
            yield due, [kept.value]
            if place.is_alone:
                line.release(kept)
            self._pass_by(place, kept.slots[-1] + 1)
        for stream in place.shared:  # the slot in which it ended is another rank's
            end = Delivery(Mark.END, place.slot, stream, None, [], [])
            yield [0], [ray.put([sent_of(end, "")])]

    def _new_line(self, info: Info, job: Pass, slot: int) -> SharedLine:
        most = MOST_IN_GROUP
        if is_of_several(job):  # each batch goes to another rank
            start = whole_stream(job.start, own_streams(job)[0])
            job, slot, most = Pass(job.number, start, frozenset()), start.slots.slot(0), 1
        with self._lock:
            self._feed = feed = self._begun(self._content, info, job)

        def objects() -> Iterator[tuple[list[int], int, Any]]:
            for group in self._groups(feed, info, lambda: not self._order, most):
                self._num_computed += len(group.sent)
                yield group.slots, size_of(group.sent), ray.put(group.sent)

        return SharedLine(slot, objects(), self._max_bytes)

    def _line_of(self, place: _Place) -> SharedLine:
        """Returns, of the lines that a consumer may take from, the one that is furthest ahead.

        So consumers of which one began further back come together again; and where one has begun
        again after an error, all take from its line.

        Raises:
            LookupError: There is none.
        """
        lines = [line for key, line in self._lines if key == place.key and line.has(place.slot)]
        if not lines:
            raise LookupError(place.slot)
        return max(lines, key=lambda line: (line.next_slot <= AFTER_ALL, line.next_slot))

    def _pass_by(self, place: _Place, slot: int) -> None:
        """Drops what all consumers have passed, as one does what is before a slot."""
        place.slot = slot
        for stream in place.shared if slot <= AFTER_ALL else ():
            place.slot = place.job.start.slots.next_slot(stream, slot)
        with self._table:
            same = [other.slot for other in self._places.values() if other.key == place.key]
            if len(same) >= self._num_consumers:  # more, where some ended without a word
                first = sorted(same)[-self._num_consumers]
                for key, line in self._lines:
                    if key == place.key:
                        line.forget(first)
            if len(self._lines) > 1:
                self._forget()

    def leave(self, consumer: str) -> int:
        """Forgets a consumer; returns how many are left."""
        with self._table:
            self._places.pop(consumer, None)
            self._forget()
            return len(self._places)

    def _forget(self) -> None:
        """Drops the lines from which no consumer takes."""
        used = []
        for place in self._places.values():
            with suppress(LookupError):
                used.append(self._line_of(place))
        self._lines = [entry for entry in self._lines if entry[1] in used]

    def num_computed(self) -> int:
        """Returns how many deliveries were computed."""
        return self._num_computed


def whole_stream(start: PassStart, stream: int) -> PassStart:
    """Returns the start of a pass over all batches of a stream, from where a rank has it."""
    place = start.streams.get(stream, StreamStart())
    num_returned = place.snapshot.fields.get("items", 0) if place.snapshot else 0
    num_streams = start.slots.num_streams
    slots = RankSlots(0, stream, num_streams, num_streams, max(place.first, num_returned))
    return PassStart(slots, start.pass_index, {stream: place})
