"""The shuffle buffer as arithmetic: positions permuted in windows, twice, half a window apart.

After the first round a sample has moved inside its window; after the second, shifted by half a
window, neighbours across the windows' borders have mixed too. Each sample moves by less than one
and a half windows. A window of any size costs nothing but its own permutation.
"""

from __future__ import annotations

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import random_words
from energon_lite.order.dealing import Segment
from energon_lite.order.permutation import TABLE_LIMIT, Permutation


class WindowShuffle:
    """A bijection of a stream's positions, segment by segment.

    Args:
        window: samples of a window; 0 and 1 leave the order as it is.
        key: of seed, source and stream.
    """

    def __init__(self, window: int, key: int) -> None:
        self.window = window
        self.key = key
        # The tables of the windows that the last call needed, for rounds 1 and 2.
        self._tables: dict[int, tuple[tuple[int, ...], Int64Array]] = {}

    def __call__(self, segment: Segment, positions: Int64Array) -> Int64Array:
        """Returns where the samples at `positions` (ascending, all in `segment`) come from."""
        if self.window <= 1 or segment.stop == segment.start + 1:
            return positions
        local = positions - segment.start
        # Round 2 first: it maps a position to the place of round 1 that comes out there.
        local = self._round(2, segment, local, self.window // 2)
        return self._round(1, segment, local, 0) + segment.start

    def _round(self, number: int, segment: Segment, local: Int64Array, shift: int) -> Int64Array:
        """Permutes within windows that begin at multiples of the window, less `shift`."""
        windows = (local + shift) // self.window
        first, last = int(windows.min()), int(windows.max())
        length = None if segment.stop is None else segment.stop - segment.start
        edges = np.arange(first, last + 2) * self.window - shift
        edges = np.clip(edges, 0, length)
        lows = edges[windows - first]
        if self.window <= TABLE_LIMIT:
            table = self._table(number, segment.number, length, first, edges)
            moved: Int64Array = lows + table[windows - first, local - lows]
            return moved
        result = np.empty_like(local)
        for row, size in enumerate(np.diff(edges).tolist()):
            chosen = windows == first + row
            permutation = Permutation(size, self.key, segment.number, first + row, number)
            result[chosen] = lows[chosen] + permutation(local[chosen] - lows[chosen])
        return result

    def _table(
        self, number: int, segment: int, length: int | None, first: int, edges: Int64Array
    ) -> Int64Array:
        """Returns a permutation of each window's size in a row; shape (windows, window)."""
        name = (segment, first, *edges[[0, -1]].tolist())
        found = self._tables.get(number)
        if found is None or found[0] != name:
            # Each window has its own words, so that it can be computed alone.
            longest = self.window if length is None else min(self.window, length)
            width = -(-longest // 4) * 4
            rows = len(edges) - 1
            words = random_words(
                self.key, segment, number, size=rows * width, skip=first * width
            ).reshape(rows, width)[:, :longest]
            # What lies behind the end of a shorter window sorts behind it.
            words[np.arange(longest) >= np.diff(edges)[:, None]] = np.iinfo(np.uint64).max
            found = (name, np.argsort(words, axis=1, kind="stable"))
            self._tables[number] = found
        return found[1]
