"""Packs of samples as they come, each opened with the oldest sample of its group."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, OneByOne, Samples
from energon_lite.batching.rules import Packing
from energon_lite.batching.stream import StreamingPacker
from energon_lite.core.arrays import Int64Array


class StreamPacks(OneByOne):
    """Returns a pack of a group as soon as the buffer of the group is full.

    A sample that is longer than a pack, which the rules let pass, gets a separate pack.

    Args:
        packing: capacity, buffer, limits and what becomes of the rest at the end of the data.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._limits = packing.limits
        self._allows_alone = packing.overlong == "alone"
        self._packers: dict[int, StreamingPacker] = {}
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
        packer.add_checked(number, lengths)
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
        return packer

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns a sample that is alone, a pack of a full buffer, or one of the rest."""
        if self._alone:
            return [self._alone.pop(0)]
        while self._full:
            group = min(self._full)
            if self._packers[group].is_full:
                return self._packers[group].next_pack()
            self._full.remove(group)
        return self._rest() if has_ended else None

    def _rest(self) -> list[int] | None:
        """Returns a pack of what is buffered when the data have ended."""
        packing = self._packing
        for packer in self._packers.values():
            while packer.num_buffered:
                pack = packer.next_pack()
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
        """Returns, of each group, the samples added, their total lengths and the price.

        Samples that are left over are saved as if they were still to be packed: they will be left
        over again. Those that wait for a separate pack are known by their lengths.
        """
        counts = ((group, packer.counts()) for group, packer in self._packers.items())
        groups = tuple((g, own["added"], *own["totals"], own["price"]) for g, own in counts)
        return CollectorState({"groups": groups})

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: A packer cannot have such a state.
        """
        is_alone = (samples.lengths > np.array(self._limits)).any(axis=1) & self._allows_alone
        self._alone = samples.numbers[is_alone].tolist()
        for group, added, *totals, price in counts["groups"]:
            own = (samples.groups == group) & ~is_alone
            packer = self._new_packer(group)
            state = {"numbers": np.arange(own.sum()), "lengths": samples.lengths[own]}
            state.update(added=added, totals=totals, price=price)
            packer.restore(state, samples.numbers[own])
            if packer.is_full:
                self._full.add(group)
        if not set(samples.groups[~is_alone].tolist()) <= set(self._packers):
            raise ValueError("a sample is of a group that has no packer")
