"""The loader: torch's worker processes over the streams of a rank, and the state of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from energon_lite.core.activity import DEFAULT_MAX_SKIP_RATE, SkipRecord
from energon_lite.core.dataset import SavableDataset, StreamRun, count_rank_items
from energon_lite.core.errors import StateError
from energon_lite.core.state import FORMAT, JSON, VERSION, RestoreKey, Snapshot, as_key
from energon_lite.core.topology import RankSlots, Stream, WorkerConfig
from energon_lite.loader.processes import dead_workers, end_workers, worker_loader
from energon_lite.loader.ranks import check_steps, gathered, handed_out
from energon_lite.loader.resume import Place, resume
from energon_lite.loader.stats import Counter, Stats, lost_samples
from energon_lite.loader.turns import Delivery, Mark, PassStart, Turns
from energon_lite.loader.watchdog import Watchdog

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SavableDataLoader(Generic[T]):
    """Gives the batches of this rank, and the state of the run at any moment between two of them.

    In training each `iter` goes on after the last batch given; in validation it starts a new pass.

    Args: those of `get_loader`.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        worker_config: WorkerConfig | None = None,
        prefetch_factor: int = 2,
        watchdog_timeout_seconds: float | None = 60,
        watchdog_initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
        max_skip_rate: float = DEFAULT_MAX_SKIP_RATE,
        skip_log: str | PathLike[str] | None = None,
    ) -> None:
        if not 0 <= max_skip_rate <= 1:
            raise ValueError(f"max_skip_rate={max_skip_rate} must lie in 0..1")
        if prefetch_factor < 1:
            raise ValueError(f"prefetch_factor={prefetch_factor} must be at least 1")
        self.dataset = dataset
        self.worker_config = _place_in_run(dataset, worker_config)
        self.prefetch_factor = prefetch_factor
        self.max_skip_rate = max_skip_rate
        config = self.worker_config
        self._skip_log = Path(str(skip_log).format(rank=config.rank)) if skip_log else None
        slots = RankSlots(0, config.rank, config.world_size, config.default_num_streams)
        check_steps(dataset, slots)
        self._place = Place(PassStart(slots))
        self._watchdog = Watchdog(watchdog_timeout_seconds, watchdog_initial_timeout_seconds)
        waits = (watchdog_timeout_seconds or 0, watchdog_initial_timeout_seconds or 0)
        self._timeout_sec = max(waits) if fail_on_timeout else 0
        self._config = dataset.config()
        self._counter = Counter(dataset)
        self._has_begun = False
        self._snapshots: dict[int, Snapshot] = {}
        self._torch_loader: DataLoader[Delivery] | None = None
        self._turns: Turns | None = None
        self._deliveries: Iterator[Delivery] | None = None
        self._end_workers: weakref.finalize[..., Any] | None = None

    # ------------------------------------------------------------------------------ iteration

    @property
    def num_streams(self) -> int:
        """How many streams the run consists of."""
        return self._place.start.slots.num_streams

    @property
    def num_skipped(self) -> dict[str, int]:
        """Counts, by source, the samples left out so far, of the batches given here."""
        return dict(self._place.skipped)

    def stats(self) -> Stats:
        """Gives what each source gave here, and what the blend asks of it.

        Counts of this rank since the run began; `stats().reduced()` is that of all ranks.
        """
        return self._counter.stats(self._num_run_items, self._place.skipped)

    @property
    def _num_run_items(self) -> int:
        """How many items all ranks have given, in step with this one, in all passes."""
        place = self._place
        slots = place.start.slots
        here = slots.base + place.count * slots.world_size
        if self.dataset.endless:
            return here
        length = self.dataset.num_items(Stream(0, 1))
        return place.start.pass_index * length + (length if place.ended else min(here, length))

    def __len__(self) -> int:
        """Counts the items of this rank in this pass (an epoch, if endless), before skipping."""
        config = dataclasses.replace(self.worker_config, num_streams=self.num_streams)
        return count_rank_items(self.dataset, config, self._place.start.pass_index)

    def __iter__(self) -> Iterator[T]:
        """Gives the rest of the pass in training; a new pass in validation."""
        place, length = self._place, self.dataset.pass_length
        if self.dataset.training and length is not None and place.items_in_pass >= length:
            place.items_in_pass = 0  # the last `for` was left with its last item
        if place.ended or (self._has_begun and not self.dataset.training):
            self._begin_pass()
        return self._batches()

    def _batches(self) -> Iterator[T]:
        length = self.dataset.pass_length
        # A virtual epoch that begins where the data ends goes on with the next pass over them.
        may_go_on = self.dataset.training and length is not None
        while length is None or self._place.items_in_pass < length:
            if self._deliveries is None:  # before the watchdog has a thread: a fork finds none
                self._deliveries = self._start_deliveries()
            since = perf_counter()
            with self._watchdog:
                delivery = self._next_delivery(self._deliveries)
            if delivery is None and may_go_on and self._place.items_in_pass == 0:
                may_go_on = False
                self._begin_pass()
            elif delivery is None:
                self._place.ended = True
                break
            else:
                self._place.items_in_pass += 1
                waited = perf_counter() - since
                self._counter.add(delivery.costs.rows, delivery.skipped, waited)
                yield delivery.item
        if not self.dataset.training:
            self._place.ended = True
        self._place.items_in_pass = 0

    def _next_delivery(self, deliveries: Iterator[Delivery]) -> Delivery | None:
        """Gives the next batch that is this rank's to give; None at the end of the pass."""
        self._has_begun = True
        place, slots = self._place, self._place.start.slots
        try:
            for delivery in deliveries:
                item, slot, stream, snapshot, skipped, costs = delivery
                if item is Mark.PAD:
                    continue
                if snapshot is not None:
                    self._snapshots[stream] = snapshot
                if place.given and place.is_given(slot):
                    continue
                if skipped:
                    self._count(skipped, slot)
                if item is Mark.END:
                    self._counter.add(costs.rows, skipped)
                if item is not Mark.END:
                    place.count = slots.turn_of(slot) + 1
                    return delivery
        except BaseException as error:
            dead = dead_workers(deliveries)
            # What was computed ahead is lost with the workers; the state stands where it stood.
            self._stop_workers()
            if dead and isinstance(error, Exception):
                raise RuntimeError(
                    f"Worker process {dead} of rank {slots.rank} died after batch "
                    f"{place.count - 1} of the rank (a kill by signal 9 is often a lack of "
                    "memory). Nothing is lost: iterate the loader again to go on with the next "
                    "batch, or resume from a saved state."
                ) from error
            raise
        return None

    def _begin_pass(self) -> None:
        """Goes to the start of the next pass, with the same worker processes."""
        place = self._place
        self._place = Place(place.start.after(self.dataset.training), skipped=place.skipped)
        self._snapshots = {}
        self._has_begun = False
        if self._torch_loader is not None:
            self._deliveries = iter(self._torch_loader)
        elif self._turns is not None:
            self._deliveries = iter(self._turns)

    def _start_deliveries(self) -> Iterator[Delivery]:
        start = self._place_to_start_from()
        self._turns = Turns(self.dataset, start, self.max_skip_rate)
        config = self.worker_config
        # A worker without a stream would only ever deliver marks.
        num_workers = min(config.num_workers, start.slots.num_turns)
        self._say_what_it_costs(start.slots)
        if num_workers == 0:
            return iter(self._turns)
        self._torch_loader = worker_loader(
            self._turns, num_workers, config, self.prefetch_factor, self._timeout_sec
        )
        deliveries: Any = iter(self._torch_loader)
        self._end_workers = weakref.finalize(self, end_workers, deliveries, os.getpid())
        return deliveries  # type: ignore[no-any-return]

    def _place_to_start_from(self) -> PassStart:
        """Gives where workers begin: where the run stood when they were last stopped."""
        place = self._place
        if place.count or self._snapshots:
            states = [json.loads(json.dumps(self.save_state_rank()))]
            self._place = resumed = self._resumed(states)
            resumed.items_in_pass = place.items_in_pass
        return self._place.start

    def _say_what_it_costs(self, slots: RankSlots) -> None:
        if slots.stride > 1:
            free = [d for d in range(1, slots.num_streams + 1) if slots.num_streams % d == 0]
            near = sorted(sorted(free, key=lambda d: abs(d - slots.world_size))[:2])
            logger.warning(
                "%d ranks share %d streams, so each batch is computed by %d ranks. World sizes %s "
                "would cost nothing extra; better, make num_streams a multiple of every world size "
                "that you may use.",
                slots.world_size,
                slots.num_streams,
                slots.stride,
                near,
            )

    def _stop_workers(self) -> None:
        if self._end_workers is not None:
            self._end_workers()
        self._end_workers = None
        self._deliveries = None
        self._torch_loader = None
        self._turns = None

    def _count(self, records: list[SkipRecord], slot: int) -> None:
        skipped = self._place.skipped
        for source, number in lost_samples(records).items():
            skipped[source] = skipped.get(source, 0) + number
        if self._skip_log is not None:
            with self._skip_log.open("a", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps({**record._asdict(), "slot": slot}) + "\n")

    # ---------------------------------------------------------------------------------- state

    def save_state_rank(self) -> dict[str, Any]:
        """Gives the state of this rank, as plain JSON; asks no worker and waits for nothing."""
        place = self._place
        slots = place.start.slots
        snapshots = {
            stream: start.snapshot
            for stream, start in place.start.streams.items()
            if start.snapshot is not None
        }
        snapshots.update(self._snapshots)
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_streams": slots.num_streams,
            "rank": slots.rank,
            "world_size": slots.world_size,
            "pass": place.start.pass_index,
            "base": slots.base,
            "count": place.count,
            "ended": place.ended,
            "given": [region.to_json() for region in place.given],
            "items_in_pass": place.items_in_pass,
            "skipped": dict(place.skipped),
            "stats": self._counter.to_json(self._num_run_items),
            "streams": {str(s): snapshots[s].to_json() for s in sorted(snapshots)},
            "config": self._config,
        }

    def restore_state_rank(self, state: dict[str, Any] | None, *, migrate: bool = False) -> None:
        """Goes to where this rank stood when it saved, on the same topology; None does nothing.

        Args:
            state: of this rank.
            migrate: as in `restore_state_global`.

        Raises:
            StateError: The state does not fit.
        """
        if state is not None:
            self.restore_state_global([state], migrate=migrate)

    def save_state_global(self, global_dst_rank: int = 0) -> list[dict[str, Any]] | None:
        """Gathers the states of all ranks on one; every rank must call it.

        Args:
            global_dst_rank: the rank, in the whole `torch.distributed` world, that gets the list.

        Returns:
            The list on that rank, None on the others.
        """
        return gathered(self.save_state_rank(), global_dst_rank, self.worker_config)

    def restore_state_global(
        self,
        states: Sequence[dict[str, Any]] | None,
        *,
        src_rank: int | None = None,
        migrate: bool = False,
    ) -> list[str]:
        """Goes to where a run stood, from the states of all its ranks, on any topology.

        Args:
            states: the states of all ranks that saved.
            src_rank: the rank, inside the data-parallel group, that has the list; the others give
                None. By default every rank gives it.
            migrate: whether the blend may have been edited: unchanged sources go on where they
                were, new ones start at their beginning.

        Returns:
            What was edited, source by source; it is logged too.

        Raises:
            StateError: The states do not fit each other or this pipeline; nothing was changed.
        """
        if src_rank is not None:
            states = handed_out(states, src_rank, self.worker_config)
        if not isinstance(states, (list, tuple)):
            raise StateError(
                f"{type(states).__name__} is no list of the states of all ranks; give the list, or "
                "src_rank of the rank that has it"
            )
        place = self._resumed(list(states), migrate)
        check_steps(self.dataset, place.start.slots, StateError)
        for edit in place.edits:
            logger.warning("Restored with an edited blend: %s", edit)
        self._stop_workers()
        self._has_begun = False
        self._snapshots = {}
        self._place = place
        self._counter = Counter(self.dataset, place.stats, self._num_run_items)
        return place.edits

    def _resumed(self, states: list[dict[str, Any]], migrate: bool = False) -> Place:
        config = self.worker_config
        return resume(
            states,
            rank=config.rank,
            world_size=config.world_size,
            num_streams=config.num_streams,
            config=self._config,
            endless=self.dataset.endless,
            fresh=lambda num_streams: StreamRun(self.dataset, Stream(0, num_streams)).snapshot(),
            migrate=migrate,
        )

    def state_dict(self) -> dict[str, Any]:
        """Gives `save_state_rank()`, under the name that trainers look for."""
        return self.save_state_rank()

    def load_state_dict(
        self, state: dict[str, Any] | Sequence[dict[str, Any]], *, migrate: bool = False
    ) -> None:
        """Restores the state of this rank, or a list of the states of all."""
        self.restore_state_global([state] if isinstance(state, dict) else state, migrate=migrate)

    # ---------------------------------------------------------------------------- inspection

    def config(self) -> dict[str, JSON]:
        """Gives the settings that decide the content."""
        return self._config

    def can_restore_sample(self) -> bool:
        """Whether every stage can be run again on one sample."""
        return self.dataset.can_restore_sample()

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again that carried `restore_key` (also as JSON), in this process."""
        return self.dataset.restore_sample(as_key(restore_key))


def _place_in_run(dataset: SavableDataset[Any], given: WorkerConfig | None) -> WorkerConfig:
    own = dataset.worker_config
    if given is not None and own is not None and given.seed_offset != own.seed_offset:
        raise ValueError(
            f"The loader's worker_config has seed_offset={given.seed_offset}, the dataset's has "
            f"{own.seed_offset}; give it to the dataset only"
        )
    return given or own or WorkerConfig.default_worker_config()
