"""What a worker process does: computes the batches of its streams, turn by turn.

A rank's turns go round its streams; the j-th of T streams belongs to worker j mod W. torch asks its
workers in turn, so each cycle of T turns is padded to a multiple of W with marks, and a worker
whose stream has ended delivers marks until all of its streams have; then it stops, and torch asks
the others. So what arrives is in the order of slots, and no process is ever told anything.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from energon_lite.core.activity import CostRow, SkipRecord
from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import RankSlots, Stream
from energon_lite.loader.sending import report_unsendable


class Mark(enum.Enum):
    """Takes the place of a batch; an enum, since only those keep their identity over processes."""

    PAD = "no batch in this turn"
    END = "the stream has ended"


class Costs:
    """What the sources gave for a batch, and what that took; no list, which torch would walk.

    Attributes:
        rows: source and its numbers.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: list[CostRow]) -> None:
        self.rows = rows


class Delivery(NamedTuple):
    """A batch on its way to the training loop, with all that is known once it is given.

    Attributes:
        item: the batch, or a mark.
        slot: its number in the run.
        stream: the stream that it is of.
        snapshot: where that stream stands after it.
        skipped: what was left out since the batch before it.
        costs: what was drawn and spent since the batch before it, by source.
    """

    item: Any
    slot: int
    stream: int
    snapshot: Snapshot | None
    skipped: list[SkipRecord]
    costs: Costs

    @property
    def is_padding(self) -> bool:
        """Whether the batch belongs to no slot: it only fills a step of its rank up."""
        return self.slot < 0


class StreamStart(NamedTuple):
    """Where a stream goes on: from `snapshot`, with batch `first` as the next to be given."""

    first: int = 0
    snapshot: Snapshot | None = None


@dataclass
class PassStart:
    """Where a rank begins to give: slots, pass, and the place of each of its streams."""

    slots: RankSlots
    pass_index: int = 0
    streams: dict[int, StreamStart] = field(default_factory=dict)

    def after(self, training: bool) -> PassStart:
        """Gives the start of the pass after this one; validation passes are all alike."""
        slots = self.slots._replace(base=0, first=0)
        return PassStart(slots, self.pass_index + 1 if training else 0)


PAD = Delivery(Mark.PAD, -1, -1, None, [], Costs([]))


class Turns(IterableDataset[Delivery]):
    """The deliveries of one rank; each `iter` is one pass.

    Args:
        dataset: the pipeline.
        start: where the first pass begins.
        max_skip_rate: failures per sample that a stream may have.
    """

    def __init__(
        self, dataset: SavableDataset[Any], start: PassStart, max_skip_rate: float
    ) -> None:
        self.dataset = dataset
        self.max_skip_rate = max_skip_rate
        self._next_start = start

    def __iter__(self) -> Iterator[Delivery]:
        """Runs one pass; in a worker process, that worker's turns of it."""
        start = self._next_start
        self._next_start = start.after(self.dataset.training)
        worker = get_worker_info()
        if worker is None:
            return self._pass(start, 0, 1)
        report_unsendable()
        # What a fork inherits stays shared with the parent as long as no collection walks it.
        gc.freeze()
        return self._pass(start, worker.id, worker.num_workers)

    def _pass(self, start: PassStart, worker: int, num_workers: int) -> Iterator[Delivery]:
        slots = start.slots
        num_turns = slots.num_turns
        streams = slots.streams()
        own = range(worker, -(-num_turns // num_workers) * num_workers, num_workers)
        runs: dict[int, StreamRun[Any]] = {}
        ended: set[int] = set()
        first_turn = 0
        while len(ended) < len(range(worker, num_turns, num_workers)):
            for turn in own:
                if turn >= num_turns or turn in ended:
                    yield PAD
                    continue
                run = runs.get(turn)
                if run is None:
                    run = runs[turn] = self._run(start, streams[turn])
                delivery = self._deliver(start, run, slots.slot(first_turn + turn))
                if delivery.item is Mark.END:
                    ended.add(turn)
                yield delivery
            first_turn += num_turns

    def _run(self, start: PassStart, index: int) -> StreamRun[Any]:
        stream = Stream(index, start.slots.num_streams, start.pass_index)
        run = StreamRun(self.dataset, stream, self.max_skip_rate)
        snapshot = start.streams.get(index, StreamStart()).snapshot
        if snapshot is not None:
            run.restore(snapshot)
        return run

    def _deliver(self, start: PassStart, run: StreamRun[Any], slot: int) -> Delivery:
        index = run.stream.index
        batch_index = slot // run.stream.num_streams
        if batch_index < start.streams.get(index, StreamStart()).first:
            return PAD
        item: Any
        try:
            # Batches between are other ranks' to give (and to count what they skip).
            run.skip(batch_index - run.num_given)
            item = next(run)
        except StopIteration:
            if run.num_given < batch_index:
                # The slot that the stream ends in is another rank's, which counts what came after
                # the last batch; a snapshot behind that would hide it from a resumed run.
                return Delivery(Mark.END, slot, index, None, [], Costs([]))
            item = Mark.END
        skipped = run.activity.take_records()
        costs = Costs(run.activity.take_costs())
        return Delivery(item, slot, index, run.snapshot(), skipped, costs)
