"""What a plan needs of a source: its order without the bytes, and its samples in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor
from energon_lite.core.sample_columns import Columns
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.topology import Stream
from energon_lite.sources.order_ahead import OrderAhead
from energon_lite.sources.source import SourceCursor, WebdatasetSource

T = TypeVar("T")

# Samples that are decoded before the hooks get the first of them, if they have this mean size.
_MOST_AT_ONCE, _SMALL_BYTES = 32, 8 << 10


class OrderColumns(NamedTuple):
    """Samples that come next, as arrays; N of them.

    Attributes:
        names: of the sources that may be among them.
        sources: shape (N,); places in `names`.
        epochs: shape (N,).
        indices: shape (N,); which sample of the source.
    """

    names: tuple[str, ...]
    sources: Int64Array
    epochs: Int64Array
    indices: Int64Array


@runtime_checkable
class OrderCursor(Protocol):
    """A cursor that can give its keys as arrays, at a fraction of the time."""

    @property
    def has_columns(self) -> bool:
        """Whether it can, over what lies below."""

    def take_columns(self, n: int) -> OrderColumns:
        """Returns the next samples; fewer at the end. No context counts these draws."""


def interleaved(parts: Sequence[OrderColumns], turns: Int64Array) -> OrderColumns:
    """Puts several orders into one.

    Args:
        parts: the orders.
        turns: shape (N,); which of them comes each time; as often as it has samples.
    """
    places = np.argsort(turns, kind="stable")
    firsts = np.cumsum([0, *(len(part.names) for part in parts)])
    sources = [part.sources + first for part, first in zip(parts, firsts.tolist(), strict=False)]
    columns = [sources, [part.epochs for part in parts], [part.indices for part in parts]]
    merged = np.empty((3, len(turns)), dtype=np.int64)
    for row, arrays in zip(merged, columns, strict=True):
        row[places] = np.concatenate(arrays)
    return OrderColumns(tuple(name for part in parts for name in part.names), *merged)


class OrderOnlySource(Stage[RestoreKey]):
    """The restore keys of a source's samples in place of the samples; no byte is read.

    State: one integer, the position in the stream.
    Length: that of the source.
    Keys: those of the source: `(source, epoch, index, sample_index)`.

    Args:
        dataset: the samples.
    """

    dataset: WebdatasetSource[Any]

    def cursor(self, stream: Stream) -> Cursor[RestoreKey]:
        """Returns a fresh cursor."""
        return _OrderCursor(self.dataset, stream)

    def restore_sample(self, restore_key: RestoreKey) -> RestoreKey:
        """Returns the key itself, if it is one of the source."""
        self.dataset.index_in(restore_key)
        return restore_key

    def config(self) -> dict[str, JSON]:
        """As the source."""
        return self.dataset.config()


class _OrderCursor(SourceCursor[RestoreKey]):
    __next__ = Cursor.__next__

    def take(self, n: int) -> tuple[list[RestoreKey] | Columns, list[RestoreKey]]:
        epochs, indices = self._order_ahead.at(self.position, n)
        if not len(indices):
            raise StopIteration
        self._stop += len(indices)
        keys = self.numbered(epochs.tolist(), indices.tolist())
        return keys, keys

    has_columns = True

    def take_columns(self, n: int) -> OrderColumns:
        epochs, indices = self._order.block(self.position, n)
        self.go_to(self.position + len(indices))
        return OrderColumns((self._name,), np.zeros(len(indices), dtype=np.int64), epochs, indices)

    def go_to(self, position: int) -> None:
        super().go_to(position)
        self._order_ahead = OrderAhead(self._order)


@dataclass(eq=False)
class PlannedRows:
    """The N samples of a source that a plan chose, in their order.

    Attributes:
        epochs: shape (N,).
        indices: shape (N,); which sample of the source.
        keys: their restore keys, of which the last entry is the number of the draw in the run.
        num_due: number of the samples that are due. Later ones are not read yet: they would be
            counted with an item before their own.
    """

    epochs: Int64Array
    indices: Int64Array
    keys: list[RestoreKey]
    num_due: int = 0

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and indices of up to `count` of them."""
        own = slice(position, position + count)
        return self.epochs[own], self.indices[own]


class PlannedSource(Stage[T]):
    """The samples of `rows`, in their order, read ahead in blocks, for the cursor of one plan.

    A sample that cannot be read is skipped and counted. The cursor stops after `rows.num_due`
    samples, and resumes when this number grows.

    State, Length, Keys: those of the source.

    Args:
        dataset: the samples.
        rows: which of them.
    """

    dataset: WebdatasetSource[T]

    def __init__(self, dataset: WebdatasetSource[T], rows: PlannedRows) -> None:
        super().__init__(dataset)
        self.rows = rows

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _PlannedCursor(self.dataset, stream, self.rows)


class _PlannedCursor(SourceCursor[T]):
    __next__ = Cursor.__next__

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        planned: Any = self._order
        position, due = self.position, planned.num_due
        if self._row == self._num_rows and position < due:
            self._read_on()
        num = min(n, due - position, self._num_rows - self._row)
        if num <= 0:
            raise StopIteration
        keys = planned.keys[position : position + num]
        if self._decoded is None:
            data: Any = self._block and self._block.data
            is_small = type(data) is memoryview and len(data) <= _SMALL_BYTES * self._num_rows
            samples, found = list[T](), list[RestoreKey]()
            for key in keys[: _MOST_AT_ONCE if is_small else 1]:
                self._context.sample_index = key[3]
                sample, own = self._one()
                samples += sample
                found += own
            return samples, found
        rows = slice(self._row, self._row + num)
        self._row = rows.stop
        self._context.costs[self._name].draws += num
        return self.spec.loader.made(self._decoded, rows, keys, self._origins), keys
