"""What the streams of a run draw: their cursors are run, and nothing is read.

Axes: D samples, or parts of samples, that are drawn; P packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon_lite.batching.collector import Samples
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import RankSlots, Stream
from energon_lite.stages.pack_lists import PlannedPacks, balanced_order
from energon_lite.stages.plan_order import OrderReader, chosen, joined
from energon_lite.stages.planned import PlannedWindow

# Samples that become arrays at a time, at most.
_BLOCK = 1 << 18


class Draws(NamedTuple):
    """Samples, and parts of samples, that a stream draws; all of shape (D,).

    Attributes:
        items: number of the stream's item that each is in.
        sources: number of its source.
        stored: tokens of the whole sample by its length index; 0 without an index.
        tokens: tokens that are in the item.
        counts: 1 for a sample; of the parts of a sample, 1 for the first and 0 for the others.
        streams: number of the stream that drew the sample.
        positions: of the sample in the order of that stream.
    """

    items: Int64Array
    sources: Int64Array
    stored: Int64Array
    tokens: Int64Array
    counts: Int64Array
    streams: Int64Array
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
        self._by_number = [] if lengths is None else [lengths[name] for name in names]
        self._blocks = [Draws(*np.empty((len(Draws._fields), 0), dtype=np.int64))]
        self._reader = OrderReader(dataset, list(names), stream)

    def draw_up_to(self, num_items: int) -> None:
        """Draws until there are `num_items` items, or the stream ends."""
        while self.num_items < num_items and not self.has_ended:
            num_refs = min(num_items - self.num_items, _BLOCK)
            refs = self._reader.take(num_refs)
            self.has_ended = len(refs.draws) < num_refs
            first, self.num_items = self.num_items, self.num_items + len(refs.draws)
            items = np.arange(first, self.num_items)
            stored = self._stored(refs.sources, refs.indices)
            ones, streams = np.ones_like(items), np.full_like(items, self.index)
            block = Draws(items, refs.sources, stored, stored, ones, streams, items)
            self._blocks.append(block)

    def draws(self) -> Draws:
        """Returns what was drawn, in the order of the items."""
        return joined(self._blocks)

    def _stored(self, sources: Int64Array, indices: Int64Array) -> Int64Array:
        tokens = np.zeros(len(sources), dtype=np.int64)
        for number, lengths in enumerate(self._by_number):
            is_own = sources == number
            tokens[is_own] = lengths[indices[is_own]]
        return tokens


class PackDraws(StreamDraws):
    """What one stream draws. An item is a pack, in the order in which the run emits packs.

    Args:
        packs: plans the packs, which are balanced by the settings of its `packing`.
        stream: the stream.
        names: of the sources, whose numbers are their positions here.
        all_streams: of a shared plan, whether the packs of all streams are drawn, step by step:
            for the price of one stream, since each stream plans for all of them.
    """

    def __init__(
        self, packs: PlannedPacks, stream: Stream, names: Sequence[str], all_streams: bool = False
    ) -> None:
        super().__init__(packs.order, stream, names, None)
        self._numbers = np.array([names.index(name) for name in packs.webdatasets])
        self._num_streams = stream.num_streams
        self._context = StreamContext(stream, max_skip_rate=1.0)
        cursor: Any = packs.cursor(stream)
        if all_streams:
            cursor.collector.index = None
        self._windows: Iterator[PlannedWindow] = cursor.windows()
        self._cost = packs.packing.cost
        self._costs: list[Float64Array] = [np.empty(0)]
        self._num_planned = 0
        self._order = balanced_order(packs, stream)
        self._emitted: list[int] = []

    def draw_up_to(self, num_items: int) -> None:
        """Plans windows until at least `num_items` packs are emitted, or the stream ends."""
        while self.num_items < num_items and not self.has_ended:
            with context_of(self._context):
                window = next(self._windows, None)
            self.has_ended = window is None
            self._emit(np.empty(0) if window is None else self._add(window))
            self.num_items = len(self._emitted)

    def _add(self, window: PlannedWindow) -> Float64Array:
        """Adds the packs of a window; returns their costs."""
        packs, units = window.packs, chosen(window.units, window.packs.indices)
        numbers = np.arange(self._num_planned, self._num_planned + len(packs))
        self._num_planned += len(packs)
        self._blocks.append(
            Draws(
                items=np.repeat(numbers, np.diff(packs.offsets)),
                sources=self._numbers[units.sources],
                stored=units.planned[:, 0],
                tokens=units.lengths[:, 0],
                counts=(units.starts <= 0).astype(np.int64),
                streams=units.draws % self._num_streams,
                positions=units.draws // self._num_streams,
            )
        )
        costs = np.zeros(len(packs))
        if self._cost is not None:
            costs = self._cost.costs(packs, window.units.lengths)
        self._costs.append(costs)
        return costs

    def _emit(self, costs: Float64Array) -> None:
        """Emits packs that were planned, in the order of the run."""
        first, order = self._num_planned - len(costs), self._order
        if order is None:
            self._emitted.extend(range(first, self._num_planned))
            return
        group = np.zeros(1, dtype=np.int64)
        for number, cost in enumerate(costs[:, None], first):
            order.add(Samples(np.array([number]), group, cost.view(np.int64)[None]))
            self._emitted.extend(order.next(0, has_ended=False) or ())
        while self.has_ended and (pack := order.next(0, has_ended=True)):
            self._emitted.extend(pack)

    def draws(self) -> Draws:
        """Returns what is in the packs that were emitted."""
        drawn = super().draws()
        items = np.full(self._num_planned, -1)
        items[self._emitted] = np.arange(self.num_items)
        drawn = drawn._replace(items=items[drawn.items])
        return chosen(drawn, drawn.items >= 0)

    def costs(self) -> Float64Array:
        """Returns the costs of the packs that were emitted, (P,)."""
        costs: Float64Array = np.concatenate(self._costs)[self._emitted]
        return costs

    @property
    def num_dropped(self) -> int:
        """Samples that are in no pack: too long, or without a length."""
        return len(self._context.records)


class RunShape(NamedTuple):
    """How a run goes through its data: in each step every rank takes a batch of items."""

    steps: int
    batch_size: int
    world_size: int
    num_streams: int

    @property
    def step_items(self) -> int:
        """Items of a step."""
        return self.world_size * self.batch_size


class RunDraws(NamedTuple):
    """What the steps of a run draw, from all streams.

    Attributes:
        num_steps: steps for which every rank has a batch; fewer than wanted where the data end.
        num_batches: batches of all streams.
        num_items: items of the steps.
        draws: of the steps.
        steps: shape (D,); in which step each sample is.
    """

    num_steps: int
    num_batches: int
    num_items: int
    draws: Draws
    steps: Int64Array


def draw_run(streams: Sequence[StreamDraws], run: RunShape) -> RunDraws:
    """Draws what the steps of a run need."""
    num_batches = -(-run.steps * run.world_size // run.num_streams)
    while True:
        for stream in streams:
            stream.draw_up_to(num_batches * run.batch_size)
        batches_S = np.array([-(-stream.num_items // run.batch_size) for stream in streams])
        steps_BS, num_steps = _steps_of_batches(batches_S, run)
        if num_steps == run.steps or all(stream.has_ended for stream in streams):
            break
        num_batches *= 2
    num_items, blocks, steps = 0, [], []
    for stream in streams:
        steps_P = steps_BS[np.arange(stream.num_items) // run.batch_size, stream.index]
        num_items += int((steps_P < num_steps).sum())
        drawn = stream.draws()
        steps.append(steps_P[drawn.items])
        blocks.append(drawn)
    steps_D, drawn = np.concatenate(steps), joined(blocks)
    is_in = steps_D < num_steps
    drawn, steps_D = chosen(drawn, is_in), steps_D[is_in]
    return RunDraws(num_steps, int(batches_S.sum()), num_items, drawn, steps_D)


def _steps_of_batches(batches_S: Int64Array, run: RunShape) -> tuple[Int64Array, int]:
    """Returns the step of each batch of each stream, (B, S), and how many all ranks have."""
    steps_BS = np.full((int(batches_S.max()), run.num_streams), run.steps)
    turns: Any = np.arange(-(-steps_BS.size // run.world_size))
    num_steps = run.steps
    for rank in range(run.world_size):
        slots = RankSlots(0, rank, run.world_size, run.num_streams).slot(turns)
        batches, streams = np.divmod(slots, run.num_streams)
        # Ranks skip the slots of streams that have ended, each rank for itself.
        has_batch = batches < batches_S[streams]
        own = np.arange(has_batch.sum())
        steps_BS[batches[has_batch], streams[has_batch]] = own
        num_steps = min(num_steps, len(own))
    return steps_BS, num_steps
