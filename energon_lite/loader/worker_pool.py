"""The worker processes of a rank: received from in turn, and replaced where they die."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.deferred_signals import DeferredSignals
from energon_lite.loader.messages import Unsendable
from energon_lite.loader.rank_feed import Delivery, Mark, PassStart, StreamStart, due_slots
from energon_lite.loader.worker_main import Pass, Settings
from energon_lite.loader.worker_process import (
    Limits,
    Worker,
    WorkerDied,
    WorkerTimeout,
    end_workers,
)

logger = logging.getLogger(__name__)

# Worker processes that die in this time are counted together.
RESTART_WINDOW_SEC = 600.0


def _end_dropped(workers: list[Worker]) -> None:
    """Ends the worker processes of a loader that was dropped, or at the end of the program."""
    with suppress(KeyboardInterrupt):  # it hurries the end
        end_workers(workers)


class RunSettings(NamedTuple):
    """What decides how a rank runs, and no content.

    Attributes:
        prefetch_factor: batches that each worker process computes ahead.
        limits: how long a batch of a worker process may be waited for.
        first_report_sec: `report_sec` of the first batch.
        restart_workers: how many worker processes may be replaced within ten minutes.
        max_skip_rate: failures per sample that a stream may have.
        skip_log: file of the samples that were skipped.
    """

    prefetch_factor: int
    limits: Limits
    first_report_sec: float
    restart_workers: int
    max_skip_rate: float
    skip_log: Path | None


class WorkerPool(Iterator[Delivery]):
    """Collects the deliveries of a rank from worker processes, in the order of slots.

    The j-th stream of the rank belongs to worker j mod W. The processes live over all passes.

    Args:
        dataset: the pipeline.
        config: rank, seed and start method.
        settings: how the rank runs.
        num_workers: how many there are, at least one.
        start: where the first pass begins.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        config: WorkerConfig,
        settings: RunSettings,
        num_workers: int,
        start: PassStart,
    ) -> None:
        self.pid = os.getpid()
        self._dataset = dataset
        self._config = config
        self._settings = settings
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._finalizer = multiprocessing.util.Finalize(
            self, _end_dropped, (self._workers,), exitpriority=100
        )
        self._number = 0
        self._deaths: deque[float] = deque()
        self._limits = settings.limits._replace(report_sec=settings.first_report_sec)
        self._pinned: PinnedAhead | None = None
        if torch.cuda.is_available():
            self._pinned = PinnedAhead()
        self._go_to(start)
        for worker in range(num_workers):
            self._workers.append(self._started(worker))

    def begin(self, start: PassStart) -> None:
        """Begins another pass; what was computed of the one before is dropped."""
        self._number += 1
        self._go_to(start)
        for number, worker in enumerate(self._workers):
            worker.begin(self._pass_of(number))

    def _go_to(self, start: PassStart) -> None:
        if self._pinned is not None:
            self._pinned.drop()
        self._start = start
        self._streams = start.slots.streams()
        self._received = dict(start.streams)  # ahead of what was yielded
        self._ended: set[int] = set()
        self._slots = due_slots(start, self._ended)
        self._slot = next(self._slots, None)

    def _pass_of(self, worker: int) -> Pass:
        """Returns what a worker has to compute from here on."""
        start, own = self._start, self._own(worker)
        slots = start.slots
        if self._slot is not None:
            slots = slots._replace(first=slots.turn_of(self._slot))
        places = {stream: place for stream, place in self._received.items() if stream in own}
        others = frozenset(self._streams).difference(own) | self._ended
        return Pass(self._number, PassStart(slots, start.pass_index, places), others)

    def _own(self, worker: int) -> list[int]:
        return self._streams[worker :: self._num_workers]

    def _started(self, number: int) -> Worker:
        settings, config = self._settings, self._config
        seed = key_of("workers", config.seed_offset, config.rank, number) & (2**63 - 1)
        settings_of_worker = Settings(
            number,
            self._num_workers,
            seed,
            self._dataset,
            settings.max_skip_rate,
            settings.prefetch_factor,
        )
        return Worker(config.start_method, settings_of_worker, self._pass_of(number))

    def _is_ready(self) -> bool:
        return self._slot is not None and self._workers[self._worker_of(self._slot)].is_ready()

    def _worker_of(self, slot: int) -> int:
        stream = slot % self._start.slots.num_streams
        return self._streams.index(stream) % self._num_workers

    def __next__(self) -> Delivery:
        """Returns the next delivery.

        Raises:
            WorkerDied: A worker process ended by itself.
            RuntimeError: A wait was too long.
            Exception: Of a worker process, in which it was raised.
        """
        if self._pinned is None:
            return self._receive()
        return self._pinned.next(self._receive, self._is_ready)

    def _receive(self) -> Delivery:
        slot = self._slot
        if slot is None:
            raise StopIteration
        delivery: Any = self._received_from(self._worker_of(slot))
        self._limits = self._settings.limits
        if isinstance(delivery, ExceptionWrapper):
            delivery.reraise()  # type: ignore[no-untyped-call]
        if type(delivery.item) is Unsendable:
            raise TypeError(delivery.item.reason)
        if delivery.item is Mark.END:
            self._ended.add(delivery.stream)
        if delivery.snapshot is not None:
            first = self._received.get(delivery.stream, StreamStart()).first
            self._received[delivery.stream] = StreamStart(first, delivery.snapshot)
        self._slot = next(self._slots, None)
        return cast(Delivery, delivery)

    def _received_from(self, worker: int) -> Any:
        """Returns what a worker sends next; replaces it where it dies."""
        while True:
            try:
                return self._workers[worker].receive(self._number, self._limits)
            except WorkerTimeout as error:
                raise RuntimeError(
                    f"No batch for {self._limits.timeout_sec:g} s (fail_on_timeout=True, "
                    f"watchdog_timeout_seconds). {error}"
                ) from None
            except WorkerDied as error:
                self._replace(worker, error)

    def _replace(self, worker: int, death: WorkerDied) -> None:
        """Starts another process for the streams of a worker.

        Raises:
            WorkerDied: It is of no use, or too many have died.
        """
        allowed, deaths, now = self._settings.restart_workers, self._deaths, time.monotonic()
        while deaths and deaths[0] < now - RESTART_WINDOW_SEC:
            deaths.popleft()
        if not death.may_restart or len(deaths) >= allowed:
            why = "It had sent nothing, so no other was started"
            if death.may_restart:
                why = f"Within ten minutes {len(deaths)} were replaced (restart_workers={allowed})"
            death.report = f"{why}; WorkerConfig(num_workers=0) shows what fails. {death.report}"
            raise death
        deaths.append(now)
        logger.warning(
            "Worker process %s of rank %d died%s. Another one computes its streams %s from where "
            "they stood; no batch changes. %d more may die within %.0f minutes "
            "(restart_workers=%d).%s",
            death,
            self._config.rank,
            ", often for lack of memory" if "signal 9" in str(death) else "",
            self._own(worker),
            allowed - len(deaths),
            RESTART_WINDOW_SEC / 60,
            allowed,
            f"\n{death.report}" if death.report else "",
        )
        with DeferredSignals():
            self._workers[worker] = self._started(worker)

    def end(self) -> None:
        """Ends the worker processes."""
        if self.pid == os.getpid():
            end_workers(self._workers)
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
