"""Which group each cycle of a run has, such as a modality."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Weights

# Cycles that are worked out together.
_BLOCK = 256


class GroupSchedule:
    """Which group each cycle of a run has: the same for all streams, so for all ranks.

    Every stretch from the start is within 5 of each group's share.

    Args:
        shares: of the groups, not all 0.
        seed: of the run.
        pass_index: number of the pass over finite data.

    Example:
        >>> schedule = GroupSchedule([3, 1], seed=0)
        >>> sum(schedule.group(cycle) for cycle in range(400))
        101
    """

    def __init__(self, shares: Sequence[float], seed: int, pass_index: int = 0) -> None:
        # All streams are one here: that is the point of it.
        self._order = BlendOrder(
            Weights([float(share) for share in shares]),
            "exact",
            key_of("group_schedule", seed),
            Stream(0, 1, pass_index),
        )
        self._first = 0
        self._groups: list[int] = []

    def group(self, cycle: int) -> int:
        """Returns the number of the group that a cycle has."""
        if not self._first <= cycle < self._first + len(self._groups):
            self._first = cycle // _BLOCK * _BLOCK
            self._groups = self._order.block(self._first, _BLOCK).tolist()
        return self._groups[cycle - self._first]
