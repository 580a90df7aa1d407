"""What the streams of a run draw: their cursors are run, and nothing is read.

Axes: D samples, or parts of samples, that are drawn; P packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon_lite.batching.collector import Samples
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import Stream
from energon_lite.stages.pack_lists import PlannedPacks, balanced_order
from energon_lite.stages.plan_order import OrderReader
from energon_lite.stages.planned import PlannedWindow

# Samples that become arrays at a time: few at first, since a run may be short.
_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 10, 1 << 18


class Draws(NamedTuple):
    """Samples, and parts of samples, that a stream draws; all of shape (D,).

    Attributes:
        items: number of the stream's item that each is in.
        sources: number of its source.
        stored: tokens of the whole sample by its length index; 0 without an index.
        tokens: tokens that are in the item.
        counts: 1 for a sample; of the parts of a sample, 1 for the first and 0 for the others.
        positions: of the sample in the order of the stream that drew it.
    """

    items: Int64Array
    sources: Int64Array
    stored: Int64Array
    tokens: Int64Array
    counts: Int64Array
    positions: Int64Array


class StreamDraws:
    """What one stream draws. An item is a sample.

    Args:
        dataset: whose order is known without reading: its items are restore keys of samples.
        stream: the stream.
        names: of the sources, whose numbers are their positions here.
        lengths: tokens of each sample by source, for all sources; None if they are not known.

    Attributes:
        index: of the stream.
        num_items: items that were drawn.
        has_ended: whether there are no more.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        stream: Stream,
        names: Sequence[str],
        lengths: Mapping[str, Int64Array] | None,
    ) -> None:
        self.index = stream.index
        self.num_items = 0
        self.has_ended = False
        self.lengths = lengths
        self._by_number = [] if lengths is None else [lengths[name] for name in names]
        self._blocks = [Draws(*np.empty((len(Draws._fields), 0), dtype=np.int64))]
        self._reader = OrderReader(dataset, list(names), stream)
        self._size = _FIRST_BLOCK

    def draw_up_to(self, num_items: int) -> None:
        """Draws until there are at least so many items, or the stream ends."""
        while self.num_items < num_items and not self.has_ended:
            refs = self._reader.take(self._size)
            self.has_ended = len(refs) < self._size
            self._size = min(2 * self._size, _LARGEST_BLOCK)
            first, self.num_items = self.num_items, self.num_items + len(refs)
            items = np.arange(first, self.num_items)
            stored = self._stored(refs.sources, refs.indices)
            self._blocks.append(
                Draws(items, refs.sources, stored, stored, np.ones_like(items), items)
            )

    def draws(self) -> Draws:
        """Returns what was drawn, in the order of the items."""
        return Draws(*map(np.concatenate, zip(*self._blocks, strict=True)))

    def _stored(self, sources: Int64Array, indices: Int64Array) -> Int64Array:
        tokens = np.zeros(len(sources), dtype=np.int64)
        for number, lengths in enumerate(self._by_number):
            is_own = sources == number
            tokens[is_own] = lengths[indices[is_own]]
        return tokens


class PackDraws(StreamDraws):
    """What one stream draws. An item is a pack, in the order in which the run emits packs.

    Args:
        packs: plans the packs, which are balanced as its `packing` says.
        stream: the stream.
        names: of the sources, whose numbers are their positions here.
    """

    def __init__(self, packs: PlannedPacks, stream: Stream, names: Sequence[str]) -> None:
        lengths = {name: packs.lengths(name)[0] for name in names}
        super().__init__(packs.plannable.order, stream, names, lengths)
        self._numbers = np.array([names.index(name) for name in packs.plannable.sources])
        self._num_streams = stream.num_streams
        self._context = StreamContext(stream, max_skip_rate=1.0)
        self._windows = packs.windows(stream)
        self._cost = packs.packing.cost
        self._costs: list[Float64Array] = [np.empty(0)]
        self._num_planned = 0
        self._order = balanced_order(packs, stream)
        self._emitted: list[int] = []

    def draw_up_to(self, num_items: int) -> None:
        """Plans windows until at least so many packs are emitted, or the stream ends."""
        while self.num_items < num_items and not self.has_ended:
            with context_of(self._context):
                window = next(self._windows, None)
            costs = np.empty(0) if window is None else self._add(window)
            self._emit(costs, window is None)
            self.has_ended = window is None
            self.num_items = len(self._emitted)

    def _add(self, window: PlannedWindow) -> Float64Array:
        packs, units = window.packs, window.units
        refs = units.refs.chosen(packs.indices)
        sources = self._numbers[refs.sources]
        first, self._num_planned = self._num_planned, self._num_planned + len(packs)
        numbers = np.arange(first, self._num_planned)
        self._blocks.append(
            Draws(
                items=np.repeat(numbers, np.diff(packs.offsets)),
                sources=sources,
                stored=self._stored(sources, refs.indices),
                tokens=units.lengths[packs.indices, 0],
                counts=(units.starts[packs.indices] <= 0).astype(np.int64),
                positions=refs.numbers // self._num_streams,
            )
        )
        costs = np.zeros(len(packs))
        if self._cost is not None:
            costs = self._cost.costs(packs, units.lengths)
        self._costs.append(costs)
        return costs

    def _emit(self, costs: Float64Array, has_ended: bool) -> None:
        """Emits packs that were planned, in the order of the run."""
        order = self._order
        if order is None:
            self._emitted.extend(range(len(self._emitted), self._num_planned))
            return
        bits = costs.view(np.int64)[:, None]
        numbers = np.arange(self._num_planned - len(costs), self._num_planned)
        for i in range(len(costs)):
            order.add(Samples(numbers[i : i + 1], numbers[:1], bits[i : i + 1]))
            self._emitted.extend(order.next(0, has_ended=False) or ())
        while has_ended and (pack := order.next(0, has_ended=True)):
            self._emitted.extend(pack)

    def draws(self) -> Draws:
        """Returns what is in the packs that were emitted."""
        drawn = super().draws()
        items = np.full(self._num_planned, -1)
        items[self._emitted] = np.arange(self.num_items)
        drawn = drawn._replace(items=items[drawn.items])
        return Draws(*(column[drawn.items >= 0] for column in drawn))

    def costs(self) -> Float64Array:
        """Returns the costs of the packs that were emitted, (P,)."""
        costs: Float64Array = np.concatenate(self._costs)[self._emitted]
        return costs

    @property
    def num_dropped(self) -> int:
        """Samples that are in no pack: too long, or without a length."""
        return len(self._context.records)
