"""One worker process of a loader, as its parent has it: started, listened to, ended."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import pickle
import select
import signal
import socket
import threading
import time
import weakref
from contextlib import suppress
from os import register_at_fork
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.loader.deferred_signals import DeferredSignals
from energon_lite.loader.messages import Closed, close, order, order_with, receive, unpacked
from energon_lite.loader.worker_main import GRACE_SEC, PASS, REPORT, TAKEN, Pass, Settings, work

logger = logging.getLogger(__name__)

_POLL_SEC = 0.5
# How long a worker may take to report what it does.
_ANSWER_SEC = 1.0
# After a kill; a process in an uninterruptible wait for a storage outlives it.
_KILL_SEC = 2.0
_STATES = {
    "D": "it waits for the kernel, often for a storage that does not answer",
    "R": "it runs native code that keeps Python's lock",
    "S": "it sleeps in native code that keeps Python's lock",
    "T": "it was stopped by a signal",
}


class WorkerDied(Exception):
    """A worker process ended by itself, or was ended as it was stuck.

    Args:
        name: which, and how it ended.
        report: what it did, as far as that is known.
        may_restart: whether another one may do better.
    """

    def __init__(self, name: str, report: str = "", may_restart: bool = True) -> None:
        super().__init__(name)
        self.report = report
        self.may_restart = may_restart


class WorkerTimeout(Exception):
    """A batch took too long; the text reports what the worker process does."""


class Limits(NamedTuple):
    """How long a delivery may be waited for, in seconds; 0 for any time.

    Attributes:
        report_sec: until it is logged what the worker process does.
        stall_sec: until it is taken for stuck, and ended.
        timeout_sec: until the wait is an error.
    """

    report_sec: float = 0
    stall_sec: float = 0
    timeout_sec: float = 0


class Worker:
    """One worker process.

    Args:
        start_method: "fork", "forkserver" or "spawn"; None for that of `multiprocessing`.
        settings: of the process.
        first: what it computes first.
    """

    def __init__(self, start_method: str | None, settings: Settings, first: Pass) -> None:
        self._sock, other = socket.socketpair()
        self._num_taken = 0
        self._has_sent = False
        self.num_requests = 0
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        context: Any = multiprocessing.get_context(start_method)
        # The kernel reports the end of the thread that starts a process, not of its process.
        is_main = threading.current_thread() is threading.main_thread()
        args = (other, settings, first, is_main)
        self.process = context.Process(target=work, args=args, daemon=True)
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

    def is_ready(self, for_sec: float = 0) -> bool:
        """Whether a message comes, or begins to, within a time, or none ever will."""
        return bool(self._poll.poll(1000 * for_sec))

    def receive(self, number: int, limits: Limits) -> Any:
        """Returns its next delivery, or the error that it met.

        Args:
            number: of the pass; what is of another one is dropped.
            limits: how long that may take.

        Raises:
            WorkerDied: It ended, or is stuck and was ended.
            WorkerTimeout: The wait was too long.
        """
        wait = _Wait(self, limits)
        while True:
            try:
                message = receive(self._sock, wait)
            except Closed:
                raise self._death() from None
            self._has_sent = True
            try:
                if message.kind == REPORT:
                    if message.number == self.num_requests:
                        wait.on_report(unpacked(message.content))
                    continue
                self._num_taken += 1
                if order(self._sock, TAKEN, self._num_taken):
                    self._num_taken = 0
                if message.number == number:
                    return unpacked(message.content)
            finally:
                close(message.content.files)

    def begin(self, job: Pass) -> None:
        """Orders the worker to begin a pass."""
        order_with(self._sock, PASS, pickle.dumps(job))

    def ask(self) -> None:
        """Asks it what it does."""
        self.num_requests += 1
        order(self._sock, REPORT, self.num_requests)

    def _death(self) -> WorkerDied:
        """Waits for the end of the process; returns how it ended."""
        end_workers([self])
        code = self.process.exitcode
        how = "has not ended" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code}"
        is_broken = code is not None and code > 0 and not self._has_sent  # it could not start
        return WorkerDied(f"{self.process.pid} ({how})", may_restart=not is_broken)

    def leave(self) -> None:
        """Closes the socket, upon which the process ends by itself."""
        self._sock.close()

    def forget(self) -> None:
        """Forgets the process, in a fork of its parent."""
        self._sock.close()
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]


class _Wait:
    """One wait for a message of a worker process; called before each read of the socket."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self._worker = worker
        self._limits = limits
        self._since = time.monotonic()
        self._due = sorted(limit for limit in limits if limit)
        self._poll_sec = min([_POLL_SEC, *(limit / 4 for limit in self._due)])
        self._answer_due = 0.0

    def __call__(self) -> None:
        """Waits until there is something to read.

        Raises:
            Closed: Nothing will come.
            WorkerDied: The process is stuck.
            WorkerTimeout: The wait was too long.
        """
        worker = self._worker
        while not worker.is_ready(self._poll_sec):
            # A process that it started may have its end of the socket.
            if not worker.process.is_alive() and not worker.is_ready():
                raise Closed
            now = time.monotonic()
            if self._due and now > self._since + self._due[0]:
                self._due = [limit for limit in self._due if now <= self._since + limit]
                self._answer_due = now + _ANSWER_SEC
                worker.ask()
            if self._answer_due and now > self._answer_due:
                report = f"It does not answer: {_state_of(worker.process.pid)}."
                self.on_report(report, grace_sec=0)

    def on_report(self, report: str, grace_sec: float = GRACE_SEC) -> None:
        """Logs what the process does, or ends the wait."""
        self._answer_due = 0.0
        waited = time.monotonic() - self._since
        pid = self._worker.process.pid
        _, stall_sec, timeout_sec = self._limits
        if stall_sec and waited > stall_sec:
            end_workers([self._worker], grace_sec)
            name = f"{pid} (stuck for {waited:.1f} s, stall_timeout_sec={stall_sec:g})"
            raise WorkerDied(name, report)
        if timeout_sec and waited > timeout_sec:
            raise WorkerTimeout(report)
        logger.warning("No batch of worker process %d for %.0f s. %s", pid, waited, report)


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
        worker.forget()


register_at_fork(after_in_child=_forget_workers)


def end_workers(workers: list[Worker], grace_sec: float = GRACE_SEC) -> None:
    """Ends worker processes: by themselves, or after some time by a kill."""
    with DeferredSignals():
        deadline = time.monotonic() + grace_sec
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join(_KILL_SEC)
