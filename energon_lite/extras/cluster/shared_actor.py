"""An actor whose deliveries several ranks of one place take, each computed once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from energon_lite.extras.cluster.ray_library import ray
from energon_lite.extras.cluster.sent_values import Info, size_of
from energon_lite.extras.cluster.shared_line import SharedLine
from energon_lite.extras.cluster.stream_actor import StreamActor
from energon_lite.loader.workers.executor import Pass
from energon_lite.loader.workers.rank_feed import due_slots

# How long an object is waited for whose order has not come yet.
_ORDER_SEC = 60.0


class _Place(NamedTuple):
    order: int
    line: SharedLine
    first_slot: int
    first: int  # number of the object in the line


class SharedStreamActor(StreamActor):
    """Computes the deliveries of one worker for all ranks that have the same place.

    Args:
        content: the settings of the run.
        num_consumers: the ranks.
        max_bytes: of deliveries that are kept for those that come later.
    """

    def __init__(self, content: bytes, num_consumers: int, max_bytes: int) -> None:
        super().__init__(content)
        self._content = content
        self._num_consumers, self._max_bytes = num_consumers, max_bytes
        self._lines: list[tuple[Any, SharedLine]] = []  # with the pass and the streams of each
        self._places: dict[str, _Place] = {}
        self._has_order = threading.Condition()
        self._num_computed = 0

    def begin(self, consumer: str, order: int, info: Info, job: Pass) -> None:
        """Begins a pass of a consumer, where another one is; by itself if it lacks what is gone."""
        slot = next(due_slots(job.start, set(job.others)), 0)
        # By where it begins, a worker may compute other streams.
        own = job.start.pass_index, frozenset(job.start.slots.streams()) - job.others
        with self._has_order:
            if consumer in self._places and self._places[consumer].order >= order:
                return
            lines = [line for key, line in self._lines if key == own and line.has(slot)]
            line = lines[0] if lines else self._new_line(slot, info, job)
            self._places[consumer] = _Place(order, line, slot, line.place_of(slot))
            self._lines = [*self._lines, (own, line)] if not lines else self._lines
            self._forget()
            self._has_order.notify_all()

    def _new_line(self, slot: int, info: Info, job: Pass) -> SharedLine:
        with self._lock:
            self._feed = feed = self._begun(self._content, info, job)

        def objects() -> Iterator[tuple[list[int], int, Any]]:
            for group in self._groups(feed, info, lambda: not self._order):
                yield group.slots, size_of(group.sent), ray.put(group.sent)

        return SharedLine(slot, objects(), self._num_consumers, self._max_bytes, self._count)

    def _count(self, number: int) -> None:
        self._num_computed += number

    def take(self, consumer: str, order: int, number: int) -> tuple[int, list[Any]]:
        """Returns a reference to an object, and how many of its deliveries are not due.

        Args:
            consumer: who takes it.
            order: of its pass.
            number: of the object, from the beginning of the pass for this consumer.

        Returns:
            No reference after the end of the pass; -1 for an object that is not kept any more.
        """
        with self._has_order:
            has_order = self._has_order.wait_for(
                lambda: consumer in self._places and self._places[consumer].order >= order,
                _ORDER_SEC,
            )
            if not has_order or self._places[consumer].order > order:
                return 0, []
            _, line, slot, first = self._places[consumer]
        try:
            kept = line.take(consumer, first + number)
        except LookupError:
            return -1, []
        if kept is None:
            return 0, []
        return sum(own < slot for own in kept.slots), [kept.value]

    def leave(self, consumer: str) -> int:
        """Forgets a consumer; returns how many are left."""
        with self._has_order:
            self._places.pop(consumer, None)
            self._forget()
            return len(self._places)

    def _forget(self) -> None:
        """Drops what no consumer reads."""
        used = [place.line for place in self._places.values()]
        self._lines = [entry for entry in self._lines if entry[1] in used]

    def num_computed(self) -> int:
        """Returns how many deliveries were computed."""
        return self._num_computed
