"""The workers of a rank: started, received from in turn, replaced, and ended."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo

from energon_lite.core.cache_pool import CachePool
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import RankSlots, WorkerConfig
from energon_lite.loader.workers.codec import WorkerError
from energon_lite.loader.workers.deferred_signals import DeferredSignals
from energon_lite.loader.workers.executor import (
    Executor,
    Pass,
    RunSettings,
    WorkerDied,
    WorkerSettings,
    end_workers,
    executor_kind,
)  # fmt: skip
from energon_lite.loader.workers.rank_feed import Delivery, Mark, PassStart, StreamStart, due_slots

logger = logging.getLogger(__name__)

# Workers that die in this time are counted together.
RESTART_WINDOW_SEC = 600.0
_HOW_TO_SEE = "WorkerConfig(num_workers=0) shows what fails."


def _end_dropped(workers: list[Executor], cache_pool: CachePool | None) -> None:
    """Ends the workers of a loader that was dropped, or at the end of the program."""
    with suppress(KeyboardInterrupt):  # it hurries the end
        end_workers(workers)
        if cache_pool is not None:
            cache_pool.workers_ended()


class WorkerPool(Iterator[Delivery]):
    """Collects the deliveries of a rank from its workers, in the order of slots.

    The j-th stream of the rank belongs to worker j mod W. The workers live over all passes. Without
    workers there is one that computes here.

    Args:
        dataset: the pipeline.
        config: rank, seed, and what the workers are.
        settings: how the rank runs.
        start: where the first pass begins.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        config: WorkerConfig,
        settings: RunSettings,
        start: PassStart,
    ) -> None:
        self.pid = os.getpid()
        self._dataset = dataset
        self._settings = settings
        self._config, self._kind = config, executor_kind(config)
        self._workers: list[Executor] = []
        self._finalizer = multiprocessing.util.Finalize(
            self, _end_dropped, (self._workers, settings.cache_pool), exitpriority=100
        )
        self._number = 0
        self._deaths: deque[float] = deque()
        self._limits = settings.limits._replace(report_sec=settings.first_report_sec)
        may_pin = config.num_workers > 0 and torch.cuda.is_available()
        self._pinned = PinnedAhead() if may_pin else None
        self._go_to(start)
        for worker in range(len(self._dealt)):
            self._start_worker(worker)

    def memory_bytes(self) -> list[int]:
        """Returns the memory of each worker whose memory is known."""
        return [*filter(None, (worker.memory_bytes() for worker in self._workers))]

    def begin(self, start: PassStart) -> None:
        """Begins another pass; what was computed of the one before is dropped."""
        self._number += 1
        self._go_to(start)
        for number, worker in enumerate(self._workers):
            worker.start(self._pass_of(number))

    def _go_to(self, start: PassStart) -> None:
        if self._pinned is not None:
            self._pinned.drop()
        self._start = start
        self._deal(start.slots)
        self._received = dict(start.streams)  # ahead of what was yielded
        self._ended: set[int] = set()
        self._slots = due_slots(start, self._ended)
        self._slot = next(self._slots, None)

    def _deal(self, slots: RankSlots) -> None:
        streams = slots.streams()
        # A worker without a stream would have nothing to compute.
        number = min(max(1, self._config.most_workers), len(streams))
        self._dealt = [streams[i::number] for i in range(number)]
        self._worker_of = {
            stream: number for number, dealt in enumerate(self._dealt) for stream in dealt
        }

    def _pass_of(self, worker: int) -> Pass:
        """Returns what a worker has to compute from here on."""
        start, own = self._start, self._dealt[worker]
        slots = start.slots
        if self._slot is not None:
            slots = slots._replace(first=slots.turn_of(self._slot))
        places = {stream: place for stream, place in self._received.items() if stream in own}
        others = frozenset(self._worker_of).difference(own) | self._ended
        return Pass(self._number, PassStart(slots, start.pass_index, places), others)

    def _start_worker(self, number: int) -> None:
        """Starts a worker, or another one in its place."""
        config = self._config
        seed = key_of("workers", config.seed_offset, config.rank, number) & (2**63 - 1)
        info = WorkerInfo(id=number, num_workers=len(self._dealt), seed=seed, dataset=self._dataset)
        worker = self._kind(WorkerSettings(info, self._settings), config)
        self._workers[number : number + 1] = [worker]  # known before an interrupt may come
        worker.start(self._pass_of(number))

    def _is_ready(self) -> bool:
        return self._slot is not None and self._workers[self._worker_at(self._slot)].is_ready()

    def _worker_at(self, slot: int) -> int:
        return self._worker_of[slot % self._start.slots.num_streams]

    def __next__(self) -> Delivery:
        """Returns the next delivery.

        Raises:
            WorkerDied: A worker ended by itself.
            RuntimeError: A wait was too long.
            Exception: Of a worker, in which it was raised.
        """
        if self._pinned is None:
            return self._receive()
        return self._pinned.next(self._receive, self._is_ready)

    def _receive(self) -> Delivery:
        slot = self._slot
        if slot is None:
            raise StopIteration
        delivery: Any = self._received_from(self._worker_at(slot))
        self._limits = self._settings.limits
        if isinstance(delivery, WorkerError):
            delivery.reraise()
        if delivery.item is Mark.END:
            self._ended.add(delivery.stream)
        if delivery.snapshot is not None:
            first = self._received.get(delivery.stream, StreamStart()).first
            self._received[delivery.stream] = StreamStart(first, delivery.snapshot)
        self._slot = next(self._slots, None)
        return cast(Delivery, delivery)

    def _received_from(self, worker: int) -> Delivery | WorkerError:
        """Returns what a worker sends next; replaces it where it dies."""
        while True:
            try:
                return self._workers[worker].receive(self._number, self._limits)
            except WorkerDied as error:
                self._workers[worker].is_replaced = True
                end_workers([self._workers[worker]])
                self._replace(worker, error)

    def _replace(self, worker: int, death: WorkerDied) -> None:
        """Starts another worker for the streams of one.

        Raises:
            WorkerDied: It is of no use, or too many have died.
        """
        allowed, deaths, now = self._settings.restart_workers, self._deaths, time.monotonic()
        while deaths and deaths[0] < now - RESTART_WINDOW_SEC:
            deaths.popleft()
        if not death.may_restart or len(deaths) >= allowed:
            why = ""
            if death.may_restart:
                why = (
                    f"Within ten minutes {len(deaths)} were replaced (restart_workers={allowed}). "
                )
            death.report = f"{why}{_HOW_TO_SEE} {death.report}"
            raise death
        deaths.append(now)
        logger.warning(
            "Worker %s of rank %d died. Another one computes its streams %s from where "
            "they stood; no batch changes. %d more may die within %.0f minutes "
            "(restart_workers=%d).%s",
            str(death),  # a record that is kept would keep the pool, by the frames of the error
            self._config.rank,
            self._dealt[worker],
            allowed - len(deaths),
            RESTART_WINDOW_SEC / 60,
            allowed,
            f"\n{death.report}" if death.report else "",
        )
        with DeferredSignals():
            self._start_worker(worker)

    def end(self) -> None:
        """Ends the workers."""
        if self.pid == os.getpid():
            end_workers(self._workers)
            if self._settings.cache_pool is not None:
                self._settings.cache_pool.workers_ended()
        self._finalizer.cancel()  # last: an interrupt may come before


def pinned(delivery: Delivery) -> Delivery:
    """Returns the delivery with its tensors in page-locked memory."""
    item: Any = pin_memory(delivery.item)  # type: ignore[no-untyped-call]
    return delivery._replace(item=item)


class PinnedAhead:
    """Copies the next batch into page-locked memory while the last one is being used."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._ahead: Future[Delivery] | None = None

    def next(self, receive: Callable[[], Delivery], is_ready: Callable[[], bool]) -> Delivery:
        """Returns the next delivery.

        Args:
            receive: returns the next delivery.
            is_ready: whether it would do so without a wait.

        Raises:
            Exception: Of `receive`; where it was called ahead, after the delivery before.
        """
        ahead, self._ahead = self._ahead, None
        delivery = (ahead or self._received(receive)).result()
        if is_ready():
            self._ahead = self._received(receive)
        return delivery

    def _received(self, receive: Callable[[], Delivery]) -> Future[Delivery]:
        try:
            return self._thread.submit(pinned, receive())
        except Exception as error:
            failed: Future[Delivery] = Future()
            failed.set_exception(error.with_traceback(None))  # whose frames have the future
            return failed

    def drop(self) -> None:
        """Drops what was received ahead."""
        self._ahead = None
