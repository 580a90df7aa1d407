"""The workers of a rank: started, received from in turn, replaced, and ended."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import platform
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import WorkerInfo

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.global_generators import has_turn
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader import messages
from energon_lite.loader.deferred_signals import DeferredSignals
from energon_lite.loader.messages import Closed, Inlet, Unsendable, WorkerError, WorkerJob
from energon_lite.loader.rank_feed import Delivery, Mark, PassStart, StreamStart, due_slots
from energon_lite.loader.worker_main import (
    GRACE_SEC,
    Limits,
    Pass,
    RunSettings,
    Wait,
    WorkerDied,
    WorkerSettings,
    WorkerTimeout,
    work,
)  # fmt: skip
from energon_lite.loader.worker_threads import WorkerThread, warn_of_draws
from energon_lite.stores.cache_pool import CachePool

logger = logging.getLogger(__name__)

# Worker processes that die in this time are counted together.
RESTART_WINDOW_SEC = 600.0
# How long a worker may take to report what it does.
_ANSWER_SEC = 1.0
# After a kill; a process in an uninterruptible wait for a storage outlives it.
_KILL_SEC = 2.0
# Between two looks at a process that closed its files and has not ended.
_PAUSE_SEC = 0.005
# How long no thread of a forked process may be able to run.
_LOCKED_SEC = 5.0
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_CLOCK, _PRIVATE_WAITS = 256, (128, 137)
_LOCKED = (
    "It waits for a lock that a thread of the training process, as one that logs or prints, had "
    "when the process was forked, and that is never released. Start the loader before such "
    'threads, or use WorkerConfig(start_method="forkserver") or worker_type="thread".'
)
_STATES = {
    "D": "it waits for the kernel, often for a storage that does not answer",
    "R": "it runs native code that keeps Python's lock",
    "S": "it sleeps in native code that keeps Python's lock",
    "T": "it was stopped by a signal",
}


class Worker:
    """One worker process.

    Args:
        start_method: "fork", "forkserver" or "spawn"; None for that of `multiprocessing`.
        settings: of the process.
        first: what it computes first.
    """

    def __init__(self, start_method: str | None, settings: WorkerSettings, first: Pass) -> None:
        self._sock, other = socket.socketpair()
        self._inlet = Inlet(self._sock, settings.run.prefetch_factor)
        self._has_sent = self._is_killed = False
        self.num_requests = 0
        context: Any = multiprocessing.get_context(start_method)
        # The kernel reports the end of the thread that starts a process, not of its process.
        is_main = threading.current_thread() is threading.main_thread()
        args = (other, WorkerJob(settings, first), is_main)
        self.process = context.Process(target=work, args=args, daemon=True)
        _workers.add(self)
        self.is_forked = context.get_start_method() == "fork"
        if not self.is_forked:
            multiprocessing.resource_tracker.ensure_running()  # which would unblock the signal
        # Until it ignores them, the process would print a traceback of an interrupt.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        except BaseException:
            self._sock.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            other.close()

    def is_ready(self, for_sec: float = 0) -> bool:
        """Whether there is a delivery, or something else to know; waits for it up to a time."""
        return self._inlet.is_ready(for_sec)

    def receive(self, number: int, limits: Limits) -> Any:
        """Returns its next delivery, or the error that it met.

        Args:
            number: of the pass; what is of another one is dropped.
            limits: how long that may take.

        Raises:
            WorkerDied: It ended, or is stuck and was ended.
            WorkerTimeout: The wait was too long.
            RuntimeError: It failed, and reported why.
        """
        wait: _SocketWait | None = None
        is_gone = False
        while (delivery := self._inlet.take(number)) is None:
            if is_gone:
                raise self._death()
            try:
                if wait is None:
                    wait = _SocketWait(self, limits)
                elif (report := self._inlet.take_report()) is not None:
                    self._has_sent = True
                    if report[0] == messages.FAILED:
                        end_workers([self])
                        raise RuntimeError(f"Worker {self.name} failed: {report[1]}")
                    if report[0] == self.num_requests:
                        wait.on_report(report[1])
                wait()
            except Closed:
                is_gone = True  # maybe after it sent a delivery
        self._has_sent = True
        return delivery

    def begin(self, job: Pass) -> None:
        """Orders the worker to begin a pass."""
        messages.order(self._sock, messages.PASS, body=pickle.dumps(job))

    def ask(self) -> None:
        """Asks it what it does."""
        self.num_requests += 1
        messages.order(self._sock, messages.ASK, self.num_requests)

    def _death(self) -> WorkerDied:
        """Waits for the end of the process; returns how it ended."""
        end_workers([self])
        code, why = self.process.exitcode, ""
        how = "has not ended" if code is None else f"exit code {code}"
        if self._is_killed:
            how = "it closed its socket, and was ended"
        elif code is not None and code < 0:
            how = f"signal {-code}"
            why = "A kill by signal 9 is often a lack of memory." if code == -signal.SIGKILL else ""
        has_ended = self._is_killed or (code is not None and code >= 0)  # by itself
        is_broken = has_ended and not self._has_sent  # it could not start
        return WorkerDied(f"{self.name} ({how})", why, may_restart=not is_broken)

    @property
    def name(self) -> str:
        """Names the process in messages."""
        return f"process {self.process.pid}"

    def leave(self) -> None:
        """Closes the socket, upon which the process ends by itself."""
        self._sock.close()

    def join(self, for_sec: float) -> None:
        """Waits for the end; a process that closes its files looks to `Process.join` as ended."""
        deadline = time.monotonic() + for_sec
        wait([self.process.sentinel], for_sec)
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SEC)

    def kill(self) -> None:
        """Ends the process, if it has not ended."""
        self._is_killed = self._is_killed or self.process.is_alive()
        self.process.kill()


class _SocketWait(Wait):
    """One wait for a delivery of a worker process."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        super().__init__(worker.name, limits)
        self._worker = worker
        self._answer_due = 0.0
        self._free_at = time.monotonic()
        self._is_locked = False

    def __call__(self) -> None:
        """Waits until there is a delivery, or something to read in the socket.

        Raises:
            Closed: Nothing will come.
            WorkerDied: The process is stuck.
            WorkerTimeout: The wait was too long.
        """
        worker = self._worker
        while not worker.is_ready(self.poll_sec):
            # A process that it started may have its end of the socket.
            if not worker.process.is_alive() and not worker.is_ready():
                raise Closed
            now = time.monotonic()
            if not (worker.is_forked and _is_locked(worker.process.pid)):
                self._free_at = now
            is_locked = now > self._free_at + _LOCKED_SEC
            if self.is_due() or (is_locked and not self._is_locked):
                self._is_locked = is_locked
                self._answer_due = now + _ANSWER_SEC
                worker.ask()
            if self._answer_due and now > self._answer_due:
                report = f"It does not answer: {_state_of(worker.process.pid)}."
                self.on_report(report, grace_sec=0)

    def on_report(self, report: str, grace_sec: float = GRACE_SEC) -> None:
        """Logs what the process does, or ends the wait."""
        self._answer_due = 0.0
        try:
            if self._is_locked:
                raise WorkerDied(f"{self._name} (waits for a lock)", f"{_LOCKED} {report}")
            super().on_report(report)
        except WorkerDied:
            end_workers([self._worker], grace_sec)
            raise


