"""A source that yields the numbers of its samples without reading them, to predict a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import StateError
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream
from energon_lite.sources.source import WebdatasetSource

# Positions that are ordered together: few at first, since a repeated source may be a small one.
_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


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
        source: the samples.
    """

    dataset: WebdatasetSource[Any]

    def __init__(self, source: WebdatasetSource[Any]) -> None:
        super().__init__(source)

    def cursor(self, stream: Stream) -> Cursor[RestoreKey]:
        """Returns a fresh cursor."""
        return _OrderCursor(self.dataset, stream)

    def restore_sample(self, restore_key: RestoreKey) -> RestoreKey:
        """Returns the key itself, if it is one of the source."""
        order = self.dataset.order
        samples = range(order.first, order.first + order.num_samples)
        if len(restore_key) != 4 or restore_key[0] != order.source or restore_key[2] not in samples:
            raise ValueError(f"{restore_key!r} is not a restore key of source {order.source!r}")
        return restore_key

    def config(self) -> dict[str, JSON]:
        """As the source."""
        return self.dataset.config()


class _OrderCursor(Cursor[RestoreKey]):
    def __init__(self, source: WebdatasetSource[Any], stream: Stream) -> None:
        self._name = source.name
        self._stream = stream
        self._order = source.order.stream(stream)
        self._go_to(0)

    def _go_to(self, position: int) -> None:
        self._position = position
        self._samples = self._generate()

    def __next__(self) -> RestoreKey:
        self.key = key = next(self._samples)
        return key

    def take(self, n: int) -> tuple[list[RestoreKey], list[RestoreKey]]:
        keys = list(islice(self._samples, n))
        return keys, keys

    @property
    def has_columns(self) -> bool:
        return True

    def take_columns(self, n: int) -> OrderColumns:
        epochs, indices = self._order.block(self._position, n)
        self._go_to(self._position + len(indices))
        return OrderColumns((self._name,), np.zeros(len(indices), dtype=np.int64), epochs, indices)

    def _generate(self) -> Iterator[RestoreKey]:
        name, context = self._name, context_or(self._stream)
        num_streams, stream = self._stream.num_streams, self._stream.index
        size = _FIRST_BLOCK
        while True:
            epochs, indices = self._order.block(self._position, size)
            if not len(indices):
                return
            size = min(2 * size, _LARGEST_BLOCK)
            for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True):
                self._position += 1
                draw = context.num_draws
                context.num_draws = draw + 1
                yield (name, epoch, index, draw * num_streams + stream)

    def snapshot(self) -> Snapshot:
        return Snapshot("source", {"name": self._name, "position": self._position})

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("source", 0)
        if snapshot.field("name") != self._name:
            raise StateError(
                f"The checkpoint stands in source {snapshot.field('name')!r} where this plan has "
                f"{self._name!r}. Build the plan with the sources it was saved with."
            )
        self._go_to(snapshot.count("position"))


def order_only(source: SavableDataset[Any], _factory: object = None) -> SavableDataset[Any]:
    """Returns a source without its bytes; a dataset of another kind as it is."""
    return OrderOnlySource(source) if isinstance(source, WebdatasetSource) else source
