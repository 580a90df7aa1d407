"""Deliveries that are computed once for several consumers, and kept until all have taken them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """An object of deliveries that follow each other.

    Attributes:
        slots: of the deliveries, ascending.
        num_bytes: size of the object.
        value: the object, or what stands for it.
        taken_by: the consumers that have had it.
    """

    slots: list[int]
    num_bytes: int
    value: Any
    taken_by: set[str]


class SharedLine:
    """The deliveries of one pass, from a slot on.

    A consumer that falls behind what is kept must compute for itself what it lacks: nothing waits
    for a consumer, as consumers may wait for each other.

    Args:
        first_slot: where the line begins.
        objects: computes the objects: slots, bytes and the value of each.
        num_consumers: how many take each object.
        max_bytes: of the objects that are kept.
        on_computed: called with the number of deliveries of each object that was computed.
    """

    def __init__(
        self,
        first_slot: int,
        objects: Iterator[tuple[list[int], int, Any]],
        num_consumers: int,
        max_bytes: int,
        on_computed: Callable[[int], None],
    ) -> None:
        self._first_slot = first_slot  # of what is kept, or is computed next
        self._objects, self._is_over = objects, False
        self._num_consumers, self._max_bytes = num_consumers, max_bytes
        self._on_computed = on_computed
        self._kept: deque[Kept] = deque()
        self._num_bytes = self._num_gone = 0
        self._lock = threading.RLock()

    def has(self, slot: int) -> bool:
        """Whether a consumer may begin with a slot: it is kept, or not computed yet."""
        with self._lock:
            return slot >= self._first_slot and not (self._is_over and not self._kept)

    def place_of(self, slot: int) -> int:
        """Returns the number of the object in which a slot is, or will be."""
        with self._lock:
            passed = sum(kept.slots[-1] < slot for kept in self._kept)
            return self._num_gone + passed

    def take(self, consumer: str, number: int) -> Kept | None:
        """Returns an object, which is computed if it is the next one; None after the last.

        Args:
            consumer: who takes it.
            number: of the object.

        Raises:
            LookupError: It is not kept any more.
        """
        with self._lock:
            while number >= self._num_gone + len(self._kept):
                if not self._compute():
                    return None
            if number < self._num_gone:
                raise LookupError(number)
            kept = self._kept[number - self._num_gone]
            kept.taken_by.add(consumer)
            while self._kept and len(self._kept[0].taken_by) >= self._num_consumers:
                self._drop()
            return kept

    def _compute(self) -> bool:
        found = next(self._objects, None)
        if found is None:
            self._is_over = True
            return False
        slots, num_bytes, value = found
        self._on_computed(len(slots))
        while self._kept and self._num_bytes + num_bytes > self._max_bytes:
            self._drop()
        self._kept.append(Kept(slots, num_bytes, value, set()))
        self._num_bytes += num_bytes
        return True

    def _drop(self) -> None:
        gone = self._kept.popleft()
        self._num_gone += 1
        self._num_bytes -= gone.num_bytes
        self._first_slot = gone.slots[-1] + 1
