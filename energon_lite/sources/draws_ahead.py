"""The next draws of a blend of sources, read together.

A block of few samples costs nearly as much as a block of many. Which sources the next draws take is
known, so their samples are read and decoded together, and stay columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.sample_columns import SampleColumns
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import StreamContext, context_or
from energon_lite.core.topology import Stream
from energon_lite.order.source_order import StreamOrder
from energon_lite.sources.sample_loader import SMALL_BYTES, DecodedBlock
from energon_lite.storage.many_readers import read_at_once
from energon_lite.storage.shards import ShardReader

# Draws that are read ahead: few at first, then twice as many each time, up to a number for each
# source and one for all. Samples of a source that are read together should lie close together.
_FEWEST, _MOST_OF_ONE, _MOST, _MOST_BYTES = 32, 1024, 16 << 10, 24 << 20
# Samples, and about how many bytes, that are decoded together.
_SAMPLES, _BYTES = 1024, 2 << 20
# Samples for which a source is read alone, after one that could not be read with others.
_ALONE = 256
# Fewer positions cost as much to order.
_FEWEST_ORDERED = 256


class Places(Protocol):
    """The cursors of sources by number, and where a source stands that has no cursor."""

    positions: Int64Array

    def pop(self, source: int, /) -> Any:
        """Removes a cursor."""

    def __getitem__(self, source: int, /) -> Any:
        """Returns a cursor."""

    def __contains__(self, source: object, /) -> bool:
        """Whether there is a cursor."""
        ...


class _Order:
    """The order of a source, of which some positions are looked up at once."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self._start = 0
        self._epochs = self._indices = np.empty(0, dtype=np.int64)

    def at(self, position: int, n: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices of up to `n` positions."""
        first = position - self._start
        if not 0 <= first <= len(self._indices) - n:
            num = n * -(-_FEWEST_ORDERED // n)
            self._start, first = position, 0
            self._epochs, self._indices = self._order.block(position, num)
        return self._epochs[first : first + n], self._indices[first : first + n]


class DrawsAhead:
    """The samples of the next draws, as far as they can be read together.

    These are small samples of one file each, of one type and kind of file, in the page cache.
    Others are left to the cursor of their source, which waits, or reports what is wrong.

    Args:
        sources: the sources.
        stream: the stream.
        places: where the stream stands in them.
        mean_bytes: of a sample of the blend.

    Attributes:
        size: how many draws are to be read next.
    """

    def __init__(
        self, sources: Sequence[Any], stream: Stream, places: Places, mean_bytes: float
    ) -> None:
        self._sources = sources
        self._stream = stream
        self._places = places
        most = min(_MOST, _MOST_OF_ONE * len(sources))
        self._largest = max(_FEWEST, min(most, int(_MOST_BYTES / mean_bytes)))
        self.size = _FEWEST
        self._names = [source.name for source in sources]
        self._loaders = [source.loader for source in sources]
        kinds = Counter([loader.kind for loader in self._loaders])
        del kinds[None]
        self._kind = kinds.most_common(1)[0][0] if kinds else None
        self._orders: dict[int, _Order] = {}
        # Until which position a source is read alone.
        self._alone: dict[int, int] = {}
        self._begin(np.empty(0, dtype=np.int64))

    def _begin(self, plan: Int64Array) -> None:
        """Forgets what was read, for the sources of the next draws."""
        self._plan, self._at = plan, 0
        self._rows: Int64Array = np.full(len(plan), -1)
        self._is_there = b""
        self._block = DecodedBlock([], [], [], [])
        self._epochs: list[int] = []
        self._indices: list[int] = []
        self._sec_per_row = 0.0

    def is_over(self) -> bool:
        """Whether there are no further draws."""
        return self._at == len(self._plan)

    def read(self, plan: Sequence[int]) -> None:
        """Reads the samples of the next draws; `plan` has the source of each."""
        since = perf_counter()
        self._begin(np.array(plan, dtype=np.int64))
        self.size = min(2 * self.size, self._largest)
        by_source = np.argsort(self._plan, kind="stable")
        sources, firsts, counts = np.unique(
            self._plan[by_source], return_index=True, return_counts=True
        )
        wanted: list[tuple[int, Int64Array, Int64Array, Int64Array]] = []
        num, size = 0, 0.0
        turns = zip(sources.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for source, first, count in turns:
            if not self._is_for_all(source):
                continue
            epochs, indices = self._ordered(source, count)
            if not len(indices):  # it has ended
                continue
            wanted.append((source, by_source[first : first + len(indices)], epochs, indices))
            num += len(indices)
            size += len(indices) * self._mean_bytes(source)
            if num >= _SAMPLES or size >= _BYTES:
                self._read_all(wanted)
                wanted, num, size = [], 0, 0.0
        self._read_all(wanted)
        self._is_there = (self._rows >= 0).tobytes()
        self._sec_per_row = (perf_counter() - since) / max(1, len(self._indices))

    def _mean_bytes(self, source: int) -> float:
        facts = self._sources[source]
        return float(facts.num_bytes / facts.order.num_samples)

    def _is_for_all(self, source: int) -> bool:
        """Whether the next samples of a source are read with those of others."""
        spec, places = self._sources[source], self._places
        if self._kind is None or spec.loader.kind != self._kind:
            return False
        if type(spec.reader) is not ShardReader or self._mean_bytes(source) > SMALL_BYTES:
            return False
        if source in places:
            if places[source].position < self._alone.get(source, 0):
                return False
            places.positions[source] = places.pop(source).position
        return True

    def _ordered(self, source: int, n: int) -> tuple[Int64Array, Int64Array]:
        order = self._orders.get(source)
        if order is None:
            order = self._orders[source] = _Order(self._sources[source].order.stream(self._stream))
        return order.at(int(self._places.positions[source]), n)

    def _read_all(self, wanted: list[tuple[int, Int64Array, Int64Array, Int64Array]]) -> None:
        """Reads samples of some sources: (source, its draws, epochs, indices) each."""
        if not wanted:
            return
        requests = [(self._sources[source].reader, indices) for source, *_, indices in wanted]
        block, is_read = read_at_once(requests)
        kept = [part for part, is_in in zip(wanted, is_read, strict=True) if is_in]
        decoded = self._sources[wanted[0][0]].loader.together(block) if kept else None
        if decoded is None and len(kept) > 1:
            self._read_all(kept[: len(kept) // 2])
            self._read_all(kept[len(kept) // 2 :])
        for part, is_in in zip(wanted, is_read, strict=True):
            if not is_in or (decoded is None and len(kept) == 1):
                source = part[0]
                self._orders.pop(source)
                self._alone[source] = int(self._places.positions[source]) + _ALONE
        if decoded is None:
            return
        _, draws, epochs, indices = ([*column] for column in zip(*kept, strict=True))
        first = len(self._indices)
        self._epochs += np.concatenate(epochs).tolist()
        self._indices += np.concatenate(indices).tolist()
        self._rows[np.concatenate(draws)] = np.arange(first, len(self._indices))
        for column, values in zip(self._block, decoded, strict=True):
            column += values

    def leave_out(self, ended: set[int]) -> None:
        """Passes over the draws of sources that have ended."""
        is_left = ~np.isin(self._plan[self._at :], list(ended))
        self._plan = self._plan[self._at :][is_left]
        self._rows = self._rows[self._at :][is_left]
        self._is_there, self._at = (self._rows >= 0).tobytes(), 0

    def num_ready(self, n: int) -> int:
        """Counts how many of the next `n` draws follow each other that were read."""
        stop = self._is_there.find(b"\0", self._at, self._at + n)
        return (min(self._at + n, len(self._is_there)) if stop < 0 else stop) - self._at

    def num_missing(self, n: int) -> int:
        """Counts how many of the next `n` draws follow each other that were not read."""
        stop = self._is_there.find(b"\1", self._at, self._at + n)
        return n if stop < 0 else stop - self._at

    def pass_over(self) -> None:
        """Passes over a draw that was not read, which the cursor of its source returns."""
        self._at += not self.is_over()

    def take(self, n: int) -> tuple[SampleColumns, list[RestoreKey]]:
        """Returns the samples of the next `n` draws, all of which were read, and their keys."""
        drawn = self._plan[self._at : self._at + n]
        rows = self._rows[self._at : self._at + n].tolist()
        self._at += n
        np.add.at(self._places.positions, drawn, 1)
        numbers = drawn.tolist()
        context, step = context_or(self._stream), self._stream.num_streams
        first = context.sample_index
        context.sample_index = stop = first + n * step
        names = [self._names[number] for number in numbers]
        loaders = [self._loaders[number] for number in numbers]
        for name, num in Counter(names).items():
            self._count(context, name, num)
        indices = [self._indices[row] for row in rows]
        epochs = [self._epochs[row] for row in rows]
        keys = [*zip(names, epochs, indices, range(first, stop, step), strict=True)]
        block = DecodedBlock(*([column[row] for row in rows] for column in self._block))
        return loaders[0].made_of_many(loaders, block, keys, indices), keys

    def take_one(self) -> tuple[Any, RestoreKey]:
        """Returns the sample of the next draw, which was read, and its key."""
        number, row = self._plan[self._at], self._rows[self._at]
        self._at += 1
        self._places.positions[number] += 1
        name, context = self._names[number], context_or(self._stream)
        key = (name, self._epochs[row], self._indices[row], context.sample_index)
        context.sample_index += self._stream.num_streams
        self._count(context, name, 1)
        return self._loaders[number].made_one(self._block, row, key), key

    def _count(self, context: StreamContext, name: str, num: int) -> None:
        cost = context.cost(name)
        cost.draws += num
        cost.read_sec += num * self._sec_per_row
