"""A run that is resumed again and again on other topologies, beside one that never was.

The model computes each stream by itself, without a loader: what a slot gives, what is skipped on
the way to it, and what that costs. A stream of B batches ends in slot B of its own: that one gives
nothing, but counts what is skipped after the last batch.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter as Multiset
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from energon_lite import SavableDataset, WorkerConfig
from energon_lite.core.dataset import StreamRun
from energon_lite.core.stream_context import CostRow, SkipRecord
from energon_lite.core.topology import RankSlots, Stream
from energon_lite.loader.stats import Counter, FailureLimit, SourceStats, lost_samples
from energon_lite.loader.workers import executor
from energon_lite.loader.workers.executor import Executor, Pass, WorkerSettings
from energon_lite.loader.workers.rank_feed import Delivery

from ..helpers import MakeDataset, Ranks, assert_same, last_slot

END = object()
MAX_SKIP_RATE = 0.999999  # failures are counted, and none is too much
STATS = ("samples", "batches", "draws", "tokens", "overlong")


class Slot(NamedTuple):
    """What a slot of the model gives and counts, and how near its stream is to `max_skip_rate`."""

    item: Any
    records: list[SkipRecord]
    costs: list[CostRow]
    failures: float


class Model:
    """All slots of an undisturbed run, by pass.

    Args:
        dataset: the pipeline.
        num_streams: streams of the run.
        num_slots: how many slots of an endless run are computed.
    """

    def __init__(self, dataset: SavableDataset[Any], num_streams: int, num_slots: int) -> None:
        self.dataset = dataset
        self.num_streams = num_streams
        self._num_slots = num_slots
        self._passes: dict[int, dict[int, Slot]] = {}

    def slots(self, number: int) -> dict[int, Slot]:
        """Returns the slots of a pass, with those in which streams end."""
        number *= self.dataset.training  # all passes of a validation are the same
        if number not in self._passes:
            found: dict[int, Slot] = {}
            for index in range(self.num_streams):
                self._compute(found, Stream(index, self.num_streams, number))
            self._passes[number] = dict(sorted(found.items()))
        return self._passes[number]

    def _compute(self, found: dict[int, Slot], stream: Stream) -> None:
        run = StreamRun(self.dataset, stream, MAX_SKIP_RATE)
        item, slot = None, stream.index
        while item is not END and not (self.dataset.endless and slot >= self._num_slots):
            item, context = next(run, END), run.context
            records, costs = context.take_records(), context.take_costs()
            found[slot] = Slot(item, records, costs, context.fill)
            slot += stream.num_streams

    def counts(self, slots: set[tuple[int, int]], last: int) -> tuple[Any, Any, tuple[int, int]]:
        """Returns statistics and skips of some slots, and the failures of those in a last pass."""
        counter, lost, skipped = Counter(self.dataset, []), (0, 0), Multiset[str]()
        limit = FailureLimit(self.dataset, MAX_SKIP_RATE)
        for number, slot in slots:
            item, records, costs, _ = self.slots(number)[slot]
            counter.add(costs, records, None if item is END else 0.0)
            skipped.update(lost_samples(records))
            if number == last:
                lost = limit.counted(*lost, Delivery(item, slot, -1, None, records, costs))
        return counter.stats(0), skipped, lost


class Chain:
    """The run that is resumed, compared with the model at each batch and each time it is saved.

    Attributes:
        number: how many passes have begun before that of the ranks.
        given: slots that gave their item, by pass.
        counted: passes and slots whose skips and costs are in the states saved last.
        ended: which ranks are at the end of the pass.
        worker_type: what the workers are; None for computing in their place.
    """

    def __init__(
        self, make: MakeDataset, model: Model, folder: Path, worker_type: str | None = None
    ) -> None:
        self.make = make
        self.model = model
        self.worker_type = worker_type
        self.number = 0
        self._bases: dict[int, int] = {}
        self._numbers = [0]
        self.given: dict[int, set[int]] = {}
        self.counted: set[tuple[int, int]] = set()
        self.states: list[dict[str, Any]] | None = None
        self.ended: list[bool] = []
        self._folder = folder
        self._num_resumes = 0

    def begin(self, world_size: int, num_workers: int, own_states: bool = False) -> None:
        """Starts the loaders of a topology, from the states saved last."""
        self._num_resumes += 1
        self.ranks = Ranks(
            self.make, world_size, num_workers, num_streams=self.model.num_streams,
            worker_type=self.worker_type or "process",
            states=None if own_states else self.states,
            max_skip_rate=MAX_SKIP_RATE, restart_workers=1000,
            skip_log=self._folder / f"{self._num_resumes}-{{rank}}",
        )  # fmt: skip
        for rank, loader in enumerate(self.ranks.loaders):
            if own_states and self.states:
                loader.restore_state_rank(self.states[rank])
        states = self.ranks.save()
        is_same = world_size == len(self._numbers)
        self._numbers = self._numbers if is_same else [max(self._numbers)] * world_size
        self.number = max(self._numbers)
        self._bases = {self.number: states[self._numbers.index(self.number)]["base"]}
        self.ended = [
            bool(state["ended"]) and number == self.number
            for state, number in zip(states, self._numbers, strict=True)
        ]
        for rank, loader in enumerate(self.ranks.loaders):
            self._watch(rank, loader._run)

    def can_resume_alone(self, world_size: int) -> bool:
        """Whether each rank may have its own state only: one that has nothing left goes ahead."""
        return world_size == len(self.states or ()) and (
            self.model.dataset.endless
            or all(ended or self.left(rank) for rank, ended in enumerate(self.ended))
        )

    def _watch(self, rank: int, run: Any) -> None:
        """Records when a rank begins another pass, which the states of validations do not tell."""
        begin = run._begin_pass

        def begin_pass() -> None:
            self._numbers[rank] += 1
            begin()

        run._begin_pass = begin_pass

    def next(self, rank: int) -> bool:
        """Compares the next item of a rank; returns whether there was one."""
        item = next(self.ranks.iterators[rank], END)
        if item is END:
            self.ended[rank] = True
            self.leave(rank)
            return False
        slot, number = last_slot(self.ranks.loaders[rank]), self._numbers[rank]
        where = f"slot {slot} of pass {number}"
        given = self.given.setdefault(number, set())
        assert slot not in given, f"{where} came twice"
        expected = self.model.slots(number)[slot].item
        assert expected is not END, f"{where} is past the end of its stream"
        assert_same([where, item], [where, expected])
        given.add(slot)
        return True

    def end(self, rank: int) -> None:
        """Takes what a rank has left in its `for`."""
        while self.next(rank):
            pass

    def is_ahead(self, rank: int) -> bool:
        """Whether a rank has begun a pass after that of the others."""
        return self._numbers[rank] > self.number

    def left(self, rank: int | None = None) -> list[int]:
        """Lists the slots of the pass that have an item still to be given, by one rank or all."""
        return [
            slot
            for slot, (item, *_) in self.model.slots(self.number).items()
            if item is not END and slot not in self.given.get(self.number, ())
            and rank in (None, self._place_of(self.number, slot)[1])
        ]  # fmt: skip

    def _place_of(self, number: int, slot: int) -> tuple[int, int]:
        """The step of a slot in its pass, and the rank that it belongs to."""
        base, world_size = self._bases.get(number, 0), len(self.ranks.loaders)
        slots = RankSlots(base, 0, world_size, self.model.num_streams)
        return slots.turn_of(slot), slots.rank_of(slot)

    def kill_worker(self, rank: int, number: int) -> None:
        """Ends a worker of a rank, if it has any; another one takes its streams over."""
        pool = self.ranks.loaders[rank]._run._deliveries
        for worker in getattr(pool, "_workers", [])[number : number + 1]:
            process = getattr(worker, "process", None)
            (worker.leave if process is None else process.kill)()

    def leave(self, rank: int) -> None:
        """Leaves the `for` of a rank, and begins another."""
        self.ranks.iterators[rank] = iter(self.ranks.loaders[rank])

    def begin_pass(self) -> None:
        """Goes to the next pass, as all ranks have ended this one."""
        assert all(self.ended)
        assert not self.left()
        self.number += 1
        self.ended = [False] * len(self.ended)

    # --------------------------------------------------------------------------------- states

    def save(self) -> None:
        """Saves the states of all ranks, and compares what they and the logs count."""
        self.states = self.ranks.save()
        new = {
            (number, slot)
            for number in range(max(self._numbers) + 1)
            for slot in self.model.slots(number)
            if (number, slot) not in self.counted and self._is_past(number, slot)
        }
        self._check_log(new)
        self.counted |= new
        self._check_counts()
        self._check_streams()

    def _is_past(self, number: int, slot: int) -> bool:
        """Whether the rank to which a slot belongs has come past it."""
        assert self.states is not None
        turn, rank = self._place_of(number, slot)
        if turn < 0 or self._numbers[rank] != number:
            return turn >= 0 and self._numbers[rank] > number
        return bool(self.states[rank]["ended"] or turn < self.states[rank]["count"])

    def _check_log(self, new: set[tuple[int, int]]) -> None:
        """Each record of the slots that these ranks came past is in their logs, once."""
        # What a resumed run held before is named by source and number, not by its key.
        found = Multiset(
            json.dumps({**json.loads(line), "sample_key": ""})
            for rank in range(len(self.ranks.loaders))
            for line in self._log(rank).splitlines()
        )
        expected = Multiset(
            json.dumps({**record._asdict(), "sample_key": "", "slot": slot})
            for number, slot in new
            for record in self.model.slots(number)[slot].records
        )
        assert found == expected, f"too much: {found - expected}, missing: {expected - found}"

    def _log(self, rank: int) -> str:
        path = self._folder / f"{self._num_resumes}-{rank}"
        return path.read_text() if path.exists() else ""

    def _check_counts(self) -> None:
        counted, skipped, lost = self.model.counts(self.counted, max(self._numbers))
        first, *others = (loader.stats() for loader in self.ranks.loaders)
        merged = first.merged(others)
        for name, stats in merged.items():
            expected = counted.get(name, SourceStats())
            for field in STATS:
                got, wanted = getattr(stats, field), getattr(expected, field)
                assert got == wanted, f"{field} of {name}: {got}, expected {wanted}"
        assert counted.keys() <= merged.keys()
        for found in (
            Multiset({name: stats.skipped for name, stats in merged.items()}),
            sum((Multiset(loader.num_skipped) for loader in self.ranks.loaders), Multiset[str]()),
        ):
            assert +found == skipped
        if len(set(self._numbers)) == 1:
            for name, number in zip(("failed", "drawn"), lost, strict=True):
                assert sum(state[name] for state in self.states or ()) == number

    def _check_streams(self) -> None:
        """Streams stand as near to `max_skip_rate` as in the undisturbed run."""
        for number, state in zip(self._numbers, self.states or (), strict=True):
            slots, num_streams = self.model.slots(number), self.model.num_streams
            for index, stream in state["streams"].items():
                end = stream["items"] * num_streams + int(index)  # what is after the last batch
                near = [slots[slot].failures for slot in (end - num_streams, end) if slot in slots]
                assert stream["items"] == 0 or stream.get("failures", 0.0) in near


# ----------------------------------------------------------------------- workers in this process


class WorkerHere(Executor):
    """In place of a worker process: has a copy of the dataset, and its deliveries are pickled."""

    def __init__(self, settings: WorkerSettings, config: WorkerConfig) -> None:
        super().__init__(pickle.loads(pickle.dumps(settings)), config)

    def start(self, job: Pass) -> None:
        self._feed = self.settings.feed(job)

    def take(self, _: int, __: float) -> Any:
        return pickle.loads(pickle.dumps(next(self._feed)))


@contextmanager
def workers_here() -> Iterator[None]:
    """Computes what worker processes would in this process, for a `with` block."""
    with mock.patch.dict(executor._EXECUTORS, process=WorkerHere):
        yield
