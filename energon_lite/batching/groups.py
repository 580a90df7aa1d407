"""Lists of samples of one group, each of the size of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import Collector, CollectorState, Samples
from energon_lite.core.arrays import Int64Array


class GroupCollector(Collector):
    """Returns the samples of a group when there are as many as its size.

    At the end of the data the groups come in the order in which their first samples came.

    Length: the size of the sample's group.

    Args:
        batch_size: size of all groups; None if they differ.
        drops_last: whether lists that are not full at the end are dropped.
    """

    def __init__(self, batch_size: int | None, drops_last: bool = False) -> None:
        self._batch_size = batch_size
        self._drops_last = drops_last
        self._lists: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self._full: int | None = None

    @property
    def num_wanted(self) -> int:
        """Samples up to the first list that could be full."""
        if self._batch_size is None:
            return 1
        return self._batch_size - max(map(len, self._lists.values()), default=0)

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the lists of their groups."""
        columns = (
            samples.numbers.tolist(),
            samples.groups.tolist(),
            samples.lengths[:, 0].tolist(),
        )
        for number, group, size in zip(*columns, strict=True):
            members = self._lists.setdefault(group, [])
            members.append(number)
            self._sizes[group] = size
            if len(members) == size:
                self._full = group
        return ()

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns a full list; at the end of the data also others."""
        group, self._full = self._full, None
        if group is None and has_ended and not self._drops_last:
            group = next(iter(self._lists), None)
        return None if group is None else self._lists.pop(group)

    def leftover(self) -> Sequence[int]:
        """Returns the samples of lists that are not full."""
        rest = [number for members in self._lists.values() for number in members]
        self._lists.clear()
        return rest

    def state(self) -> CollectorState:
        """Returns the samples; their lists follow from their groups."""
        numbers = [number for members in self._lists.values() for number in members]
        return CollectorState(
            {}, np.array(numbers, np.int64), np.empty((len(numbers), 0), np.int64)
        )

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: A list is full: between two it cannot be.
        """
        self.add(samples)
        if any(len(members) >= self._sizes[group] for group, members in self._lists.items()):
            raise ValueError("a list is longer than its group's size")
