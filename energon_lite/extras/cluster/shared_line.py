"""Deliveries that are computed once for several consumers, and kept until all have passed them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """An object of deliveries that follow each other.

    Attributes:
        slots: of the deliveries, ascending.
        num_bytes: size of the object.
        value: the object, or what stands for it.
    """

    slots: list[int]
    num_bytes: int
    value: Any


class SharedLine:
    """The deliveries of one pass, from a slot on.

    A consumer that falls behind what is kept must compute for itself what it lacks: nothing waits
    for a consumer, as consumers may wait for each other.

    Args:
        first_slot: where the line begins.
        objects: computes the objects: slots, bytes and the value of each.
        max_bytes: of the objects that are kept.

    Attributes:
        next_slot: all slots below it are computed.
    """

    def __init__(
        self,
        first_slot: int,
        objects: Iterator[tuple[list[int], int, Any]],
        max_bytes: int,
    ) -> None:
        self._first_slot = self.next_slot = first_slot  # the first is of what is kept
        self._objects = objects
        self._max_bytes = max_bytes
        self._kept = deque[Kept]()
        self._num_bytes = 0
        self._lock, self._computes = threading.RLock(), threading.Lock()

    def has(self, slot: int) -> bool:
        """Whether a consumer may begin with a slot: it is kept, or not computed yet."""
        with self._lock:
            is_released = any(kept.value is None and slot in kept.slots for kept in self._kept)
            return slot >= self._first_slot and not is_released

    def object_with(self, slot: int) -> Kept | None:
        """Returns the object with the first delivery from a slot on; computes what it needs.

        Returns:
            None if there is no such delivery.

        Raises:
            LookupError: It is not kept any more.
        """
        while (kept := self._kept_with(slot)) is None:
            with self._computes:
                if self._kept_with(slot) is None and not self._compute():
                    return None
        return kept

    def _kept_with(self, slot: int) -> Kept | None:
        with self._lock:
            if not self.has(slot):
                raise LookupError(slot)
            return next((kept for kept in self._kept if kept.slots[-1] >= slot), None)

    def _compute(self) -> bool:
        found = next(self._objects, None)
        if found is None:
            return False
        kept = Kept(*found)
        with self._lock:
            while self._kept and self._num_bytes + kept.num_bytes > self._max_bytes:
                self._drop()
            self._kept.append(kept)
            self._num_bytes += kept.num_bytes
            self.next_slot = kept.slots[-1] + 1
        return True

    def release(self, kept: Kept) -> None:
        """Drops an object that no other consumer needs."""
        with self._lock:
            if kept in self._kept:
                self._kept[self._kept.index(kept)] = Kept(kept.slots, 0, None)
                self._num_bytes -= kept.num_bytes

    def forget(self, slot: int) -> None:
        """Drops the objects all of whose deliveries lie before a slot."""
        with self._lock:
            while self._kept and self._kept[0].slots[-1] < slot:
                self._drop()

    def _drop(self) -> None:
        gone = self._kept.popleft()
        self._num_bytes -= gone.num_bytes
        self._first_slot = gone.slots[-1] + 1
