"""The draws of the streams of a run: references to samples, of which nothing is read.

Axes: B batches of a stream, D samples, or parts of samples, that are drawn; S streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from energon_lite.batching.collector import Samples
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import RankSlots, Stream
from energon_lite.stages.balanced_lists import balanced_order
from energon_lite.stages.plan_order import NO_REFS, OrderReader, chosen, joined
from energon_lite.stages.planned import PlannedWindow
from energon_lite.stages.planned_packs import PlannedPacks

# Samples that become arrays at a time, at most.
_BLOCK = 1 << 16
# Called with a number of items that are drawn, since the last call.
Advance = Callable[[int], object]


class Draws(NamedTuple):
    """Samples, and parts of samples, that streams draw; all of shape (D,).

    Attributes:
        items: number of the stream's item that each is in.
        sources: number of its source.
        tokens: tokens that are in the item.
        counts: 1 for a sample; of the parts of a sample, 1 for the first and 0 for the others.
        costs: cost of the pack for its first sample, 0 for the others.
    """

    items: Int64Array
    sources: Int64Array
    tokens: Int64Array
    counts: Int64Array
    costs: Float64Array


class StreamDraws(NamedTuple):
    """The draws of one stream.

    Attributes:
        draws: in the order of their planning.
        num_items: items that they are; fewer than wanted where the stream ends.
        num_dropped: samples on the way that are in no pack: too long, or without a length.
    """

    draws: Draws
    num_items: int
    num_dropped: int = 0


def draw_samples(
    order: SavableDataset[Any],
    lengths: Mapping[str, Int64Array],
    stream: Stream,
    num_items: int,
    advance: Advance = bool,
) -> StreamDraws:
    """Draws the first samples of a stream, each of which is an item.

    Args:
        order: whose items are restore keys of samples.
        lengths: tokens of each sample, by source, as far as they are known.
        stream: the stream.
        num_items: number of samples.
        advance: hears how far it is.
    """
    names = [facts.name for facts in order.sources()]
    reader, blocks = OrderReader(order, names, stream), [NO_REFS]
    while (num := min(num_items - reader.num_draws, _BLOCK)) > 0:
        blocks.append(reader.take(num))
        advance(len(blocks[-1].draws))
        if len(blocks[-1].draws) < num:
            break
    refs = joined(blocks)
    tokens = np.zeros_like(refs.draws)
    for number, name in enumerate(names):
        is_own = refs.sources == number
        tokens[is_own] = lengths[name][refs.indices[is_own]] if name in lengths else 0
    items, ones = np.arange(len(tokens)), np.ones_like(tokens)
    draws = Draws(items, refs.sources, tokens, ones, np.zeros(len(tokens)))
    return StreamDraws(draws, len(tokens))


def draw_packs(
    packs: PlannedPacks,
    stream: Stream,
    num_items: int,
    advance: Advance = bool,
) -> StreamDraws:
    """Plans the first packs of a stream, in the order in which the run emits them.

    Args:
        packs: plans the packs, which are balanced by the settings of its `packing`.
        stream: the stream.
        num_items: number of packs.
        advance: hears how far it is.
    """
    context = StreamContext(stream, max_skip_rate=1.0)
    cursor: Any = packs.cursor(stream)
    order, cost = balanced_order(packs, stream), packs.packing.cost
    # An order emits a window of packs when it has all of them.
    num_wanted = num_items if order is None else num_items + packs.packing.balance_window
    windows: list[PlannedWindow] = []
    with context_of(context):
        for window in cursor.windows():
            windows.append(window)
            num_wanted -= len(window.packs)
            advance(len(window.packs))
            if num_wanted <= 0:
                break
    if not windows:
        nothing = draw_samples(packs.order, {}, stream, 0)
        return nothing._replace(num_dropped=len(context.records))
    units = joined([chosen(window.units, window.packs.indices) for window in windows])
    sizes = np.concatenate([np.diff(window.packs.offsets) for window in windows])
    costs = np.zeros(len(sizes))
    if cost is not None:
        costs = np.concatenate([cost.costs(w.packs, w.units.lengths) for w in windows])
    emitted = np.arange(len(sizes))
    if order is not None:
        order.add(Samples(emitted, np.zeros_like(emitted), costs.view(np.int64)[:, None]))
        ready = iter(lambda: order.next(0, has_ended=num_wanted > 0), None)
        emitted = np.fromiter(chain.from_iterable(ready), np.int64)
    emitted = emitted[:num_items]
    places = np.full(len(sizes), -1)
    places[emitted] = np.arange(len(emitted))
    costs_D = np.zeros(len(units.draws))
    costs_D[np.cumsum(sizes) - sizes] = costs
    draws = Draws(
        np.repeat(places, sizes), units.sources, units.lengths[:, 0],
        (units.starts <= 0).astype(np.int64), costs_D,
    )  # fmt: skip
    return StreamDraws(chosen(draws, draws.items >= 0), len(emitted), len(context.records))


class RunShape(NamedTuple):
    """The way of a run through its data: in each step every rank takes a batch of items."""

    steps: int
    batch_size: int
    world_size: int
    num_streams: int

    @property
    def step_items(self) -> int:
        """Items of a step."""
        return self.world_size * self.batch_size


class RunDraws(NamedTuple):
    """The draws of the steps of a run, from all streams.

    Attributes:
        num_steps: steps for which every rank has a batch; fewer than wanted where the data end.
        num_batches: batches of all streams.
        num_dropped: samples of all streams that are in no pack.
        draws: of the steps; item n of stream s has the number n * S + s.
        steps: shape (D,); in which step each sample is.
    """

    num_steps: int
    num_batches: int
    num_dropped: int
    draws: Draws
    steps: Int64Array


def draw_run(
    draw: Callable[[Stream, int, Advance], StreamDraws],
    run: RunShape,
    progress: Callable[[str, int, int], None] | None = None,
) -> RunDraws:
    """Draws what the steps of a run need.

    Args:
        draw: returns the first items of a stream, as many as it is asked for.
        run: the run.
        progress: called with the step, and how many items are drawn, of how many.
    """
    num_streams, size = run.num_streams, run.batch_size
    num_batches = -(-run.steps * run.world_size // num_streams)
    num_done = 0

    def advance(num: int) -> None:
        nonlocal num_done
        num_done, total = num_done + num, num_batches * size * num_streams
        if progress is not None:
            progress("Drawing the run", min(num_done, total), total)

    while True:
        num_done, wanted = 0, num_batches * size
        streams = [draw(Stream(s, num_streams), wanted, advance) for s in range(num_streams)]
        batches_S = np.array([-(-own.num_items // size) for own in streams])
        steps_BS, num_steps = _steps_of_batches(batches_S, run)
        if num_steps == run.steps or all(own.num_items < num_batches * size for own in streams):
            break
        num_batches *= 2
    draws = joined([own.draws for own in streams])
    streams_D = np.repeat(np.arange(num_streams), [len(own.draws.items) for own in streams])
    steps_D = steps_BS[draws.items // size, streams_D]
    draws = draws._replace(items=draws.items * num_streams + streams_D)
    is_in = steps_D < num_steps
    num_dropped = sum(own.num_dropped for own in streams)
    total = int(batches_S.sum())
    return RunDraws(num_steps, total, num_dropped, chosen(draws, is_in), steps_D[is_in])


def _steps_of_batches(batches_S: Int64Array, run: RunShape) -> tuple[Int64Array, int]:
    """Returns the step of each batch of each stream, (B, S), and how many all ranks have."""
    has_batch_BS = np.arange(int(batches_S.max()))[:, None] < batches_S
    steps, num_steps = np.full(has_batch_BS.size, run.steps), run.steps
    num_turns = -(-len(steps) // run.world_size)
    for rank in range(run.world_size):
        turns = RankSlots(0, rank, run.world_size, run.num_streams).turns()
        slots = np.fromiter(islice(turns, num_turns), np.int64)
        # Ranks skip the slots of streams that have ended, each rank for itself.
        slots = slots[slots < len(steps)]
        slots = slots[has_batch_BS.flat[slots]]
        steps[slots] = np.arange(len(slots))
        num_steps = min(num_steps, len(slots))
    return steps.reshape(has_batch_BS.shape), num_steps
