"""The packs of a run, made beforehand from a length index."""

from __future__ import annotations

import dataclasses

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import context_of
from energon_lite.core.stream_context import StreamContext
from energon_lite.core.topology import Stream
from energon_lite.inspect.plan_draws import Foreseen, Run, count_draws
from energon_lite.stages.packing.planned import PlannedPacks


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """What packs a run will have.

    Attributes:
        capacity: tokens of a pack.
        lengths: name of the length index.
        packs: how many packs the steps have, over all ranks.
        fill: the share of their room that is filled, in 0..1.
        left_out: samples that come into no pack: too long, or without a length.
        packs_per_pass: of all streams, where a pass has an end; else None.
    """

    capacity: int
    lengths: str
    packs: int
    fill: float
    left_out: int
    packs_per_pass: int | None


def exact_packs(dataset: PlannedPacks, run: Run) -> tuple[Foreseen, PackPlan]:
    """Plans every pack of the run, and counts; an item is a pack."""
    numbers = {facts.name: number for number, facts in enumerate(dataset.sources())}
    places = np.array([numbers[name] for name in dataset.plannable.sources])
    streams = [
        _PackDraws(dataset, Stream(index, run.num_streams), places)
        for index in range(run.num_streams)
    ]
    by_tokens = dataset.traits.unit == "tokens"
    foreseen = count_draws(dataset.dataset, streams, run, has_tokens=True, by_tokens=by_tokens)
    assert foreseen.tokens is not None
    room = foreseen.items * dataset.packing.tokens
    return foreseen, PackPlan(
        capacity=dataset.packing.tokens,
        lengths=str(dataset.packing.lengths),
        packs=foreseen.items,
        fill=float(foreseen.tokens.sum()) / room if room else 1.0,
        left_out=sum(stream.num_left_out for stream in streams),
        packs_per_pass=None
        if dataset.endless
        else sum(
            dataset.num_items(Stream(index, run.num_streams)) for index in range(run.num_streams)
        ),
    )


class _PackDraws:
    """The packs of one stream; a draw is a sample, or a part of one, in a pack."""

    def __init__(self, dataset: PlannedPacks, stream: Stream, places: Int64Array) -> None:
        self.index = stream.index
        self.num_items = 0
        self.has_ended = False
        self.num_left_out = 0
        self._windows = dataset.windows(stream)
        self._context = StreamContext(stream, max_skip_rate=1.0)
        self._places = places
        none = np.empty(0, dtype=np.int64)
        self._sources, self._tokens, self._items, self._counts = [none], [none], [none], [none]

    def draw_up_to(self, num_items: int) -> None:
        """Plans windows until there are so many packs, or the stream ends."""
        while self.num_items < num_items and not self.has_ended:
            with context_of(self._context):
                window = next(self._windows, None)
            if window is None:
                self.has_ended = True
                break
            packs = window.packs
            refs = window.units.refs[packs.indices]
            self._sources.append(self._places[window.refs.sources[refs]])
            self._tokens.append(window.units.lengths[packs.indices, 0])
            self._counts.append((window.units.starts[packs.indices] <= 0).astype(np.int64))
            numbers = np.repeat(np.arange(len(packs)), np.diff(packs.offsets))
            self._items.append(self.num_items + numbers)
            self.num_items += len(packs)
            self.num_left_out += len(self._context.take_records())

    @property
    def sources(self) -> Int64Array:
        """The number of each draw's source, (N,)."""
        return np.concatenate(self._sources)

    @property
    def tokens(self) -> Int64Array:
        """The tokens of each draw, (N,)."""
        return np.concatenate(self._tokens)

    @property
    def items(self) -> Int64Array:
        """The pack of each draw, (N,)."""
        return np.concatenate(self._items)

    @property
    def counts(self) -> Int64Array:
        """How many samples each draw is, (N,); of the parts of one, only the first counts."""
        return np.concatenate(self._counts)