def _is_locked(pid: int) -> bool:
    """Whether no thread of a process can run again, as all wait for locks in its memory.

    All but one, which listens; without a limit of time, and so that no other process could end the
    wait. Other waits, for a network, a time or a process, are none for locks.
    """
    num_others = 0
    with suppress(OSError, ValueError):  # of a system without it; a thread runs
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = (task / "syscall").read_text().split()[:5]
            call, _, kind, _, limit = (int(word, 0) for word in words)
            is_lock = call == _FUTEX and kind & ~_CLOCK in _PRIVATE_WAITS and not limit
            if int(task.name) == pid and not is_lock:
                return False
            num_others += not is_lock
        return num_others <= 1
    return False


def _state_of(pid: int) -> str:
    """Returns the state of a process as the kernel knows it."""
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"its state is {state}, so {_STATES.get(state, 'it has ended')}"
    return "nothing is known of it"


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forget_workers() -> None:
    """Closes the sockets in a fork, which would hide the end of its parent from the workers."""
    for worker in list(_workers):
        worker.leave()
        multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_workers)


def end_workers(workers: Sequence[Worker | WorkerThread], grace_sec: float = GRACE_SEC) -> None:
    """Ends workers: by themselves, or after some time by a kill."""
    with DeferredSignals():
        deadline = time.monotonic() + grace_sec
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_KILL_SEC)


