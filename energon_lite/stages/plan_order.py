"""References that a pipeline reads: the order without the bytes, and the bytes in any order.

A pipeline of stages that each work on one sample at a time, over stages that only decide the order,
over sources, comes apart into both: which sample is next is known without reading; and a sample of
which that is known can be read and encoded on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.batching.rules import TOKENS
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import AnyDataset, Cursor, taken
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import REPEATED, whole
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.stage import Stage
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.stream_context import StreamContext, context_of, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED, unskipped
from energon_lite.sources.refs import RefOrder, Refs
from energon_lite.sources.source import WebdatasetSource, sources_in
from energon_lite.stages.blend import BlendDataset
from energon_lite.stages.by_source import in_order
from energon_lite.stages.collect import name_of
from energon_lite.stages.token_lengths import MeasureCursor

Table = TypeVar("Table", bound=tuple[Any, ...])


class DrawnRefs(NamedTuple):
    """Samples that are to be read; N of them.

    Attributes:
        sources: shape (N,); this column and the next two are those of `Refs`.
        epochs: shape (N,).
        indices: shape (N,).
        draws: shape (N,); the number of the draw in the run, unlike that of any other.
    """

    sources: Int64Array
    epochs: Int64Array
    indices: Int64Array
    draws: Int64Array


NO_REFS = DrawnRefs(*np.empty((4, 0), np.int64))


def chosen(columns: Table, which: Any) -> Table:
    """Returns some rows of a tuple of arrays."""
    make: Any = type(columns)
    rows: Table = make(*(column[which] for column in columns))
    return rows


def joined(blocks: Sequence[Table]) -> Table:
    """Returns several tuples of arrays as one."""
    make: Any = type(blocks[0])
    rows: Table = make(*map(np.concatenate, zip(*blocks, strict=True)))
    return rows


def keys_of(refs: DrawnRefs, names: Sequence[str]) -> list[RestoreKey]:
    """Returns the restore keys of samples."""
    sources, *rest = (column.tolist() for column in refs)
    return list(zip((names[number] for number in sources), *rest, strict=True))


def order_of(dataset: AnyDataset) -> AnyDataset:
    """Returns the restore keys that a pipeline reads, in their order.

    Raises:
        ValueError: A stage neither works on each sample nor chooses which sample is next; or its
            order depends on what is read.
    """
    if isinstance(dataset, (WebdatasetSource, BlendDataset)) and dataset.refs(Stream(0, 1)):
        return OrderDataset(dataset)
    traits = dataset.traits
    if traits.per_item:
        return order_of(dataset.children[0])
    if not traits.ordering:
        obstacle = traits.obstacle or (
            f"packs cannot be planned over {type(dataset).__name__}, whose items are not known "
            "before it is read"
        )
        raise ValueError(f"{obstacle}. Only `Packing` without `lengths` packs samples as they come")
    return dataset.with_children([order_of(child) for child in dataset.children])


class OrderDataset(Stage[RestoreKey]):
    """The restore keys of samples in place of the samples; no byte is read.

    State, Length, Keys: those of the samples.

    Args:
        dataset: a source, or a blend of sources.
    """

    def cursor(self, stream: Stream) -> Cursor[RestoreKey]:
        """Returns a fresh cursor."""
        dataset: Any = self.dataset
        return _OrderCursor(dataset.refs(stream))

    def restore_sample(self, restore_key: RestoreKey) -> RestoreKey:
        """Returns the key itself, if it is one of a source."""
        for source in sources_in(self.dataset):
            if source.name == restore_key[0]:
                source.index_in(restore_key)
                return restore_key
        raise ValueError(f"{restore_key!r} is the key of no source here")


class _OrderCursor(Cursor[RestoreKey]):
    key: RestoreKey = ()

    def __init__(self, order: RefOrder) -> None:
        self.order = order
        self.names = [source.name for source in order.sources]

    def refs(self, n: int) -> Refs:
        """Returns some of the next references; no context counts these draws."""
        refs = self.order.ahead(n)
        self.order.pass_over(len(refs.sources))
        return refs

    def take(self, n: int) -> tuple[list[RestoreKey] | Columns, list[RestoreKey]]:
        refs = self.refs(n)
        num = len(refs.sources)
        if not num:
            raise StopIteration
        drawn = DrawnRefs(*refs, np.array(self.order.draws(num, current_context())))
        keys = keys_of(drawn, self.names)
        self.key = keys[-1]
        return keys, keys

    def snapshot(self) -> Snapshot:
        return self.order.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self.order.restore(snapshot)


class OrderReader:
    """One stream's place in the order of a pipeline.

    Args:
        dataset: restore keys.
        names: of the sources, whose numbers are their places here.
        stream: the stream.

    Attributes:
        num_draws: how many references were taken in this pass.
    """

    def __init__(self, dataset: AnyDataset, names: list[str], stream: Stream) -> None:
        self._stream = stream
        self._numbers = {name: number for number, name in enumerate(names)}
        self._cursor: Cursor[RestoreKey] = dataset.cursor(stream)
        self._context = StreamContext(stream)
        self.num_draws = 0

    def take(self, num_refs: int) -> DrawnRefs:
        """Returns the next references; fewer only at the end of the pass."""
        if isinstance(self._cursor, _OrderCursor):
            return self._drawn(self._cursor, num_refs)
        with context_of(self._context):
            _, keys = taken(self._cursor, num_refs)
        self._context.take_costs()
        rows = [(self._numbers[name], epoch, index) for name, epoch, index, *_ in keys]
        return self._numbered(*np.array(rows, np.int64).reshape(-1, 3).T)

    def _drawn(self, cursor: _OrderCursor, num_refs: int) -> DrawnRefs:
        numbers = np.array([self._numbers[name] for name in cursor.names], np.int64)
        parts = [NO_REFS]
        while num_refs > 0 and len((refs := cursor.refs(num_refs)).sources):
            parts.append(self._numbered(numbers[refs.sources], refs.epochs, refs.indices))
            num_refs -= len(refs.sources)
        return joined(parts)

    def _numbered(self, sources: Int64Array, epochs: Int64Array, indices: Int64Array) -> DrawnRefs:
        draws = np.arange(self.num_draws, self.num_draws + len(sources))
        self.num_draws += len(sources)
        draws = draws * self._stream.num_streams + self._stream.index
        return DrawnRefs(sources, epochs, indices, draws)

    def snapshot(self) -> Snapshot:
        """Returns the place."""
        return self._cursor.snapshot()

    def restore(self, snapshot: Snapshot, num_draws: int) -> None:
        """Moves to the position after `num_draws` references of the pass."""
        with context_of(self._context):
            self._cursor.restore(snapshot)
        self.num_draws = num_draws


class _PlannedRefs(RefOrder):
    """References that a plan chose, in the order of its lists.

    Those that are not due are not made: they would be counted with a list before their own.
    """

    def __init__(self, spec: Any, refs: DrawnRefs, stream: Stream) -> None:
        self.sources, self.mean_bytes = [*spec.webdatasets.values()], spec.mean_bytes
        self.kind = spec.kind_of_samples
        self.stream = stream
        self._refs, self._draws = Refs(*refs[:3]), refs.draws.tolist()
        self._next = self.num_due = 0

    def ahead(self, n: int) -> Refs:
        return Refs(*(column[self._next : self._next + n] for column in self._refs))

    def draws(self, n: int, context: StreamContext) -> Sequence[int]:
        draws: list[int] = self._draws[self._next : self._next + n]
        return draws

    def pass_over(self, n: int) -> None:
        self._next += n
        self.num_due -= n


class PlanReader:
    """Reads the samples of a stream's lists, those of all sources together.

    Samples that cannot be read, or that a hook skips, are counted there and leave a gap.

    Args:
        spec: the `PlannedDataset`.
        window: the plan.
        first: number of the list to begin with.
        names: of the sources.
        stream: the stream.
    """

    def __init__(
        self, spec: Any, window: Any, first: int, names: list[str], stream: Stream
    ) -> None:
        self._spec = spec
        self._names = names
        self._stream = stream
        rows = window.packs.indices[window.packs.offsets[first] :]
        is_repeated = rows < 0
        num_before = int((window.packs.indices < 0).sum() - is_repeated.sum())
        self._units = units = chosen(window.units, np.where(is_repeated, ~rows, rows))
        self._keys = keys = units.keys(names)
        for number, i in enumerate(np.flatnonzero(is_repeated).tolist(), num_before):
            keys[i] = (REPEATED, number, keys[i])
        # A sample in several parts is read for each, and counts with the first.
        self._was_read = (units.starts > 0) | is_repeated
        self._tokens = units.planned[:, 0].tolist()
        offsets = window.packs.offsets[first:]
        self._offsets, self._next = (offsets - offsets[0]).tolist(), 0
        self._order = _PlannedRefs(spec, DrawnRefs(*units[:4]), stream)
        reading: Any = in_order(spec.dataset, self._order, stream)
        self._cursor: MeasureCursor[Any] = reading.cursor(stream)

    def next_lists(self, n: int) -> list[tuple[list[RestoreKey], list[Any]]]:
        """Returns restore keys and samples of the next lists, without those that failed."""
        bounds = self._offsets[self._next : self._next + n + 1]
        self._next += n
        start, stop = bounds[0], bounds[-1]
        samples: list[Any] = []
        if self._was_read[start:stop].any():
            for row in range(start, stop):
                samples += self._read(range(row, row + 1))
        else:
            samples = self._read(range(start, stop))
        num_streams = self._stream.num_streams
        current_context().sample_index = int(self._units.draws[stop - 1]) + num_streams
        found = []
        for own in (slice(a, b) for a, b in pairwise(bounds)):
            rows = slice(own.start - start, own.stop - start)
            members, own_keys = unskipped(samples[rows], self._keys[own])
            found.append((own_keys, members))
        return found

    def _read(self, rows: range) -> list[Any]:
        """Returns the samples of some rows; `SKIPPED` for those that failed."""
        cursor, order, context = self._cursor, self._order, current_context()
        cost = context.costs[self._names[int(self._units.sources[rows.start])]]
        num_records, num_released = len(context.records), cost.released
        samples, keys, lengths = list[Any](), list[RestoreKey](), list[Any]()
        order.num_due = len(rows)
        with suppress(StopIteration):
            while order.num_due:
                more, own_keys = cursor.take(order.num_due)
                samples += samples_of(more)
                keys += own_keys
                lengths += cursor.lengths
        if self._was_read[rows.start]:  # and counted before
            del context.records[num_records:]
            cost.draws, cost.released = cost.draws - 1, num_released
        found: Sequence[int] = rows
        if len(samples) < len(rows):
            left = iter(rows)  # each key is that of one of the rows, in their order
            found = [next(row for row in left if whole(self._keys[row]) == key) for key in keys]
        # Most lengths are one number, which is compared without a call.
        if lengths != [self._tokens[row] for row in found]:
            for row, key, sample, length in zip(found, keys, samples, lengths, strict=True):
                self._check(key, sample, length, self._units.planned[row].tolist())
        if found is rows:
            return samples
        by_row = dict(zip(found, samples, strict=True))
        return [by_row.get(row, SKIPPED) for row in rows]

    def _check(self, key: RestoreKey, sample: Any, length: Any, planned: list[int]) -> None:
        """Refuses a sample that does not have the length it was planned with."""
        measured = length if isinstance(length, Mapping) else {TOKENS: length}
        sizes = dict(zip(self._spec.rules.resources, planned, strict=False))
        if any(measured.get(name) != size for name, size in sizes.items()):
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"length index {self._spec.index!r} has {sizes}, but sample_length returned "
                f"{length!r:.80}: the data or the encoder changed since the index was written, or "
                "the length is random. Write the index again with `energon-lite lengths`, or omit "
                "`lengths`",
            )
