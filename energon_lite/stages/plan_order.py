"""What a pipeline reads, as references: the order without the bytes, and the bytes in any order.

A pipeline of stages that each work on one sample at a time, over stages that only decide the order,
over sources, comes apart into both: which sample is next is known without reading; and a sample of
which that is known can be read and encoded on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.batching.rules import TOKENS, WHOLE
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import AnyDataset, Cursor, taken
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.global_generators import ALL
from energon_lite.core.keys import REPEATED, whole
from energon_lite.core.sample_columns import samples_of
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.stream_context import StreamContext, context_of, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED, unskipped
from energon_lite.sources.planned_source import (
    OrderCursor,
    OrderOnlySource,
    PlannedRows,
    PlannedSource,
)
from energon_lite.sources.source import WebdatasetSource
from energon_lite.stages.collect import name_of
from energon_lite.stages.token_lengths import MeasureCursor

Columns = TypeVar("Columns", bound=tuple[Any, ...])


class Refs(NamedTuple):
    """Samples that are to be read; N of them.

    Attributes:
        sources: shape (N,); numbers of their sources.
        epochs: shape (N,).
        indices: shape (N,); which sample of the source.
        draws: shape (N,); the number of the draw in the run, unlike that of any other.
    """

    sources: Int64Array
    epochs: Int64Array
    indices: Int64Array
    draws: Int64Array


NO_REFS = Refs(*np.empty((4, 0), np.int64))


def chosen(columns: Columns, which: Any) -> Columns:
    """Returns some rows of a tuple of arrays."""
    make: Any = type(columns)
    rows: Columns = make(*(column[which] for column in columns))
    return rows


def joined(blocks: Sequence[Columns]) -> Columns:
    """Returns several tuples of arrays as one."""
    make: Any = type(blocks[0])
    rows: Columns = make(*map(np.concatenate, zip(*blocks, strict=True)))
    return rows


def keys_of(refs: Refs, names: Sequence[str]) -> list[RestoreKey]:
    """Returns the restore keys of samples."""
    sources, *rest = (column.tolist() for column in refs)
    return list(zip((names[number] for number in sources), *rest, strict=True))


def sources_in(dataset: AnyDataset) -> Iterator[WebdatasetSource[Any]]:
    """Yields the sources of a pipeline."""
    if isinstance(dataset, WebdatasetSource):
        yield dataset
    for child in dataset.children:
        yield from sources_in(child)


def order_of(dataset: AnyDataset) -> AnyDataset:
    """Returns the restore keys that a pipeline reads, in their order.

    Raises:
        ValueError: A stage neither works on each sample nor chooses which sample is next; or its
            order depends on what is read.
    """
    if isinstance(dataset, WebdatasetSource):
        return OrderOnlySource(dataset)
    traits = dataset.traits
    if traits.per_item:
        return order_of(dataset.children[0])
    if not traits.ordering:
        obstacle = traits.obstacle or (
            f"packs cannot be planned over {type(dataset).__name__}, whose items are not known "
            "before it is read"
        )
        raise ValueError(f"{obstacle}. Omit `lengths` to pack samples as they come")
    return dataset.with_children([order_of(child) for child in dataset.children])


def branch_of(dataset: Any, source: str, rows: PlannedRows) -> Any:
    """Returns what reads and encodes samples of one source; None if it is not below."""
    if isinstance(dataset, WebdatasetSource):
        return PlannedSource(dataset, rows) if dataset.name == source else None
    found = (branch_of(child, source, rows) for child in dataset.children)
    below = next((branch for branch in found if branch is not None), None)
    if below is None or not dataset.traits.per_item:
        return below
    return dataset.with_children([below])


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

    def take(self, num_refs: int) -> Refs:
        """Returns the next references; fewer only at the end of the pass."""
        cursor = self._cursor
        if isinstance(cursor, OrderCursor) and cursor.has_columns:
            names, sources, epochs, indices = cursor.take_columns(num_refs)
            numbers = np.array([self._numbers[name] for name in names], dtype=np.int64)
            return self._numbered(numbers[sources], epochs, indices)
        with context_of(self._context):
            _, keys = taken(cursor, num_refs)
        self._context.take_costs()
        rows = [(self._numbers[name], epoch, index) for name, epoch, index, *_ in keys]
        return self._numbered(*np.array(rows, np.int64).reshape(-1, 3).T)

    def _numbered(self, sources: Int64Array, epochs: Int64Array, indices: Int64Array) -> Refs:
        draws = np.arange(self.num_draws, self.num_draws + len(sources))
        self.num_draws += len(sources)
        draws = draws * self._stream.num_streams + self._stream.index
        return Refs(sources, epochs, indices, draws)

    def snapshot(self) -> Snapshot:
        """Returns the place."""
        return self._cursor.snapshot()

    def restore(self, snapshot: Snapshot, num_draws: int) -> None:
        """Moves to the position after `num_draws` references of the pass."""
        with context_of(self._context):
            self._cursor.restore(snapshot)
        self.num_draws = num_draws


class PlanReader:
    """Reads the samples of a stream's lists; each source in blocks.

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
        self._are_parts = bool(self._was_read.any() or (units.starts != WHOLE).any())
        self._sources, self._tokens = units.sources.tolist(), units.planned[:, 0].tolist()
        offsets = window.packs.offsets[first:]
        self._offsets, self._next = (offsets - offsets[0]).tolist(), 0
        self._branches: dict[int, tuple[MeasureCursor[Any], PlannedRows]] = {}

    def next_lists(self, n: int) -> list[tuple[list[RestoreKey], list[Any]]]:
        """Returns restore keys and samples of the next lists, without those that failed."""
        bounds = self._offsets[self._next : self._next + n + 1]
        self._next += n
        start, stop = bounds[0], bounds[-1]
        sources, keys = self._sources[start:stop], self._keys[start:stop]
        groups: dict[int, list[int]] = {}
        if (self._are_parts and self._was_read[start:stop].any()) or self._is_in_turn(sources):
            groups = {row: [row] for row in range(start, stop)}
        elif sources.count(sources[0]) < len(sources):
            for row, source in enumerate(sources, start):
                groups.setdefault(source, []).append(row)
        samples: list[Any] = [SKIPPED] * len(keys) if groups else self._read(range(start, stop))
        for rows in groups.values():
            for row, sample in zip(rows, self._read(rows), strict=True):
                samples[row - start] = sample
        num_streams = self._stream.num_streams
        current_context().sample_index = int(self._units.draws[stop - 1]) + num_streams
        found = []
        for own in (slice(a - start, b - start) for a, b in pairwise(bounds)):
            members, own_keys = unskipped(samples[own], keys[own])
            found.append((own_keys, members))
        return found

    def _is_in_turn(self, sources: list[int]) -> bool:
        """Whether what hooks draw may depend on the order in which samples are encoded."""
        generators = current_context().generators
        is_seeded = generators is None or generators.drawn == ALL  # for each call
        return not is_seeded and bool(self._spec.drawing) and len({*sources}) > 1

    def _read(self, rows: Sequence[int]) -> list[Any]:
        """Returns the samples of some rows, all of one source; `SKIPPED` for those that failed."""
        source, context = self._sources[rows[0]], current_context()
        num_records, cost = len(context.records), context.costs[self._names[source]]
        cursor, due = self._branches.get(source) or self._open(source)
        due.num_due += len(rows)
        samples, keys, lengths = list[Any](), list[RestoreKey](), list[Any]()
        with suppress(StopIteration):
            while (num_left := len(rows) - len(samples)) > 0:
                more, own_keys = cursor.take(num_left)
                samples += samples_of(more)
                keys += own_keys
                lengths += cursor.lengths
        if self._was_read[rows[0]]:  # and counted before
            del context.records[num_records:]
            cost.draws -= 1
            cost.tokens -= sum(map(self._spec.rules.kept_tokens, lengths))
        found = rows
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

    def _open(self, source: int) -> tuple[MeasureCursor[Any], PlannedRows]:
        units = self._units
        own = np.flatnonzero(units.sources == source)
        keys = [self._keys[row] for row in own.tolist()]
        if self._are_parts:
            keys = list(map(whole, keys))
        rows = PlannedRows(units.epochs[own], units.indices[own], keys)
        reading = branch_of(self._spec.dataset, self._names[source], rows)
        stream = replace(self._stream, share=len(own) / len(units.sources))
        self._branches[source] = reading.cursor(stream), rows
        return self._branches[source]

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