def _end_dropped(workers: list[Worker | WorkerThread], cache_pool: CachePool | None) -> None:
    """Ends the workers of a loader that was dropped, or at the end of the program."""
    with suppress(KeyboardInterrupt):  # it hurries the end
        end_workers(workers)
        if cache_pool is not None:
            cache_pool.workers_ended()


class WorkerPool(Iterator[Delivery]):
    """Collects the deliveries of a rank from its workers, in the order of slots.

    The j-th stream of the rank belongs to worker j mod W. The workers live over all passes.

    Args:
        dataset: the pipeline.
        config: rank, seed, and what the workers are.
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
        self._workers: list[Worker | WorkerThread] = []
        self._finalizer = multiprocessing.util.Finalize(
            self, _end_dropped, (self._workers, settings.cache_pool), exitpriority=100
        )
        self._number = 0
        self._deaths: deque[float] = deque()
        self._limits = settings.limits._replace(report_sec=settings.first_report_sec)
        self._pinned = PinnedAhead() if torch.cuda.is_available() else None
        self._go_to(start)
        # Kept: forks that go through a thousand sources for it would copy what they have of them.
        _ = dataset.drawing
        self._may_draw = config.worker_type == "thread" and warn_of_draws(dataset)
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

    def _started(self, number: int) -> Worker | WorkerThread:
        config = self._config
        seed = key_of("workers", config.seed_offset, config.rank, number) & (2**63 - 1)
        info = WorkerInfo(
            id=number, num_workers=self._num_workers, seed=seed, dataset=self._dataset
        )
        settings = WorkerSettings(info, self._settings)
        if config.worker_type == "thread":
            return WorkerThread(settings, self._pass_of(number))
        try:
            return Worker(config.start_method, settings, self._pass_of(number))
        except (OSError, MemoryError) as error:
            messages.add_remedy(error)
            raise

    def _is_ready(self) -> bool:
        return self._slot is not None and self._workers[self._worker_of(self._slot)].is_ready()

    def _worker_of(self, slot: int) -> int:
        stream = slot % self._start.slots.num_streams
        return self._streams.index(stream) % self._num_workers

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
        if self._may_draw and has_turn():
            raise FatalSampleError(
                "A hook that is not marked @stateless has the global generators, and waits for "
                "worker threads whose hooks need them: both would wait for ever. Mark the hooks of "
                "either with @stateless, or use num_workers=0 for the loader that the hook reads."
            )
        delivery: Any = self._received_from(self._worker_of(slot))
        self._limits = self._settings.limits
        if isinstance(delivery, WorkerError):
            delivery.reraise()
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
            except (OSError, MemoryError) as error:
                messages.add_remedy(error)
                raise
            except WorkerTimeout as error:
                raise RuntimeError(
                    f"No batch for {self._limits.timeout_sec:g} s (fail_on_timeout=True, "
                    f"watchdog_timeout_seconds). {error}"
                ) from None
            except WorkerDied as error:
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
            why = (
                "It had sent nothing, so no other was started; its own error is above. Under "
                "'spawn' and 'forkserver' it imports the program again: the program is a file, and "
                f"starts below `if __name__ == '__main__':`. {messages.WAYS}"
            )
            if death.may_restart:
                why = f"Within ten minutes {len(deaths)} were replaced (restart_workers={allowed})."
            death.report = f"{why} WorkerConfig(num_workers=0) shows what fails. {death.report}"
            raise death
        deaths.append(now)
        logger.warning(
            "Worker %s of rank %d died. Another one computes its streams %s from where "
            "they stood; no batch changes. %d more may die within %.0f minutes "
            "(restart_workers=%d).%s",
            str(death),  # a record that is kept would keep the pool, by the frames of the error
            self._config.rank,
            self._own(worker),
            allowed - len(deaths),
            RESTART_WINDOW_SEC / 60,
            allowed,
            f"\n{death.report}" if death.report else "",
        )
        with DeferredSignals():
            self._workers[worker] = self._started(worker)

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
