"""The next draws of a blend of sources, read together.

A block of few samples costs nearly as much as a block of many. Which sources the next draws take is
known, so their samples are read and decoded together, and stay columns. Where storage is slow, the
kernel is asked for the samples of the draws after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.core.sample_columns import Origin, SampleColumns
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream
from energon_lite.formats.many_readers import advise_at_once, read_at_once
from energon_lite.formats.shards import SLOW_BLOCKS, ShardReader
from energon_lite.sources.order_ahead import OrderAhead
from energon_lite.sources.sample_loader import SMALL_BYTES, DecodedBlock
from energon_lite.sources.source_blocks import AHEAD_BYTES, MOST_AHEAD

# Draws that are read ahead: few at first, since they may open many sources, then four times as
# many, up to a number for each source and one for all. Samples of a source that are read together
# should lie close together.
_FEWEST, _MOST_OF_ONE, _MOST, _MOST_BYTES = 32, 512, 16 << 10, 24 << 20
# Samples, and about how many bytes, that are decoded together.
_SAMPLES, _BYTES = 1024, 2 << 20
# Samples for which a source is read alone, after one that could not be read with others.
_ALONE = 256
# Positions that are ordered at once: of one source at most, and of all.
_MOST_ORDERED, _ORDERED_OF_ALL = 4 * _MOST_OF_ONE, 256 << 10


class Places(Protocol):
    """The cursors of sources by number.

    Attributes:
        positions: where each source stands that has no cursor; never changed in place.
    """

    positions: Int64Array

    def close(self, source: int, /) -> None:
        """Removes a cursor, and notes its position."""

    def __getitem__(self, source: int, /) -> Any:
        """Returns a cursor."""

    def __contains__(self, source: object, /) -> bool:
        """Whether there is a cursor."""
        ...


class _Part(NamedTuple):
    """Samples of one source that are read: which draws take them, epochs and sample indices."""

    source: int
    draws: Int64Array
    epochs: Int64Array
    indices: Int64Array


def common_kind(sources: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns the kind of samples (`SampleLoader.kind`) that most of some sources have."""
    kinds = Counter([source.loader.kind for source in sources])
    del kinds[None]
    return kinds.most_common(1)[0][0] if kinds else None


