"""The worker processes of a loader: started, listened to in turn, and ended."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch._utils import ExceptionWrapper

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader import channel
from energon_lite.loader.pinning import PinnedAhead
from energon_lite.loader.sending import Unsendable, close, unpacked
from energon_lite.loader.turns import Delivery, Mark, PassStart, due_slots
from energon_lite.loader.worker_main import GRACE_SEC, PASS, TAKEN, Pass, Settings, work

_POLL_SEC = 0.5
# After a kill; a process in an uninterruptible wait for a storage outlives it.
_KILL_SEC = 2.0


class WorkerDied(Exception):
    """A worker process ended by itself."""


class Worker:
    """One worker process.

    Args:
        start_method: "fork", "forkserver" or "spawn"; None for that of `multiprocessing`.
        settings: what it is told.
        first: what it computes first.
    """

    def __init__(self, start_method: str | None, settings: Settings, first: Pass) -> None:
        self._sock, other = socket.socketpair()
        self._num_taken = 0
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        context: Any = multiprocessing.get_context(start_method)
        self.process = context.Process(target=work, args=(other, settings, first), daemon=True)
        _workers.add(self)
        if context.get_start_method() != "fork":
            multiprocessing.resource_tracker.ensure_running()  # which would unblock the signal
        # Until it ignores them, the process would print a traceback of an interrupt.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            other.close()

    def is_ready(self) -> bool:
        """Whether a message has come, or begun to, or none will."""
        return bool(self._poll.poll(0))

    def receive(self, number: int, deadline: float) -> Delivery | ExceptionWrapper:
        """Returns its next delivery, or the error that it met.

        Args:
            number: of the pass; what is of another one is dropped.
            deadline: time at which to give up.

        Raises:
            WorkerDied: It ended.
            TimeoutError: Nothing came until the deadline.
        """
        wait = functools.partial(self._wait, deadline)
        while True:
            try:
                message = channel.receive(self._sock, wait)
            except channel.Closed:
                raise WorkerDied(self._end()) from None
            self._num_taken += 1
            if channel.order(self._sock, TAKEN, self._num_taken):
                self._num_taken = 0
            try:
                if message.number == number:
                    found: Delivery | ExceptionWrapper = unpacked(message.content)
                    return found
            finally:
                close(message.content.files)

    def begin(self, job: Pass) -> None:
        """Tells it to begin a pass."""
        channel.order_with(self._sock, PASS, pickle.dumps(job))

    def _wait(self, deadline: float) -> None:
        while not self._poll.poll(1000 * _POLL_SEC):
            # A process that it started may have its end of the socket.
            if not self.process.is_alive() and not self.is_ready():
                raise channel.Closed
            if time.monotonic() > deadline:
                raise TimeoutError

    def _end(self) -> str:
        """Waits for the end of the process; returns which it was, and how it ended."""
        self.leave()
        self.kill(GRACE_SEC)
        code = self.process.exitcode
        how = "has not ended" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code}"
        return f"{self.process.pid} ({how})"

    def leave(self) -> None:
        """Closes the socket, upon which the process ends by itself."""
        self._sock.close()

    def kill(self, after_sec: float) -> None:
        """Waits for the end of the process, then kills it."""
        try:
            self.process.join(max(0.0, after_sec))
        finally:  # also where the wait is interrupted
            self.process.kill()
            self.process.join(_KILL_SEC)

    def forget(self) -> None:
        """Forgets the process, in a fork of its parent."""
        self._sock.close()
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forget_workers() -> None:
    """Closes the sockets in a fork, which would hide the end of its parent from the workers."""
    for worker in list(_workers):
        worker.forget()


os.register_at_fork(after_in_child=_forget_workers)


def end_workers(workers: list[Worker]) -> None:
    """Ends worker processes: by themselves, or after a second by a kill."""
    deadline = time.monotonic() + GRACE_SEC
    try:
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:  # also where the wait is interrupted
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join(_KILL_SEC)


def _end_dropped(workers: list[Worker]) -> None:
    """Ends the worker processes of a loader that was dropped, or at the end of the program."""
    with suppress(KeyboardInterrupt):  # it hurries the end
        end_workers(workers)


class RunSettings(NamedTuple):
    """What decides how a rank runs, and no content.

    Attributes:
        prefetch_factor: batches that each worker process computes ahead.
        timeout_sec: longest wait for a batch; 0 for any.
        max_skip_rate: failures per sample that a stream may have.
        skip_log: file of the samples that were skipped.
    """

    prefetch_factor: int
    timeout_sec: float
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
        self._ended: set[int] = set()
        self._slots = due_slots(start, self._ended)
        self._slot = next(self._slots, None)

    def _pass_of(self, worker: int) -> Pass:
        own = self._streams[worker :: self._num_workers]
        return Pass(self._number, self._start, frozenset(self._streams) - set(own))

    def _started(self, number: int) -> Worker:
        settings, config = self._settings, self._config
        seed = key_of("workers", config.seed_offset, config.rank, number) & (2**63 - 1)
        told = Settings(
            number,
            self._num_workers,
            seed,
            self._dataset,
            settings.max_skip_rate,
            settings.prefetch_factor,
        )
        return Worker(config.start_method, told, self._pass_of(number))

    def _is_ready(self) -> bool:
        return self._slot is not None and self._next_worker(self._slot).is_ready()

    def _next_worker(self, slot: int) -> Worker:
        stream = slot % self._start.slots.num_streams
        return self._workers[self._streams.index(stream) % len(self._workers)]

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
        limit_sec = self._settings.timeout_sec
        deadline = time.monotonic() + (limit_sec or float("inf"))
        try:
            delivery: Any = self._next_worker(slot).receive(self._number, deadline)
        except TimeoutError:
            raise RuntimeError(
                f"No batch for {limit_sec:g} s (fail_on_timeout=True, "
                "watchdog_timeout_seconds). Something in the worker process is slow or stuck."
            ) from None
        if isinstance(delivery, ExceptionWrapper):
            delivery.reraise()  # type: ignore[no-untyped-call]
        if type(delivery.item) is Unsendable:
            raise TypeError(delivery.item.reason)
        if delivery.item is Mark.END:
            self._ended.add(delivery.stream)
        self._slot = next(self._slots, None)
        return cast(Delivery, delivery)

    def end(self) -> None:
        """Ends the worker processes."""
        self._finalizer.cancel()
        if self.pid == os.getpid():
            end_workers(self._workers)
