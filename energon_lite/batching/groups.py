"""Lists of samples of one group, each of the size of its group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, OneByOne, Samples
from energon_lite.core.arrays import Int64Array


class GroupCollector(OneByOne):
    """Returns the samples of a group when there are as many as its size.

    At the end of the data the groups come in the order in which their first samples came.

    Length: the size of the sample's group.

    Args:
        drops_last: whether lists that are not full at the end are dropped.
    """

    def __init__(self, drops_last: bool = False) -> None:
        self._drops_last = drops_last
        self._lists: dict[int, list[int]] = {}
        self._full: int | None = None

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Puts a sample into the list of its group."""
        members = self._lists.setdefault(group, [])
        members.append(number)
        if len(members) == lengths[0]:
            self._full = group
            return True
        return False

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
        if self._full is not None:
            raise ValueError("a list is longer than its group's size")
