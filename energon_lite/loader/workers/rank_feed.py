"""The deliveries of a rank: the batches of its streams in the order of slots, with counts.

A rank visits its streams in turn. Which slots are due follows from the start of the pass and from
the streams that have ended, so a worker process that computes some of the streams and the training
loop that collects from all workers count the same slots without any message about them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from energon_lite.core.cache_pool import CachePool
from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.stream_context import CostRow, SkipRecord
from energon_lite.core.topology import RankSlots, Stream


class Mark(enum.Enum):
    """Replaces a batch; an enum, since only enums keep their identity across processes."""

    END = "the stream has ended"


class Delivery(NamedTuple):
    """A batch on its way to the training loop, with the position and the counts that belong to it.

    Attributes:
        item: the batch, or a mark.
        slot: its number in the run.
        stream: the stream that it is of.
        snapshot: where that stream stands after it.
        skipped: samples skipped since the batch before it.
        costs: what was drawn and spent since the batch before it, by source.
    """

    item: Any
    slot: int
    stream: int
    snapshot: Snapshot | None
    skipped: list[SkipRecord]
    costs: list[CostRow]

    @property
    def is_padding(self) -> bool:
        """Whether the batch belongs to no slot: it only fills a step of its rank up."""
        return self.slot < 0


class StreamStart(NamedTuple):
    """The place where a stream resumes: `snapshot`, with batch `first` the next to be emitted."""

    first: int = 0
    snapshot: Snapshot | None = None


@dataclass(eq=False)
class PassStart:
    """The place where a rank begins: slots, pass, and the position of each of its streams."""

    slots: RankSlots
    pass_index: int = 0
    streams: dict[int, StreamStart] = field(default_factory=dict)

    def after(self, training: bool) -> PassStart:
        """Returns the start of the pass after this one; all validation passes are equal."""
        slots = self.slots._replace(base=0, first=0)
        return PassStart(slots, self.pass_index + 1 if training else 0)


def due_slots(start: PassStart, ended: set[int]) -> Iterator[int]:
    """Yields the slots that a rank has to compute, in their order, until all streams have ended.

    Args:
        start: where the pass begins.
        ended: the streams without a further batch; the caller adds to it between two slots.
    """
    slots, num_streams = start.slots, start.slots.num_streams
    streams, turns = slots.streams(), slots.turns()
    firsts = {stream: place.first * num_streams for stream, place in start.streams.items()}
    while not ended.issuperset(streams):
        for slot in islice(turns, len(streams)):
            stream = slot % num_streams
            if stream not in ended and slot >= firsts.get(stream, 0):
                yield slot


class RankFeed(Iterator[Delivery]):
    """Computes the deliveries of a rank in one pass, or those of some of its streams.

    Args:
        dataset: the pipeline.
        start: where the pass begins.
        max_skip_rate: failures per sample that a stream may have.
        ended: the streams of the rank that are not computed.
        cache_pool: for cookers; None for a `NoCachePool`.

    Attributes:
        run: the stream that is being computed, or was last.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        start: PassStart,
        max_skip_rate: float,
        ended: Collection[int] = (),
        cache_pool: CachePool | None = None,
    ) -> None:
        self.run: StreamRun[Any] | None = None
        self._dataset = dataset
        self._max_skip_rate = max_skip_rate
        self._cache_pool = cache_pool
        self._start = start
        self._ended = set(ended)
        self._slots = due_slots(start, self._ended)
        self._runs: dict[int, StreamRun[Any] | None] = {}
        own = [stream for stream in start.slots.streams() if stream not in self._ended]
        self._num_own = max(1, len(own))
        self._shared = [stream for stream in own if start.slots.is_shared(stream)]

    def end(self) -> None:
        """Ends the pass: nothing more is computed."""
        self._slots = iter(())

    def stop(self) -> None:
        """Ends, from another thread, what is being computed: at its next hook."""
        for run in filter(None, [*self._runs.values()]):
            run.context.stop()

    def __next__(self) -> Delivery:
        """Returns the next delivery; that of a stream's end has the mark END."""
        slot, num_streams = next(self._slots), self._start.slots.num_streams
        for shared in self._shared:  # in step with its own, and not all when it is due
            self._at(shared, -((shared - slot) // num_streams))
        batch, index = divmod(slot, num_streams)
        run = self._at(index, batch)
        if run is None:
            self._ended.add(index)
            # The slot that the stream ends in is another rank's, which counts what came after the
            # last batch; a snapshot behind that would hide it from a resumed run.
            return Delivery(Mark.END, slot, index, None, [], [])
        item: Any
        try:
            item = next(run)
        except StopIteration:
            self._ended.add(index)
            self._runs[index] = None
            item = Mark.END
        context = run.context
        skipped, costs = context.take_records(), context.take_costs()
        return Delivery(item, slot, index, run.snapshot(), skipped, costs)

    def _at(self, index: int, batch: int) -> StreamRun[Any] | None:
        """Returns a stream before a batch, or behind it; None if it ends before the batch."""
        if index not in self._runs:
            self._runs[index] = self._begun(index)
        run = self._runs[index]
        if run is None:
            return None
        self.run = run
        try:
            if run.num_returned < batch:  # those between are other ranks' to give, and to count
                run.skip(batch - run.num_returned)
        except StopIteration:
            self._runs[index] = run = None
        return run

    def __str__(self) -> str:
        """Names the stream that is being computed, and its batch."""
        run = self.run
        return f"stream {run.stream.index}, batch {run.context.batch_index}" if run else "nothing"

    def _begun(self, index: int) -> StreamRun[Any]:
        num_streams, pass_index = self._start.slots.num_streams, self._start.pass_index
        stream = Stream(index, num_streams, pass_index, num_beside=self._num_own)
        run = StreamRun(self._dataset, stream, self._max_skip_rate)
        run.context.cache_pool = self._cache_pool
        snapshot = self._start.streams.get(index, StreamStart()).snapshot
        if snapshot is not None:
            run.restore(snapshot)
        return run
