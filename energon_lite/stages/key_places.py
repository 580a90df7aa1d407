"""Restore keys by the places of samples in the orders of their sources, which are arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import AnyDataset
from energon_lite.core.key_columns import PLACE
from energon_lite.core.state import MAX_COUNT, RestoreKey
from energon_lite.core.topology import Stream
from energon_lite.sources.source import sources_in

# Samples of a source that are looked for together, at least; how many parts of its order are
# searched for them; and places without a sample between two that are looked up together.
_FEWEST, _MOST_PARTS, _GAP = 16, 8, 1024


class KeyPlaces:
    """The places of the samples that a stream has read, in the orders of their sources.

    A key `(source, epoch, index, draw)` of a sample at a known place is saved as
    `(source, "place", place, draw)`: places rise, and take a few bits where epoch and index take
    twenty. A place is that in the source alone, so that it stays right in an edited blend.

    Args:
        dataset: the sources, or stages over them.
        stream: the stream.
    """

    def __init__(self, dataset: AnyDataset, stream: Stream) -> None:
        orders = {source.name: source.order for source in sources_in(dataset)}
        self._order = cache(lambda name: orders[name].stream(stream))
        self._names = frozenset(orders)
        self._next: dict[str, int] = {}  # by source; -1 where it was lost

    def places(self, name: Any, epochs: Int64Array, indices: Int64Array) -> Int64Array:
        """Returns the places of the samples that were read next of a source; -1 if unknown.

        Some may be missing in between: they failed, or were skipped.

        Args:
            name: of the source.
            epochs: shape (N,).
            indices: shape (N,).
        """
        num, first = len(epochs), self._next.get(name, 0)
        found = np.full(num, -1)
        if name not in self._names or num < _FEWEST or first < 0:
            return found
        for _ in range(_MOST_PARTS):
            ahead = np.stack(self._order(name).block(first, 2 * num))
            if not ahead.shape[1]:
                break
            radix = 1 + max(ahead[1].max(), indices.max())
            codes, wanted = ahead[0] * radix + ahead[1], epochs * radix + indices
            sorter = np.argsort(codes)
            at = sorter[np.minimum(np.searchsorted(codes, wanted, sorter=sorter), len(codes) - 1)]
            is_there = codes[at] == wanted
            found[is_there] = first + at[is_there]
            first += ahead.shape[1]
            if found[-1] >= 0 or ahead.shape[1] < 2 * num:
                break
        self._next[name] = int(found.max()) + 1 or -1
        return found

    def restored(self, keys: Sequence[RestoreKey]) -> tuple[list[RestoreKey], list[int]]:
        """Returns saved restore keys in full, and their places, or -1.

        Raises:
            LookupError, ValueError: A key is of no source here, or at no place that there is.
        """
        full, places = list(keys), [-1] * len(keys)
        rows: dict[str, list[int]] = {}
        for row, key in enumerate(keys):
            if len(key) == 4 and key[1] == PLACE:
                rows.setdefault(key[0], []).append(row)
        for name, own in rows.items():
            found = np.array([keys[row][2] for row in own], np.int64)
            if (np.diff(found, prepend=-1, append=MAX_COUNT) < 1).any():
                raise ValueError(f"the places in source {name!r} do not rise")
            self._next[name] = int(found[-1]) + 1
            epochs, indices = np.empty((2, len(own)), np.int64)
            for part in np.split(np.arange(len(own)), np.flatnonzero(np.diff(found) > _GAP) + 1):
                first, last = found[part[[0, -1]]].tolist()
                block = self._order(name).block(first, last - first + 1)
                epochs[part], indices[part] = (column[found[part] - first] for column in block)
            columns = own, found.tolist(), epochs.tolist(), indices.tolist()
            for row, place, epoch, index in zip(*columns, strict=True):
                full[row], places[row] = (name, epoch, index, keys[row][3]), place
        return full, places
