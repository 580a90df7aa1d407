"""What a pipeline reads, as references: the order without the bytes, and the bytes in any order.

A pipeline of stages that each work on one sample at a time, over stages that only decide the order,
over sources, comes apart into both: which sample is next is known without reading; and a sample of
which that is known can be read and encoded on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.dataset import AnyDataset, Cursor
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import Stream
from energon_lite.sources.planned_source import (
    OrderCursor,
    OrderOnlySource,
    PlannedRows,
    PlannedSource,
)
from energon_lite.sources.source import WebdatasetSource


class Refs(NamedTuple):
    """Samples that are to be read; N of them.

    Attributes:
        sources: shape (N,); numbers of their sources.
        epochs: shape (N,).
        indices: shape (N,); which sample of the source.
        numbers: shape (N,); the number of the draw in the run, unlike that of any other.
    """

    sources: Int64Array
    epochs: Int64Array
    indices: Int64Array
    numbers: Int64Array

    def __len__(self) -> int:
        return len(self.sources)

    def chosen(self, which: Int64Array | BoolArray | slice) -> Refs:
        """Returns some of them."""
        return Refs(*(column[which] for column in self.columns))

    @property
    def columns(self) -> tuple[Int64Array, ...]:
        """The arrays."""
        return (self.sources, self.epochs, self.indices, self.numbers)


def joined(refs: Sequence[Refs]) -> Refs:
    """Returns several one after the other."""
    none = Refs(*[np.empty(0, np.int64)] * 4)
    return Refs(*map(np.concatenate, zip(*(r.columns for r in (none, *refs)), strict=True)))


class PlannableDataset:
    """A pipeline whose order is known without reading.

    Args:
        dataset: stages that work on each sample, over such that choose which one is next.

    Attributes:
        sources: the sources, by name.
        order: the restore keys that come, in their order.

    Raises:
        ValueError: A stage does neither, or its order depends on what is read.
    """

    def __init__(self, dataset: AnyDataset) -> None:
        self._dataset = dataset
        self.sources = dict(_sources(dataset))
        self.order = _order_of(dataset)

    def reading(self, source: str, rows: PlannedRows) -> AnyDataset:
        """Returns what reads and encodes samples of a source, in the order of `rows`."""
        found: AnyDataset = _branch(self._dataset, source, rows)
        return found


def _sources(dataset: AnyDataset) -> Iterator[tuple[str, WebdatasetSource[Any]]]:
    if isinstance(dataset, WebdatasetSource):
        yield dataset.name, dataset
    for child in dataset.children:
        yield from _sources(child)


def _order_of(dataset: AnyDataset) -> AnyDataset:
    if isinstance(dataset, WebdatasetSource):
        return OrderOnlySource(dataset)
    traits = dataset.traits
    if traits.per_item:
        return _order_of(dataset.children[0])
    if not traits.ordering:
        obstacle = traits.obstacle or (
            f"packs cannot be planned over {type(dataset).__name__}, whose items are not known "
            "before it is read"
        )
        raise ValueError(f"{obstacle}. Omit `lengths` to pack samples as they come")
    return dataset.with_children([_order_of(child) for child in dataset.children])


def _branch(dataset: Any, source: str, rows: PlannedRows) -> Any:
    """Returns the stages of one source that work on each sample; None if it is not below."""
    if isinstance(dataset, WebdatasetSource):
        return PlannedSource(dataset, rows) if dataset.name == source else None
    found = (_branch(child, source, rows) for child in dataset.children)
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
            keys, _ = cursor.take(num_refs)
        self._context.take_costs()
        num = len(keys)
        of_keys = map(self._numbers.__getitem__, map(itemgetter(0), keys))
        return self._numbered(
            np.fromiter(of_keys, np.int64, num),
            np.fromiter(map(itemgetter(1), keys), np.int64, num),
            np.fromiter(map(itemgetter(2), keys), np.int64, num),
        )

    def _numbered(self, sources: Int64Array, epochs: Int64Array, indices: Int64Array) -> Refs:
        draws = np.arange(self.num_draws, self.num_draws + len(sources))
        self.num_draws += len(sources)
        numbers = draws * self._stream.num_streams + self._stream.index
        return Refs(sources, epochs, indices, numbers)

    def snapshot(self) -> Snapshot:
        """Returns the place."""
        return self._cursor.snapshot()

    def restore(self, snapshot: Snapshot, num_draws: int) -> None:
        """Moves to the position after `num_draws` references of the pass."""
        context = StreamContext(self._stream)
        with context_of(context):
            self._cursor.restore(snapshot)
        context.num_draws = num_draws
        self._context, self.num_draws = context, num_draws


def keys_of(refs: Refs, names: Sequence[str]) -> list[RestoreKey]:
    """Returns the restore keys of samples."""
    sources, *rest = (column.tolist() for column in refs.columns)
    return list(zip((names[number] for number in sources), *rest, strict=True))
