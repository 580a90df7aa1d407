"""The samples of a source in the order of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream
from energon_lite.sources.source import SourceCursor, WebdatasetSource

T = TypeVar("T")

# In place of a sample that could not be read.
_MISSING: Any = {"__restore_key__": ()}


@dataclass(eq=False)
class PlannedRows:
    """The N samples of a source that a plan chose, in their order.

    Attributes:
        epochs: shape (N,).
        indices: shape (N,); which sample of the source.
        numbers: shape (N,); the number of its draw in the run, the last entry of a restore key.
        num_due: number of the samples that are due. Later ones are not read yet: they would be
            counted with an item before their own.
    """

    epochs: Int64Array
    indices: Int64Array
    numbers: Int64Array
    num_due: int = 0

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and indices of up to `count` of them."""
        own = slice(position, position + count)
        return self.epochs[own], self.indices[own]


class PlannedSource(Generic[T]):
    """The samples of `rows`, in their order, read ahead in blocks, for the cursor of one plan.

    A sample that cannot be read is skipped and counted. The cursor stops after `rows.num_due`
    samples, and resumes when this number grows.

    Args:
        source: the samples.
        rows: which of them.
    """

    def __init__(self, source: WebdatasetSource[T], rows: PlannedRows) -> None:
        self._source = source
        self._rows = rows

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _PlannedCursor(self._source, stream, self._rows)


class _PlannedCursor(SourceCursor[T]):
    def __init__(self, source: WebdatasetSource[T], stream: Stream, rows: PlannedRows) -> None:
        self._rows = rows
        super().__init__(source, stream, rows)

    def __next__(self) -> T:
        if self._position >= self._rows.num_due:
            raise StopIteration
        sample = super().__next__()
        if sample is _MISSING:
            raise StopIteration
        return sample

    def _count_skip(
        self, error: Exception, members: Any, shard: str, place: int, key: RestoreKey
    ) -> Any:
        super()._count_skip(error, members, shard, place, key)
        return _MISSING

    def _pairs(self, epochs: Int64Array, indices: Int64Array) -> Iterator[tuple[int, int]]:
        context = context_or(self._stream)
        first = self._position
        numbers = self._rows.numbers[first : first + len(indices)].tolist()
        for number, pair in zip(numbers, super()._pairs(epochs, indices), strict=True):
            context.sample_index = number
            yield pair
