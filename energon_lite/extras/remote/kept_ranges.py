"""Decides which of the ranges that were fetched stay on this machine.

The ranges that came last are staged: samples of them are still to be drawn. Older ones are kept for
the next epoch of their source, while there is room. No future is simulated: a source of N samples
that has the share w of all draws returns after N / w draws, so what returns soonest is kept. Among
ranges of one source, those that came first stay, as each of them is needed once in each epoch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes of a copy.

    Attributes:
        path: of the copy.
        address: of the object.
        start: first byte.
        stop: byte after the last.
        num_bytes: how many of them are on the disk.
    """

    path: Path
    address: str
    start: int
    stop: int
    num_bytes: int


class KeptRanges:
    """The ranges on this machine.

    Args:
        max_bytes: of all of them.
        take_away: called for each that does not stay.

    Attributes:
        staged_bytes: how much of what came last stays in any case; None for all there is room for.
    """

    staged_bytes: int | None = None

    def __init__(self, max_bytes: int, take_away: Callable[[Range], None]) -> None:
        self.max_bytes, self._take_away = max_bytes, take_away
        self._staged: deque[Range] = deque()
        self._num_staged = self._num_kept = 0
        self._kept: dict[str, list[Range]] = {}
        self._returns: dict[str, float] = {}
        self._source_of: dict[str, str] = {}

    def expect(self, returns: Mapping[str, float]) -> None:
        """Notes after how many draws some sources return, by the start of their addresses."""
        self._returns.update(returns)
        kept = [range_ for ranges in self._kept.values() for range_ in ranges]
        self._kept, self._num_kept = {}, 0
        self._source_of = {}
        for range_ in kept:
            self.keep(range_)

    def source_of(self, address: str) -> str:
        """Returns the source of an object; empty if none is known."""
        if address not in self._source_of:
            parts = address.split("/")
            above = ("/".join(parts[:number]) for number in range(len(parts), 2, -1))
            self._source_of[address] = next((name for name in above if name in self._returns), "")
        return self._source_of[address]

    def keep(self, range_: Range) -> None:
        """Adds a range that is not staged."""
        self._kept.setdefault(self.source_of(range_.address), []).append(range_)
        self._num_kept += range_.num_bytes

    def add(self, range_: Range) -> None:
        """Adds a range that was fetched now, and takes away what does not stay for it."""
        self._staged.append(range_)
        self._num_staged += range_.num_bytes
        most = self.max_bytes if self.staged_bytes is None else self.staged_bytes
        while self._num_staged > min(most, self.max_bytes):
            oldest = self._staged.popleft()
            self._num_staged -= oldest.num_bytes
            self.keep(oldest)
        self.shrink(self.max_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Takes ranges away until the kept ones and the staged ones have at most `max_bytes`."""
        while self._kept and self._num_staged + self._num_kept > max_bytes:
            latest = max(self._kept, key=lambda name: self._returns.get(name, math.inf))
            last = self._kept[latest].pop()
            if not self._kept[latest]:
                del self._kept[latest]
            self._num_kept -= last.num_bytes
            self._take_away(last)

    def shrink_by(self, num_bytes: int) -> int:
        """Takes away ranges of a number of bytes; returns how many bytes are left."""
        self.shrink(max(0, self._num_staged + self._num_kept - num_bytes))
        return self._num_staged + self._num_kept
