"""What caches fetch of a sequence of draws: the best one, LRU, and one where first in stays."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any


def lru(draws: Sequence[Hashable], capacity: int) -> int:
    """Counts the draws that are fetched if what was used longest ago leaves."""
    held: OrderedDict[Hashable, None] = OrderedDict()
    fetched = 0
    for sample in draws:
        if sample in held:
            held.move_to_end(sample)
            continue
        fetched += 1
        held[sample] = None
        if len(held) > capacity:
            held.popitem(last=False)
    return fetched


def first_stays(draws: Sequence[Hashable], capacity: int) -> int:
    """Counts the draws that are fetched if what came first is kept for ever."""
    held = set[Hashable]()
    fetched = 0
    for sample in draws:
        fetched += sample not in held
        if len(held) < capacity:
            held.add(sample)
    return fetched


def belady(draws: Sequence[Hashable], capacity: int) -> int:
    """Counts the draws that any cache must fetch: it keeps what is drawn again soonest.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    never = len(draws)
    next_draws, last = [never] * never, dict[Hashable, int]()
    for place in range(never - 1, -1, -1):
        next_draws[place] = last.get(draws[place], never)
        last[draws[place]] = place
    held: dict[Hashable, int] = {}  # when each is drawn again
    farthest: list[tuple[int, Any]] = []  # with entries that no longer hold
    fetched = 0
    for sample, again in zip(draws, next_draws, strict=True):
        fetched += sample not in held
        held[sample] = again
        heapq.heappush(farthest, (-again, sample))
        while len(held) > capacity:
            place, oldest = heapq.heappop(farthest)
            if held.get(oldest) == -place:
                del held[oldest]
    return fetched
