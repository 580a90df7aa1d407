"""The run of one rank: its position, its workers, and the batches that they deliver."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from time import perf_counter
from typing import Any, Generic, TypeVar

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import append, pass_on
from energon_lite.core.state import Snapshot, checksum, digest
from energon_lite.core.topology import RankSlots, Stream, WorkerConfig
from energon_lite.loader.count_table import weights_in
from energon_lite.loader.ends import EvenPass, PassEnds
from energon_lite.loader.own_generators import warn_of_own_generators
from energon_lite.loader.rank_store import compare_settings
from energon_lite.loader.resume import (
    LoaderPosition,
    check_steps,
    compressed,
    resume,
    warn_of_shared_streams,
)  # fmt: skip
from energon_lite.loader.stats import Counter, FailureLimit
from energon_lite.loader.trainers import Seek
from energon_lite.loader.workers.deferred_signals import DeferredSignals
from energon_lite.loader.workers.executor import RunSettings, WorkerDied
from energon_lite.loader.workers.rank_feed import Delivery, Mark, PassStart
from energon_lite.loader.workers.watchdog import Watchdog
from energon_lite.loader.workers.worker_pool import WorkerPool
from energon_lite.sources.expected_reads import announce
from energon_lite.stages.loss_weights import LossWatch, warn_of_unused_weights

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TWO_ITERATORS = (
    "This iterator of the loader has ended: a later iter(loader) took its place, as both would "
    "share the batches of one epoch. To look at a batch during a loop, or to iterate twice at "
    "once, make a second loader: get_loader(dataset)."
)
_END = Mark.END  # an enum takes as long as a call to find it


class RankRun(Generic[T]):
    """Runs the passes of one rank from a position, and knows at any moment where it stands.

    Args:
        dataset: the pipeline.
        config: the position of the rank, and how its worker processes are made.
        settings: how it runs.
        watchdog: watches the waits for a batch.
        ends: how a pass over finite data ends.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        config: WorkerConfig,
        settings: RunSettings,
        watchdog: Watchdog,
        ends: PassEnds,
    ) -> None:
        slots = RankSlots(0, config.rank, config.world_size, config.default_num_streams)
        check_steps(dataset, slots)
        dataset.check_end(Stream(0, slots.num_streams))
        announce(dataset, slots, config.node_groups)
        if config.rank == 0:
            warn_of_own_generators(dataset)
        self.dataset = dataset
        settings_of_all = dataset.config()
        self.config = compressed(settings_of_all), digest(settings_of_all), settings_of_all
        self._weights = weights_in(settings_of_all)
        self._set_position(LoaderPosition(PassStart(slots)))
        self.counter = Counter(dataset, self._weights)
        self.worker_config = config
        self._settings = settings
        self._watchdog = watchdog
        self._ends = ends
        self._limit = FailureLimit(dataset, settings.max_pass_rate)
        self.seek = Seek()
        self._is_compared = False
        self.looks_ahead = False
        self.is_last = False
        self._even: EvenPass | None = None
        self._may_warn = dataset.traits.unasked_weights and config.rank == 0
        self._loss_watch = LossWatch()
        self._deliveries: WorkerPool | None = None
        self._place = self._mark  # where the run stood after the last step that was done
        # The second also after a step that was broken off twice.
        self._is_in_step = self._is_torn = False
        self._newest_iterator: object = None

    def go_to(self, position: LoaderPosition) -> None:
        """Stops the worker processes; the next batch is that of `position`."""
        self._whole(self._go_to, position)

    def _go_to(self, position: LoaderPosition) -> None:
        self.stop_workers()
        announce(self.dataset, position.start.slots, self.worker_config.node_groups)
        self._set_position(position)
        self._is_compared = False
        self.seek = Seek(is_restored=True, is_fresh=False)
        self.counter = Counter(
            self.dataset, self._weights, position.counted, position.before, self.num_run_items
        )

    def _set_position(self, position: LoaderPosition) -> None:
        """Puts the run to the start of a pass, or to where it is resumed in one."""
        self.position = position
        self._snapshots: dict[int, Snapshot] = {}
        self._ahead: list[Delivery | Exception | None] = []
        self._passed: list[Delivery] = []  # fetched on the way to the next batch; not counted
        self._has_begun = False

    @property
    def num_run_items(self) -> int:
        """The number of items that all ranks have emitted, in step with this one, in all passes."""
        return self._run_items_at(self.position)

    def _run_items_at(self, position: LoaderPosition) -> int:
        slots = position.start.slots
        here = slots.base + position.count * slots.world_size
        if self.dataset.endless:
            return here
        length = self.dataset.num_items(Stream(0, 1))
        here = length if position.ended else min(here, length)
        return position.start.pass_index * length + here

    @property
    def memory_bytes(self) -> list[int]:
        """The memory of each worker process."""
        return self._deliveries.memory_bytes() if self._deliveries else []

    def iterate(self) -> Iterator[T]:
        """Begins with the first batch: trainers call `set_epoch` after `iter`, too.

        An earlier iterator of data that end is refused from then on: both would share one epoch.
        """
        self._whole(self._begin, self.seek)
        has_end = not self.dataset.endless or self.dataset.pass_length is not None
        self._newest_iterator = own = object() if has_end else None

        def advance(has_yielded: bool) -> Any:
            if self._newest_iterator is not own:
                raise RuntimeError(_TWO_ITERATORS)
            return self._whole(self._advance, has_yielded)

        yield from self._batches(advance)

    def _whole(self, advance: Callable[[Any], Any], argument: Any) -> Any:
        """Makes a step; until it is done, the run stands, and is saved, where it stood before."""
        if self._is_in_step:
            raise RuntimeError("A batch is under way: iterate or restore the loader between two")
        if self._is_torn:
            self._go_back()
        try:
            self._is_in_step = self._is_torn = True
            result = advance(argument)
            # No handler of a signal and no exception comes between these.
            self._place, self._is_torn = self._mark, False
        except BaseException:
            with suppress(BaseException):  # of several interrupts, the first is raised
                self._go_back()
            raise
        finally:
            self._is_in_step = False
        return result

    def _begin(self, seek: Seek) -> None:
        """Begins the next `iter`: the rest of the pass in training, a new pass in validation."""
        self.worker_config.nodes.check(self.position.start.slots.num_streams)
        if not self._is_compared:
            self._compare_ranks(seek)
        self.seek = Seek(is_fresh=False, offset=seek.offset)
        if self._ahead and self._ahead[0] is None:
            self._advance(True)  # the last `for` was left with the last batch, known to be it
        if self.dataset.training:
            self._go_to_epoch(seek)
        position, length = self.position, self.dataset.pass_length
        is_at_limit = length is not None and position.items_in_pass >= length
        if is_at_limit:
            position.items_in_pass = 0  # the last `for` was left with its last item
        if position.ended or ((is_at_limit or self._has_begun) and not self.dataset.training):
            self._begin_pass()
        if self.dataset.training and (seek.epoch or seek.batch):
            self._discard(seek)

    def _compare_ranks(self, seek: Seek) -> None:
        """Compares with the other ranks what must be the same on all."""
        settings = {
            "num_streams": self.position.start.slots.num_streams, "end": self._ends.chosen(),
            "set_epoch": seek.epoch or 0, "is_restored": seek.is_restored,
            "limit or virtual_epoch_length": self.dataset.pass_length,
            "sources": [*self._weights], "of": self.config[-1],
        }  # fmt: skip
        kind = "training" if self.dataset.training else "validation"
        compare_settings(self.worker_config, kind, settings)
        self._is_compared = True

    def _discard(self, seek: Seek) -> None:
        """Computes the batches that a trainer has had before, without yielding them."""
        length = self.dataset.pass_length
        if seek.is_fresh and length is not None:
            for _ in range(seek.epoch or 0):
                deque(self._batches(self._advance), maxlen=0)
                self._begin(self.seek)
        has_passes = not self.dataset.endless or length is not None
        num_returned = self.position.items_in_pass if has_passes else 0
        num_steps = self._ends.num_steps(self.position)
        number = seek.num_to_discard(has_passes, num_returned, num_steps)
        deque(islice(self._batches(self._advance), number), maxlen=0)

    def _go_to_epoch(self, seek: Seek) -> None:
        """Goes to the start of the pass that a trainer asks for, unless the run is in it."""
        start = self.position.start
        here = start.pass_index + self.position.ended
        target = seek.target(here)
        self.seek.offset = seek.offset
        # Else the epochs of a trainer are no passes, but intervals of the run.
        has_epochs = not self.dataset.endless and self.dataset.pass_length is None
        if not has_epochs or target in (None, here):
            return
        if target == start.pass_index + 1:
            self._begin_pass()
            return
        self.stop_workers()
        slots = start.slots._replace(base=0, first=0)
        self._set_position(LoaderPosition(PassStart(slots, target)))

    def _batches(self, advance: Callable[[bool], Delivery | None]) -> Iterator[T]:
        """Yields what is left of the pass or virtual epoch."""
        has_yielded = False
        while (delivery := advance(has_yielded)) is not None:
            has_yielded = True
            if self._may_warn:
                self._may_warn = False
                warn_of_unused_weights(delivery.item)
            if self._loss_watch.is_on:
                self._loss_watch(delivery.item)
            yield delivery.item
        self._check_failures(is_end=True)

    @property
    def _mark(self) -> Any:
        """The place of the run, as values that are never changed."""
        position, counter = self.position, self.counter
        return position, vars(position).copy(), self._snapshots, self.seek, counter, counter.mark

    def _go_back(self) -> None:
        """Returns to before the step; what was computed ahead is lost, and is computed again."""
        with DeferredSignals():
            self.position, attributes, self._snapshots, *rest = self._place
            self.seek, self.counter, self.counter.mark = rest
            vars(self.position).update(attributes)
            self.stop_workers()
            self._is_torn = False

    def _advance(self, has_yielded: bool) -> Delivery | None:
        """Advances to the next delivery, or by None to the end of the pass or virtual epoch."""
        position, length = self.position, self.dataset.pass_length
        if length is not None and position.items_in_pass >= length:
            position.ended = position.ended or not self.dataset.training
            position.items_in_pass = 0
            return None
        deliveries = self._deliveries
        is_here = deliveries is not None and deliveries.pid == os.getpid()
        if not is_here and not self._ahead:
            with DeferredSignals():  # before the watchdog has a thread: a fork finds none
                self._deliveries = self._start_deliveries()
        since = perf_counter()
        delivery = self._next_step()
        if delivery is None:
            self._ends.learn(self.position)
            if has_yielded or not self._next_pass_is_due():
                self.position.ended, self.position.items_in_pass = True, 0
                return None
            self._begin_pass()
            return self._advance(True)  # no third time: the data may be empty
        self.position.items_in_pass += 1
        self.position.peers = None
        self.counter.add(delivery.costs, delivery.skipped, perf_counter() - since)
        if self.looks_ahead:
            self._look_ahead()
        return delivery

    def _check_failures(self, *, is_end: bool) -> None:
        """Ends a validation that lost too many samples; with other ranks, at the end of the pass.

        Raises:
            FatalSampleError: It did.
        """
        counts = self.position.failed, self.position.drawn
        is_whole = is_end and (self.worker_config.world_size == 1 or self._even is not None)
        if is_end and self._even is not None:
            counts = self._even.end_pass(counts)
        if is_end or self._even is None:
            self._limit.check(*counts, is_whole=is_whole)

    def _next_pass_is_due(self) -> bool:
        """Whether an `iter` that finds nothing left of a pass belongs to the next one.

        So it is where a consumer took as many batches as there are, and never saw the end; and
        where a virtual epoch begins at the end of the data.
        """
        position = self.position
        if self.dataset.training and self.dataset.pass_length is not None:
            return True
        if position.num_steps and position.peers is None:
            return True
        # Just resumed: where other ranks have something left, this one waits; with those that end
        # together none has.
        has_begun = bool(position.num_steps or position.start.slots.base or position.emitted)
        return has_begun and (self._even is not None or position.all_are_emitted(self.dataset))

    def _look_ahead(self) -> None:
        """Finds out, for a trainer that wants to know, whether the current batch is the last one.

        The state stays behind this batch; the next one is counted when it is yielded.
        """
        length = self.dataset.pass_length
        self.is_last = length is not None and self.position.items_in_pass >= length
        if self.is_last or self.dataset.endless:
            return
        try:
            self._ahead = [self._computed_step()]
            self.is_last = self._ahead[0] is None
        except Exception as error:
            pass_on(error)
            self.stop_workers()
            self._ahead = [error]  # raised with the next step

    def _next_step(self) -> Delivery | None:
        """Returns the next delivery of this rank, in step with the others; None at the end."""
        delivery = self._ahead.pop() if self._ahead else self._computed_step()
        if isinstance(delivery, Exception):
            raise delivery
        position = self.position
        position.num_steps += delivery is not None
        if delivery is not None and delivery.is_padding:
            return delivery  # what came at the end of the streams counts at the end of the pass
        while self._passed:
            self._pass_by(self._passed.pop(0))
        if delivery is not None:
            self._pass_by(delivery)
            if delivery.skipped:
                self._check_failures(is_end=False)
            position.count = position.start.slots.turn_of(delivery.slot) + 1
        return delivery

    def _computed_step(self) -> Delivery | None:
        if not self._has_begun:
            self._even = self._ends.begin(self.position)
        self._has_begun = True
        return self._fetch() if self._even is None else self._even.next(self._fetch)

    def _fetch(self) -> Delivery | None:
        """Returns the next batch that is this rank's to give; None at the end of its pass."""
        position, deliveries = self.position, self._deliveries
        assert deliveries is not None
        try:
            with self._watchdog:
                while (delivery := next(deliveries, None)) is not None:
                    is_emitted = position.emitted and position.is_emitted(delivery.slot)
                    if delivery.item is not _END and not is_emitted:
                        return delivery
                    self._passed.append(delivery._replace(item=_END))  # its batch is not kept
        except WorkerDied as error:
            last = self.position.count - 1
            raise RuntimeError(
                f"Worker {error} of rank {self.worker_config.rank} died "
                f"{'before the first batch' if last < 0 else f'after batch {last}'} of the rank. "
                "Nothing is lost: iterate the loader again to resume with the next batch, or "
                "resume from a saved state. "
                f"{error.report}".rstrip()
            ) from None
        return None

    def _pass_by(self, delivery: Delivery) -> None:
        """Goes to where a stream stands after a delivery; counts what only this slot counts."""
        # Values are replaced and never changed, so that a step that fails can be taken back.
        if delivery.snapshot is not None:
            self._snapshots = {**self._snapshots, delivery.stream: delivery.snapshot}
        position = self.position
        if position.emitted and position.is_emitted(delivery.slot):
            return
        position.failed, position.drawn = self._limit.counted(
            position.failed, position.drawn, delivery
        )
        if delivery.skipped and self._settings.skip_log is not None:
            rows = ({**record._asdict(), "slot": delivery.slot} for record in delivery.skipped)
            append(self._settings.skip_log, "".join(json.dumps(row) + "\n" for row in rows))
        if delivery.item is _END:
            self.counter.add(delivery.costs, delivery.skipped)

    def _begin_pass(self) -> None:
        """Goes to the start of the next pass, with the same worker processes."""
        self._set_position(LoaderPosition(self.position.start.after(self.dataset.training)))
        if self._deliveries is not None:
            self._deliveries.begin(self.position.start)

    def _start_deliveries(self) -> WorkerPool:
        settings, config, position = self._settings, self.worker_config, self.position
        if self._snapshots or position.count != position.start.slots.first:
            # To where the run stood when workers were stopped.
            state = json.loads(json.dumps(self._state_at(self._mark)))
            self.position = resumed = self.resumed([state])
            resumed.peers = position.peers
        start = self.position.start
        pool = WorkerPool(self.dataset, config, settings, start)
        warn_of_shared_streams(start.slots)
        return pool

    def stop_workers(self) -> None:
        """Ends the worker processes, if there are any; the position stays."""
        deliveries, self._deliveries = self._deliveries, None  # first: the end may be interrupted
        self._ahead, self._passed = [], []  # computed again from where the run stands
        if self._even is not None:
            self._even.forget()
        if deliveries is not None:
            deliveries.end()

    def resumed(self, states: list[dict[str, Any]], migrate: bool = False) -> LoaderPosition:
        """Returns the position of this rank that saved states describe.

        Raises:
            StateError: They do not fit each other or this pipeline.
        """
        return resume(states, self.dataset, self.worker_config, self.config, migrate)

    def state(self, *, as_text: bool = True) -> dict[str, Any]:
        """Returns where the rank stands, as plain JSON; asks no worker and waits for nothing.

        In a step, as by a handler of a signal, it is where the rank stood before.

        Args:
            as_text: whether the streams are compressed.
        """
        return self._state_at(self._place, as_text)

    def _state_at(self, place: Any, as_text: bool = False) -> dict[str, Any]:
        _, attributes, snapshots, _, counter, counted = place
        position, counter = LoaderPosition(**attributes), copy.copy(counter)
        counter.mark = counted
        stats = counter.table(self._run_items_at(position)).to_json(self._weights)
        state = position.to_json(snapshots, stats)
        state["config"], state["pipeline"], _ = self.config
        if as_text:
            state["streams"] = compressed(state["streams"])
        return {**state, "checksum": checksum(state)}
