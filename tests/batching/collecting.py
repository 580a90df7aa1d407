"""Runs collectors without data: samples are numbers, groups and lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import Collector, Samples

Make = Callable[[], Collector]


def through_json(counts: dict[str, Any]) -> dict[str, Any]:
    """What a state file makes of counts: tuples come back as tuples."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return {name: tuples(value) for name, value in json.loads(json.dumps(counts)).items()}


class Run:
    """Feeds a collector with samples, and checks the contract on the way.

    Attributes:
        lists: those that were returned; `~n` for a repetition.
        reads: samples that were read before each list.
        dropped: samples that the collector did not take, and those left over at the end.
    """

    def __init__(self, make: Make, groups: Sequence[int], lengths: Sequence[int]) -> None:
        self.make, self.collector = make, make()
        self.groups, self.lengths = np.array(groups), np.array(lengths)
        self.num_read, self.has_ended = 0, False
        self.buffered: set[int] = set()
        self.kept: set[int] = set()
        self.lists: list[list[int]] = []
        self.reads: list[int] = []
        self.dropped: list[int] = []

    def samples(self, numbers: Any) -> Samples:
        own = np.array(numbers, np.int64)
        return Samples(own, self.groups[own], self.lengths[own][:, None])

    def step(self) -> bool:
        """Adds samples up to the next list; whether there is one."""
        while (found := self.collector.next(len(self.lists), self.has_ended)) is None:
            if self.has_ended:
                left = list(self.collector.leftover())
                self._forget(left)
                self.dropped += left
                assert not self.buffered
                return False
            num = self.collector.num_wanted
            assert num >= 1
            stop = min(self.num_read + num, len(self.groups))
            numbers = range(self.num_read, stop)
            self.has_ended = self.num_read + num > len(self.groups)
            if numbers:
                refused = list(self.collector.add(self.samples(numbers)))
                self.buffered |= set(numbers) - set(refused)
                self.dropped += refused
            self.num_read = stop
        self._forget([number for number in found if number >= 0])
        assert {~number for number in found if number < 0} <= self.kept | set(found)
        self.kept = set(self.collector.kept)
        self.lists.append(list(found))
        self.reads.append(self.num_read)
        return True

    def _forget(self, numbers: list[int]) -> None:
        assert set(numbers) <= self.buffered
        assert len(set(numbers)) == len(numbers)
        self.buffered -= set(numbers)

    def all(self) -> Run:
        while self.step():
            pass
        return self

    def resume(self, removed: Callable[[int], bool] | None = None) -> None:
        """Goes on with another collector, from the state of this one."""
        state = self.collector.state()
        counts, rows = state.counts, state.rows(sorted(self.buffered))
        numbers, columns = rows[:, 0], rows[:, 1:]
        assert set(numbers.tolist()) == self.buffered | self.kept
        assert len(set(numbers.tolist())) == len(numbers)
        order = np.argsort(numbers)
        if removed is not None:
            order = order[[not removed(n) for n in numbers[order].tolist()]]
        self.collector = self.make()
        self.collector.restore(through_json(counts), self.samples(numbers[order]), columns[order])
        assert self.kept >= set(self.collector.kept)
        self.kept = set(self.collector.kept)
        self.buffered = set(numbers[order].tolist()) - self.kept


def check_resume(make: Make, groups: Sequence[int], lengths: Sequence[int]) -> Run:
    """Each sample is in one list or dropped; resuming after each list changes nothing."""
    whole = Run(make, groups, lengths).all()
    numbers = [n for found in whole.lists for n in found if n >= 0]
    assert sorted(numbers + whole.dropped) == list(range(len(groups)))
    resumed = Run(make, groups, lengths)
    resumed.resume()
    while resumed.step():
        resumed.resume()
    assert (resumed.lists, resumed.dropped) == (whole.lists, whole.dropped)
    assert resumed.reads == whole.reads
    return whole
