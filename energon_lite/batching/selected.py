"""Packs that a function of the user chooses from a full buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, OneByOne, Samples
from energon_lite.core.arrays import Int64Array

# Of the samples of a full buffer the packs, and those that stay in the buffer. The others are lost,
# which the function counts. It also gets whether the data have ended.
Choose = Callable[[list[int], bool], tuple[list[list[int]], list[int]]]


class SelectedPacks(OneByOne):
    """Fills a buffer up, and has a function choose packs of it whenever no pack is left.

    Columns: the pack that a sample belongs to, or -1, and the sample's place in the buffer.

    Args:
        buffer_size: samples of a full buffer, those of packs to come included.
        choose: chooses packs.
        drops_last: whether samples that are in no pack when the data end are dropped.
    """

    num_columns = 2

    def __init__(self, buffer_size: int, choose: Choose, drops_last: bool = False) -> None:
        self._buffer_size = buffer_size
        self._choose = choose
        self._drops_last = drops_last
        self._waiting: list[int] = []
        self._packs: list[list[int]] = []
        self._num_missing = buffer_size

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Puts a sample into the buffer."""
        self._waiting.append(number)
        self._num_missing -= 1
        return self._num_missing <= 0

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next pack that was chosen, once the buffer is full."""
        num_chosen = sum(map(len, self._packs))
        self._num_missing = self._buffer_size - len(self._waiting) - num_chosen
        if self._num_missing > 0 and not has_ended:
            return None
        if not self._packs and self._waiting and not (has_ended and self._drops_last):
            numbers, self._waiting = self._waiting, []
            self._packs, self._waiting = self._choose(numbers, has_ended)
            return self.next(cycle, has_ended)
        return self._packs.pop(0) if self._packs else None

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no pack at the end of the data."""
        rest, self._waiting = self._waiting, []
        return rest

    def state(self) -> CollectorState:
        """Returns the samples with their packs."""
        numbers = [*self._waiting, *(number for pack in self._packs for number in pack)]
        sizes = [len(self._waiting), *map(len, self._packs)]
        packs = np.repeat(np.arange(-1, len(self._packs)), sizes)
        columns = np.column_stack([packs, np.arange(len(numbers))])
        return CollectorState({}, np.array(numbers, np.int64), columns)

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state."""
        packs: dict[int, list[int]] = {-1: []}
        order = np.lexsort((columns_NC[:, 1], columns_NC[:, 0]))
        chosen = zip(samples.numbers[order].tolist(), columns_NC[order, 0].tolist(), strict=True)
        for number, pack in chosen:
            packs.setdefault(pack, []).append(number)
        self._waiting, *self._packs = packs.values()