class DrawsAhead:
    """The samples of the next draws, as far as they can be read together.

    These are small samples of one file each, of one type and kind of file. Others are left to the
    cursor of their source, and so are those that fail: it tries again, and reports what is wrong.

    Args:
        sources: the sources.
        stream: the stream.
        places: where the stream stands in them.
        following: returns the sources of a number of draws, those after the draws that are read.
        kind: the kind of samples that are read together, as `common_kind` returns it.
        mean_bytes: of a sample of the blend.

    Attributes:
        size: how many draws are to be read next.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        stream: Stream,
        places: Places,
        following: Callable[[int], Int64Array],
        kind: tuple[Any, ...],
        mean_bytes: float,
    ) -> None:
        self._sources = sources
        self._kind = kind
        self._stream = stream
        self._places = places
        self._following = following
        most = min(_MOST, _MOST_OF_ONE * len(sources))
        self._largest = max(_FEWEST, min(most, int(_MOST_BYTES / mean_bytes)))
        self.size = _FEWEST
        self._most_ordered = max(1, min(_MOST_ORDERED, _ORDERED_OF_ALL // len(sources)))
        self._all_names = np.empty(len(sources), dtype=object)
        self._origins: dict[str, Origin] = {}
        # None for sources that are never read with others.
        self._orders: dict[int, OrderAhead | None] = {}
        # Until which position a source is read alone.
        self._alone: dict[int, int] = {}
        # For how many reads storage counts as slow, how many of the next draws were asked for
        # ahead, and how many are to be.
        self._num_slow = self._num_asked = 0
        self._num_ahead = _FEWEST
        self._furthest = max(self._largest, min(MOST_AHEAD, int(AHEAD_BYTES / mean_bytes)))
        self._begin(np.empty(0, dtype=np.int64))

    def _begin(self, plan: Int64Array) -> None:
        """Forgets what was read, for the sources of the next draws."""
        self._plan, self._at, self._is_there = plan, 0, b""
        self._parts: list[list[_Part]] = []
        self._block = DecodedBlock([], [], [], [])
        # Of the samples that were read the source, and how many were returned, and counted.
        self._drawn = np.empty(0, dtype=np.int64)
        self._row = self._num_counted = 0

    @property
    def taken(self) -> Int64Array:
        """The sources of samples that were returned, which `places.positions` do not count."""
        return self._drawn[self._num_counted : self._row]

    def settle(self) -> None:
        """Counts all that was returned in `places.positions`."""
        positions = self._places.positions
        self._places.positions = positions + np.bincount(self.taken, minlength=len(positions))
        self._num_counted = self._row

    def is_over(self) -> bool:
        """Whether there are no further draws."""
        return self._at == len(self._plan)

    def read(self, plan: Int64Array) -> None:
        """Reads the samples of the next draws; `plan` has the source of each."""
        since = perf_counter()
        self.settle()
        self._begin(plan)
        self.size = min(4 * self.size, self._largest)
        by_source = argsort(plan)
        all_counts = np.bincount(plan)
        sources = np.flatnonzero(all_counts)
        counts = all_counts[sources]
        firsts = np.cumsum(counts) - counts
        wanted: list[_Part] = []
        num, size = 0, 0.0
        turns = zip(sources.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for source, first, count in turns:
            order = self._order_of(source)
            if order is None:
                continue
            epochs, indices = order.at(int(self._places.positions[source]), count)
            if not len(indices):  # it has ended
                continue
            draws = by_source[first : first + len(indices)]
            wanted.append(_Part(source, draws, epochs, indices))
            num += len(indices)
            size += len(indices) * self._sources[source].mean_bytes
            if num >= _SAMPLES or size >= _BYTES:
                self._read_all(wanted)
                wanted, num, size = [], 0, 0.0
        self._read_all(wanted)
        is_there = np.zeros(len(plan), dtype=np.bool_)
        if self._parts:
            is_there[self._sort()] = True
        self._is_there = is_there.tobytes()
        self._num_asked = max(0, self._num_asked - len(plan))
        self._num_ahead = min(8 * self._num_ahead, self._furthest)
        if self._num_slow and 2 * self._num_asked < self._num_ahead:
            self._num_slow -= 1
            self._advise()
        self._sec_per_row = (perf_counter() - since) / max(1, len(self._drawn))

    def _order_of(self, source: int) -> OrderAhead | None:
        """Returns the order of a source if its next samples are read with those of others."""
        if source not in self._orders:
            spec, order = self._sources[source], None
            is_for_all = spec.loader.kind == self._kind and type(spec.reader) is ShardReader
            if is_for_all and spec.mean_bytes <= SMALL_BYTES:
                order = OrderAhead(spec.order.stream(self._stream), self._most_ordered)
                self._all_names[source] = spec.name
            self._orders[source] = order
        order = self._orders[source]
        if order is not None and source in self._places:
            if self._places[source].position < self._alone.get(source, 0):
                return None
            self._places.close(source)
        return order

    def _advise(self) -> None:
        """Asks the kernel for the samples of the draws after those that were read."""
        num_sources, requests = len(self._sources), []
        draws = self._following(self._num_ahead)
        asked = np.bincount(draws[: self._num_asked], minlength=num_sources)
        wanted = np.bincount(draws, minlength=num_sources)
        begin = self._places.positions + np.bincount(self._plan, minlength=num_sources)
        for source in np.flatnonzero(wanted > asked).tolist():
            order = self._orders.get(source)
            if order is not None and source not in self._places:
                _, indices = order.at(int(begin[source]), int(wanted[source]))
                if len(indices) > asked[source]:
                    requests.append((self._sources[source].reader, indices[asked[source] :]))
        advise_at_once(requests)
        self._num_asked = self._num_ahead

    def _read_all(self, wanted: list[_Part]) -> None:
        """Reads samples of some sources."""
        if not wanted:
            return
        requests = [(self._sources[at].reader, indices, draws) for at, draws, _, indices in wanted]
        block, is_read, is_slow = read_at_once(requests)
        if is_slow:
            self._num_slow = SLOW_BLOCKS
        kept = [part for part, is_in in zip(wanted, is_read, strict=True) if is_in]
        self._maker = self._sources[wanted[0].source].loader
        decoded = self._maker.together(block) if kept else None
        if decoded is None and len(kept) > 1:
            self._read_all(kept[: len(kept) // 2])
            self._read_all(kept[len(kept) // 2 :])
        for part, is_in in zip(wanted, is_read, strict=True):
            if not is_in or (decoded is None and len(kept) == 1):
                self._orders.pop(part.source)
                self._alone[part.source] = int(self._places.positions[part.source]) + _ALONE
        if decoded is not None:
            self._parts.append(kept)
            for column, values in zip(self._block, decoded, strict=True):
                column += values

    def _sort(self) -> Int64Array:
        """Brings what was read into the order of the draws, and returns which they are."""
        sources, *columns = zip(*chain.from_iterable(self._parts), strict=True)
        draws, epochs, indices = map(np.concatenate, columns)
        order = argsort(draws)
        draws = draws[order]
        self._drawn = self._plan[draws]
        self._names = self._all_names[self._drawn].tolist()
        loaders = {self._sources[source].name: self._sources[source].loader for source in sources}
        if not loaders.keys() <= self._origins.keys():  # columns keep those before
            origins = {name: loader.origin for name, loader in loaders.items()}
            self._origins = {**self._origins, **origins}
        self._epochs, self._indices = epochs[order].tolist(), indices[order].tolist()
        if len(self._parts) > 1:  # each is in the order of the draws
            parts = [np.concatenate([part.draws for part in parts]) for parts in self._parts]
            rows = np.argsort(np.concatenate([*map(np.sort, parts)])).tolist()
            self._block = DecodedBlock(*([*map(of.__getitem__, rows)] for of in self._block))
        return draws

    def leave_out(self, ended: set[int]) -> None:
        """Passes over the draws of sources that have ended, of which none was read."""
        is_left = ~np.isin(self._plan[self._at :], list(ended))
        is_there = np.frombuffer(self._is_there, dtype=np.bool_)[self._at :]
        self._plan, self._is_there = self._plan[self._at :][is_left], is_there[is_left].tobytes()
        self._at = 0

    def num_ready(self, n: int) -> int:
        """Counts how many of the next `n` draws follow each other that were read."""
        stop = self._is_there.find(b"\0", self._at, self._at + n)
        return (min(self._at + n, len(self._is_there)) if stop < 0 else stop) - self._at

    def pass_over(self) -> None:
        """Passes over a draw that was not read, which the cursor of its source returns."""
        self._at += not self.is_over()

    def take(self, n: int) -> tuple[SampleColumns, list[RestoreKey]]:
        """Returns the samples of the next `n` draws, all of which were read, and their keys."""
        rows = slice(self._row, self._row + n)
        self._at += n
        self._row += n
        names, indices = self._names[rows], self._indices[rows]
        context, step = context_or(self._stream), self._stream.num_streams
        first = context.sample_index
        context.sample_index = stop = first + n * step
        for name in names:
            cost = context.costs[name]
            cost.draws += 1
            cost.read_sec += self._sec_per_row
        keys = [*zip(names, self._epochs[rows], indices, range(first, stop, step), strict=True)]
        return self._maker.made(self._block, rows, keys, self._origins), keys
