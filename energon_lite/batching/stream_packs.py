"""Packs of samples as they come, each opened with the oldest sample of its group."""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, OneByOne, Samples
from energon_lite.batching.rules import Packing
from energon_lite.batching.stream import StreamingPacker
from energon_lite.core.arrays import Int64Array

# In place of the number of a sample in a packer.
_LEFT_OVER, _ALONE = -1, -2


class StreamPacks(OneByOne):
    """Returns a pack of a group as soon as the buffer of the group is full.

    A sample that is longer than a pack, which the rules let pass, gets a separate pack.

    Column: the number of the sample in its group's packer; -1 if it is left over, -2 if it
    waits for a separate pack.

    Args:
        packing: capacity, buffer, limits and what becomes of the rest at the end of the data.
    """

    num_columns = 1

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._limits = packing.limits
        self._allows_alone = packing.overlong == "alone"
        self._packers: dict[int, StreamingPacker] = {}
        # For each group, the numbers that its samples have in its packer, rising, and the samples.
        self._numbers: dict[int, tuple[array[int], array[int]]] = {}
        self._alone: list[int] = []  # each of them is a list, before all others
        self._full: set[int] = set()
        self._leftover: list[int] = []

    @property
    def groups(self) -> Collection[int]:  # type: ignore[override]
        """The groups that have a packer."""
        return self._packers.keys()

    @property
    def num_wanted(self) -> int:
        """Samples before which no buffer is full; one where a sample may come in parts."""
        if self._packing.overlong == "split":
            return 1
        most = max([packer.num_buffered for packer in self._packers.values()], default=0)
        return max(1, self._packing.buffer_size - most)

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Puts a sample into the buffer of its group."""
        if self._allows_alone and any(map(operator.gt, lengths, self._limits)):
            self._alone.append(number)
            return True
        packer = self._packers.get(group) or self._new_packer(group)
        in_packer, samples = self._numbers[group]
        in_packer.append(packer.num_added)
        samples.append(number)
        packer.add_checked(lengths)
        if packer.is_full:
            self._full.add(group)
            return True
        return False

    def _new_packer(self, group: int) -> StreamingPacker:
        packing = self._packing
        packer = self._packers[group] = StreamingPacker(
            packing.capacities,
            buffer_size=packing.buffer_size,
            max_samples=packing.max_samples,
            align=packing.alignments,
        )
        self._numbers[group] = array("q"), array("q")
        return packer

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns a sample that is alone, a pack of a full buffer, or one of the rest."""
        if self._alone:
            return [self._alone.pop(0)]
        while self._full:
            group = min(self._full)
            if self._packers[group].is_full:
                return self._taken(group)
            self._full.remove(group)
        return self._rest() if has_ended else None

    def _taken(self, group: int) -> list[int]:
        in_packer, samples = self._numbers[group]
        pack = self._packers[group].next_pack()
        places = [bisect_left(in_packer, number) for number in pack]
        taken = [samples[place] for place in places]
        if 2 * places[0] > len(in_packer):  # those before the oldest have left
            del in_packer[: places[0]], samples[: places[0]]
        return taken

    def _rest(self) -> list[int] | None:
        """Returns a pack of what is buffered when the data have ended."""
        packing = self._packing
        for group, packer in self._packers.items():
            while packer.num_buffered:
                pack = self._taken(group)
                is_last = packing.drop_last and not packer.num_buffered
                if packing.end_of_data == "pack" and not is_last:
                    return pack
                self._leftover += pack
        return None

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no pack at the end of the data."""
        rest, self._leftover = self._leftover, []
        return rest

    def state(self) -> CollectorState:
        """Returns the samples, and of each group those added, their total lengths and the price."""
        states = {group: packer.state() for group, packer in self._packers.items()}
        groups = tuple(
            (g, state["added"], *state["totals"], state["price"]) for g, state in states.items()
        )
        columns = [
            (np.array(numbers, np.int64), np.full(len(numbers), mark))
            for numbers, mark in ((self._leftover, _LEFT_OVER), (self._alone, _ALONE))
        ]
        for group, state in states.items():
            in_packer, samples = map(np.array, self._numbers[group])
            own = state["numbers"]
            columns.append((samples[np.searchsorted(in_packer, own)], own))
        return CollectorState({"groups": groups}, partial(_rows_of_packers, columns))

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: A packer cannot have such a state.
        """
        is_left = columns_NC[:, 0] < 0
        self._leftover = samples.numbers[columns_NC[:, 0] == _LEFT_OVER].tolist()
        self._alone = samples.numbers[columns_NC[:, 0] == _ALONE].tolist()
        for group, added, *totals, price in counts["groups"]:
            own = (samples.groups == group) & ~is_left
            packer = self._new_packer(group)
            numbers = columns_NC[own, 0]
            state = {"numbers": numbers, "lengths": samples.lengths[own], "added": added}
            packer.restore({**state, "totals": totals, "price": price})
            in_packer, of_group = self._numbers[group]
            in_packer.extend(numbers.tolist())
            of_group.extend(samples.numbers[own].tolist())
            if packer.is_full:
                self._full.add(group)
        if not set(samples.groups[~is_left].tolist()) <= set(self._packers):
            raise ValueError("a sample is of a group that has no packer")


def _rows_of_packers(columns: list[tuple[Int64Array, Int64Array]]) -> Int64Array:
    return np.concatenate([*map(np.column_stack, columns)])
