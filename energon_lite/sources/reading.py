"""Reads what an order refers to, for all of its sources together.

A block of few samples costs nearly as much as a block of many. So the small samples of the next
draws are read and decoded together, whichever sources they are of, and stay columns. All others are
read in blocks of their source, and made one by one when it is their turn. What cannot be read, or
not be decoded, is skipped and counted then; its draw is used up.

Where storage is slow, the kernel reads what comes after that into its cache, while samples are
decoded: exactly these bytes are asked for, sorted by place, by `posix_fadvise`, which does not
wait. Where files are in the page cache, nothing is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.core.dataset import Cursor
from energon_lite.core.sample_columns import Columns, Origin, samples_of
from energon_lite.core.samples import SourceInfo
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import FunctionRun
from energon_lite.formats.many_readers import read_at_once
from energon_lite.formats.shards import MAX_BLOCK_BYTES, SLOW_BLOCKS, Block, ShardReader
from energon_lite.formats.tar import key_of_members
from energon_lite.sources.refs import RefOrder, Refs
from energon_lite.sources.sample_loader import SMALL_BYTES, DecodedBlock

T = TypeVar("T")

# Samples that are looked up and read together: few at first, so that the first comes at once and a
# short pass costs little, then four times as many each time. Of one source, of a blend for each of
# its sources, and of all; and about how many bytes of those that are decoded together.
_FEWEST, _MOST_OF_ONE, _MOST_OF_EACH, _MOST = 32, 4096, 512, 16 << 10
_MOST_BYTES = 24 << 20
# Samples, and about how many bytes, that are decoded in one go.
_SAMPLES, _BYTES = 1024, 2 << 20
# Bytes that the blocks of single sources hold together, and each of them at least.
_HELD_BYTES, _LEAST_BYTES = 4 * MAX_BLOCK_BYTES, 64 << 10
# The most that is asked for ahead.
_AHEAD_BYTES, _MOST_AHEAD = 16 << 20, 16 << 10
# Small samples that are made before the hooks get the first of them.
_MADE_AT_ONCE = 32


def facts_of(sources: Sequence[Any]) -> tuple[tuple[Any, ...] | None, float]:
    """Returns the kind of samples that most of several sources have, and the mean bytes of all."""
    kinds = Counter([source.loader.kind for source in sources])
    del kinds[None]
    kind = kinds.most_common(1)[0][0] if kinds and len(sources) > 1 else None
    num_samples = sum(source.order.num_samples for source in sources)
    return kind, max(1.0, sum(source.num_bytes for source in sources) / max(1, num_samples))


class _Part:
    """The samples of one source in a read, in blocks; or those of several that are one block.

    Attributes:
        block: the block that is read, if its samples are made one by one.
        decoded: the same if they were decoded together.
        row: the next sample in it.
        num_rows: samples in it.
        num_at_once: samples that may be made together.
        sec_per_row: what reading the block took, for each sample.
        is_well: whether a sample could be made since the last one that failed.
    """

    block: Block | None = None
    decoded: DecodedBlock | None = None
    row = num_rows = 0
    num_at_once = 1
    sec_per_row = 0.0
    is_well = False

    def __init__(self, spec: Any, blocks: Iterator[Block], num_left: int = 0) -> None:
        self.spec = spec
        self._blocks, self._num_left = blocks, num_left

    def read_on(self) -> None:
        """Reads the next block, and decodes its samples if this can be done for all at once."""
        since = perf_counter()
        self.block = self.decoded = None  # keeps no bytes while it reads
        block = next(self._blocks)
        self._num_left -= len(block.members)
        if not self._num_left:
            self._blocks = iter(())  # has a buffer for the next block
        decoded = self.spec.loader.together(block)
        if decoded:
            self.begin(decoded, since)
            return
        self.block, self.num_rows = block, len(block.members)
        is_small = type(block.data) is memoryview and len(block.data) <= SMALL_BYTES * self.num_rows
        self.num_at_once = _MADE_AT_ONCE if is_small else 1
        self.row, self.sec_per_row = 0, (perf_counter() - since) / self.num_rows

    def begin(self, decoded: DecodedBlock, since: float) -> None:
        """Begins with samples that were decoded together."""
        self.decoded, self.row, self.num_rows = decoded, 0, len(decoded.keys)
        self.sec_per_row, self.is_well = (perf_counter() - since) / max(1, self.num_rows), True


_NO_PART = _Part(None, iter(()))


# Samples of some sources that are decoded together: for each source their places among all, (N,).
_Wanted = list[tuple[int, Int64Array]]


class ReadCursor(Cursor[T]):
    """A stream's place among the samples of some sources, in their order.

    Args:
        order: which sample is next.
        stream: the stream.
    """

    key: RestoreKey = ()

    def __init__(self, order: RefOrder, stream: Stream) -> None:
        self.order = order
        self._stream = stream
        num_sources, mean = len(order.sources), max(1.0, order.mean_bytes)
        most: float = _MOST_OF_ONE / stream.num_beside
        if num_sources > 1:
            most = min(_MOST, max(most, _MOST_OF_EACH * num_sources))
            most = min(most, _MOST_BYTES / mean) if order.kind else most
        self._size, self._largest = _FEWEST, max(_FEWEST, int(stream.share * most))
        bound = min(filter(None, [own.reader.ahead_bytes for own in order.sources]), default=0)
        self._block_bytes = min(MAX_BLOCK_BYTES, bound // 4 or MAX_BLOCK_BYTES)
        furthest = min(_MOST_AHEAD, int(stream.share * (bound or _AHEAD_BYTES) / mean))
        self._furthest = max(1 if bound else _FEWEST, furthest)
        self._num_ahead = min(4 * _FEWEST, self._furthest)
        self._runs: dict[str, FunctionRun] = {}
        self._origins: dict[str, Origin] = {}
        self._num_slow = 0
        self._forget()

    def _forget(self) -> None:
        """Forgets all that was read and asked for."""
        self._begin()
        # How many of the references from the next one on were asked for ahead.
        self._num_asked = 0

    def _begin(self) -> None:
        """Forgets all that was read."""
        # The next of the references that were looked up, and how many there are.
        self._at = self._num_refs = 0
        # What is read by source; and what was decoded together.
        self._parts: dict[int, _Part] = {}
        self._group = _NO_PART

    def __next__(self) -> T:
        """Returns the next sample that can be read."""
        order = self.order
        while order.num_due > 0:
            if self._at == self._num_refs:
                self._read()
            at, source = self._at, self._sources[self._at]
            part = self._parts.get(source, self._group)
            if part.decoded is None or part.row == part.num_rows:
                samples: list[T] = samples_of(self._some(part, at + 1)[0])
                if samples:
                    return samples[0]
                continue
            # Columns of one row would cost three times that.
            row, part.row = part.row, part.row + 1
            (self.key,) = self._keys(part, at + 1)
            loader = order.sources[source].loader
            return loader.made_one(part.decoded, row, self.key)  # type: ignore[no-any-return]
        raise StopIteration

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        """Returns some of the next samples; none if they cannot be read."""
        n = min(n, self.order.num_due)
        if n <= 1:
            return [next(self)], [self.key]
        if self._at == self._num_refs:
            self._read()
        part = self._parts.get(self._sources[self._at], self._group)
        return self._some(part, min(self._at + n, self._ends[self._at]))

    def _keys(self, part: _Part, stop: int) -> list[RestoreKey]:
        """Passes over the references up to `stop`, and returns their restore keys."""
        at, self._at = self._at, stop
        self._num_asked -= stop - at
        draws = self.order.draws(stop - at, self._context)
        self.order.pass_over(stop - at)
        own, costs = slice(at, stop), self._context.costs
        names, seconds = self._names[own], part.sec_per_row
        for name, num in Counter(names).items() if len(names) != 1 else ((names[0], 1),):
            costs[name].draws += num
            costs[name].read_sec += num * seconds
        return [*zip(names, self._epochs[own], self._indices[own], draws, strict=True)]

    def _some(self, part: _Part, stop: int) -> tuple[Columns | list[T], list[RestoreKey]]:
        """Returns samples of a part up to `stop`, as far as they are read."""
        if part.row == part.num_rows:
            self._read_on(part)
        at, row = self._at, part.row
        num = min(stop - at, part.num_rows - row)
        if part.decoded is None:
            num = min(num, part.num_at_once)
        part.row += num
        keys = self._keys(part, at + num)
        if part.decoded is None:
            return self._made_singly(part, row, keys)
        self.key, loader = keys[-1], self.order.sources[self._sources[at]].loader
        return loader.made(part.decoded, slice(row, row + num), keys, self._origins), keys

    def _read_on(self, part: _Part) -> None:
        """Reads the next block of a source; asks for what follows if it had to be waited for."""
        try:
            part.read_on()
        except BaseException:
            self._forget()  # a caller that continues after the error reads again
            raise
        if part.spec.reader.is_slow:
            self._ask(part.num_rows if len(self.order.sources) == 1 else 0)

    def _made_singly(
        self, part: _Part, first: int, keys: list[RestoreKey]
    ) -> tuple[list[T], list[RestoreKey]]:
        """Makes samples that were not decoded; counts those that fail."""
        block: Any = part.block
        samples, made, cost = list[T](), list[RestoreKey](), self._context.costs[part.spec.name]
        since = perf_counter()
        for row, key in enumerate(keys, first):
            members, shard, place = block.members[row], block.shards[row], block.places[row]
            try:
                samples.append(part.spec.loader(block.data, members, shard, place, key))
            except Exception as error:
                self._count_skip(error, part, (members, shard, place), key)
            else:
                part.is_well, self.key = True, key
                made.append(key)
        cost.read_sec += perf_counter() - since
        return samples, made

    def _count_skip(
        self, error: Exception, part: _Part, where: tuple[Any, str, int], key: RestoreKey
    ) -> None:
        """Counts a sample that could not be read, under its key if that could be."""
        run = self._runs.setdefault(part.spec.name, FunctionRun(part.spec.function))
        if part.is_well:
            run.failures, part.is_well = 0, False
        members, shard, place = where
        sample_key = key_of_members(members) or f"{shard}[{place}]"
        info = SourceInfo(str(part.spec.reader.root), key[2], shard, ())
        described = {"__key__": sample_key, "__sources__": (info,)}
        run.count_skip(error, key, described, is_noted=True)

    def _read(self) -> None:
        """Looks up the next references, and reads those that are decoded together.

        Raises:
            StopIteration: There is none.
        """
        self._begin()
        since, order = perf_counter(), self.order
        self._context = context_or(self._stream)
        refs = order.ahead(self._size)
        num = len(refs.sources)
        if not num:
            raise StopIteration
        self._size = min(4 * self._size, self._largest)
        counts = np.bincount(refs.sources)
        by_source, numbers = argsort(refs.sources), np.flatnonzero(counts).tolist()
        self._note_origins(numbers)
        found: list[tuple[_Wanted, DecodedBlock]] = []
        wanted: _Wanted = []
        first = num_wanted = size = 0
        for source in numbers:
            rows = by_source[first : first + int(counts[source])]
            first += len(rows)
            if not self._is_for_all(source):
                self._parts[source] = self._part(source, refs.indices[rows], num)
                continue
            wanted.append((source, rows))
            num_wanted += len(rows)
            size += len(rows) * order.sources[source].mean_bytes
            if num_wanted >= _SAMPLES or size >= _BYTES:
                self._decode(refs, wanted, found)
                wanted, num_wanted, size = [], 0, 0
        self._decode(refs, wanted, found)
        self._group = _Part(None, iter(()))
        self._group.begin(_in_draw_order(found), since)
        self._sources, self._epochs, self._indices = (column.tolist() for column in refs)
        name_of = {source: order.sources[source].name for source in numbers}
        self._names = [*map(name_of.__getitem__, self._sources)]
        self._ends = _ends_of_runs(refs.sources, [*self._parts])
        self._num_refs = num
        if found and self._num_slow:
            self._num_slow -= 1
            self._ask(num)

    def _note_origins(self, numbers: list[int]) -> None:
        """Notes what the samples of sources have in common."""
        specs = [self.order.sources[source] for source in numbers]
        new = [spec for spec in specs if spec.name not in self._origins and spec.loader.kind]
        if new:  # columns keep those before
            self._origins = self._origins | {spec.name: spec.loader.origin for spec in new}

    def _is_for_all(self, source: int) -> bool:
        """Whether samples of a source can be decoded with those of others."""
        spec, kind = self.order.sources[source], self.order.kind
        is_kind = kind is not None and spec.loader.kind == kind
        return is_kind and type(spec.reader) is ShardReader and spec.mean_bytes <= SMALL_BYTES

    def _part(self, source: int, indices: Int64Array, num: int) -> _Part:
        share = self._stream.share * len(indices) / num
        max_bytes = min(self._block_bytes, max(_LEAST_BYTES, int(share * _HELD_BYTES)))
        spec = self.order.sources[source]
        return _Part(spec, spec.reader.blocks(indices, max_bytes), len(indices))

    def _decode(
        self, refs: Refs, wanted: _Wanted, found: list[tuple[_Wanted, DecodedBlock]]
    ) -> None:
        """Reads and decodes samples of some sources; what fails is left to its source."""
        if not wanted:
            return
        sources = self.order.sources
        requests = [(sources[at].reader, refs.indices[rows], rows) for at, rows in wanted]
        block, is_read, is_slow = read_at_once(requests)
        if is_slow:
            self._num_slow = SLOW_BLOCKS
        kept = [part for part, is_in in zip(wanted, is_read, strict=True) if is_in]
        decoded = sources[wanted[0][0]].loader.together(block) if kept else None
        if decoded is not None:
            found.append((kept, decoded))
        elif len(kept) > 1:
            self._decode(refs, kept[: len(kept) // 2], found)
            self._decode(refs, kept[len(kept) // 2 :], found)
        for (source, rows), is_in in zip(wanted, is_read, strict=True):
            if not is_in or (decoded is None and len(kept) == 1):
                self._parts[source] = self._part(source, refs.indices[rows], len(refs.indices))
            elif decoded is not None and (run := self._runs.get(sources[source].name)):
                run.failures = 0

    def _ask(self, num_read: int) -> None:
        """Asks the kernel for the samples after the next `num_read`, which are read."""
        if 2 * (self._num_asked - num_read) > self._num_ahead:
            return
        num = num_read + self._num_ahead
        found = self.order.ahead(num)
        refs = found.behind(max(num_read, self._num_asked))
        self._num_asked = max(self._num_asked, len(found.sources))
        self._num_ahead = min(8 * self._num_ahead, self._furthest)
        for source in np.unique(refs.sources).tolist():
            reader = self.order.sources[source].reader
            reader.advise(refs.indices[refs.sources == source])

    def snapshot(self) -> Snapshot:
        """Returns the place of the order."""
        return self.order.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a place of the order."""
        self.order.restore(snapshot)
        self._forget()


def _ends_of_runs(sources: Int64Array, alone: list[int]) -> list[int]:
    """Returns for each place where its run ends: samples of one source, or of none of `alone`."""
    runs = np.where(np.isin(sources, alone), sources, -1)
    edges = np.flatnonzero(np.diff(runs)) + 1
    edges = np.append(edges, len(runs))
    ends: list[int] = np.repeat(edges, np.diff(edges, prepend=0)).tolist()
    return ends


def _in_draw_order(found: list[tuple[_Wanted, DecodedBlock]]) -> DecodedBlock:
    """Puts samples that were decoded in several goes into their order."""
    if len(found) == 1:
        return found[0][1]
    block = DecodedBlock([], [], [], [])
    parts = []
    for wanted, decoded in found:
        parts.append(np.sort(np.concatenate([rows for _, rows in wanted])))
        for column, values in zip(block, decoded, strict=True):
            column += values
    if not parts:
        return block
    rows = np.argsort(np.concatenate(parts)).tolist()
    return DecodedBlock(*([*map(column.__getitem__, rows)] for column in block))
