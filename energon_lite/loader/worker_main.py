"""What runs in a worker process: computes the deliveries of its streams, and sends them.

The main thread computes and sends. A second one sleeps until the training loop has an order, and
ends the process when the loop has ended, whatever the other one does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from energon_lite.core import batch_rows
from energon_lite.loader import messages
from energon_lite.loader.messages import Closed, Outlet, WorkerError, WorkerJob
from energon_lite.loader.rank_feed import Delivery, PassStart, RankFeed
from energon_lite.loader.watchdog import describe_thread
from energon_lite.stores.cache_pool import CachePool

logger = logging.getLogger(__name__)

# How long the hooks have to end when the process is to end.
GRACE_SEC = 1.0
_POLL_SEC = 0.5
_PR_SET_PDEATHSIG = 1


class Pass(NamedTuple):
    """What a worker is to compute.

    Attributes:
        number: counts the passes of a loader.
        start: where the pass begins.
        others: the streams of the rank that it does not compute.
    """

    number: int
    start: PassStart
    others: frozenset[int]


class Limits(NamedTuple):
    """How long a delivery may be waited for, in seconds; 0 for any time.

    Attributes:
        report_sec: until it is logged what the worker does.
        stall_sec: until it is taken for stuck, and replaced.
        timeout_sec: until the wait is an error.
    """

    report_sec: float = 0
    stall_sec: float = 0
    timeout_sec: float = 0


class WorkerDied(Exception):
    """A worker ended by itself, or was given up as it was stuck.

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
    """A batch took too long; the text reports what the worker does."""


class Wait:
    """One wait for a delivery of a worker.

    Args:
        name: of the worker.
        limits: how long it may take.

    Attributes:
        poll_sec: after which time the limits are to be looked at again.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self._since = time.monotonic()
        self._due = sorted(limit for limit in limits if limit)
        self.poll_sec = min([_POLL_SEC, *(limit / 4 for limit in self._due)])

    def is_due(self) -> bool:
        """Returns whether another limit has passed, so that the worker is to report."""
        waited = time.monotonic() - self._since
        if not self._due or waited <= self._due[0]:
            return False
        self._due = [limit for limit in self._due if waited <= limit]
        return True

    def on_report(self, report: str) -> None:
        """Logs what the worker does.

        Raises:
            WorkerDied: It is stuck.
            WorkerTimeout: The wait was too long.
        """
        waited = time.monotonic() - self._since
        _, stall_sec, timeout_sec = self._limits
        if stall_sec and waited > stall_sec:
            name = f"{self._name} (stuck for {waited:.1f} s, stall_timeout_sec={stall_sec:g})"
            raise WorkerDied(name, report)
        if timeout_sec and waited > timeout_sec:
            raise WorkerTimeout(report)
        logger.warning("No batch of worker %s for %.0f s. %s", self._name, waited, report)


class RunSettings(NamedTuple):
    """What decides how a rank runs, and no content.

    Attributes:
        prefetch_factor: batches that each worker computes ahead.
        limits: how long a batch of a worker may be waited for.
        first_report_sec: `report_sec` of the first batch.
        restart_workers: how many workers may be replaced within ten minutes.
        max_skip_rate: failures per sample that a stream may have.
        max_pass_rate: failures per sample that a validation pass may have.
        skip_log: file of the samples that were skipped.
        cache_pool: for cookers; None for a `NoCachePool`.
    """

    prefetch_factor: int
    limits: Limits
    first_report_sec: float
    restart_workers: int
    max_skip_rate: float
    max_pass_rate: float
    skip_log: Path | None
    cache_pool: CachePool | None


class WorkerSettings(NamedTuple):
    """What a worker gets when it starts.

    Attributes:
        info: its number, how many there are, the seed of its global generators, and the pipeline;
            what `torch.utils.data.get_worker_info` returns in a worker process.
        run: how the rank runs.
    """

    info: torch_worker.WorkerInfo
    run: RunSettings

    def feed(self, job: Pass) -> RankFeed:
        """Returns what computes a pass."""
        dataset: Any = self.info.dataset
        run = self.run
        return RankFeed(dataset, job.start, run.max_skip_rate, job.others, run.cache_pool)


def work(sock: socket.socket, job: WorkerJob, dies_with_parent: bool) -> None:
    """Runs a worker process until the training loop closes the socket, or ends.

    Args:
        sock: to the training loop.
        job: the settings of the process, and the pass that it computes first.
        dies_with_parent: whether the kernel may kill it when the thread that started it ends; it
            also ends a process that is stopped, or in native code that keeps Python's lock.
    """
    if dies_with_parent and sys.platform == "linux":
        # A fork server ends with the last process that has this file, and its children with it.
        server: Any = forkserver._forkserver
        if isinstance(alive := getattr(server, "_forkserver_alive_fd", None), int):
            os.close(alive)
            server._forkserver_alive_fd = None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        by_server = isinstance(alive, int)
        # It ended before the kernel was asked, so no signal will come.
        if parent and not (parent.is_alive() and (by_server or os.getppid() == parent.pid)):
            os._exit(0)
    with contextlib.suppress(Closed):  # it ended before this process began
        advice = _IMPORTED
        try:
            settings, first = job()
            advice = ""
            _Work(sock, settings).run(first)
        except Exception as error:  # of our own code, or of what unpickles the job
            advice = advice or messages.remedy(error)
            text = f"{type(error).__name__}: {error}; {advice}"
            messages.report(sock, messages.FAILED, text if advice else traceback.format_exc())
            sys.exit(1)


_IMPORTED = (
    "a worker process of 'spawn' or 'forkserver' imports the program again. It does not have the "
    "classes and functions of a notebook or an interpreter, nor those of a script below "
    f"`if __name__ == '__main__':`. {messages.WAYS}"
)


class _Work:
    def __init__(self, sock: socket.socket, settings: WorkerSettings) -> None:
        self._sock = sock
        self._settings = settings
        self._exit_code = 128 + signal.SIGTERM
        self._is_ending = False
        self._parent = os.getppid()
        self._passes: SimpleQueue[Pass] = SimpleQueue()
        self._is_packing = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._outlet = Outlet(sock, settings.run.prefetch_factor, self._wait)
        self._feed: RankFeed | None = None

    def run(self, first: Pass) -> None:
        """Computes passes; the end is an exception of the signal's handler."""
        self._set_up()
        threading.Thread(target=self._listen, name="listening", daemon=True).start()
        try:
            self._run_pass(first)
            while True:
                self._run_pass(self._passes.get())
        except KeyboardInterrupt:  # of a hook: the signal is ignored
            sys.exit(128 + signal.SIGINT)
        finally:
            self._is_ending = True

    def _set_up(self) -> None:
        signal.set_wakeup_fd(-1)  # of an event loop in the parent
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, self._exit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        # What a fork inherits stays shared with the parent as long as no collection walks it.
        gc.freeze()
        batch_rows.new_block = self._outlet.empty
        # A fork by a hook would write where this process writes, too.
        os.register_at_fork(after_in_child=partial(setattr, batch_rows, "new_block", np.empty))
        os.register_at_fork(after_in_child=self._outlet.keep_writes)
        torch_worker._worker_info = info = self._settings.info
        torch.set_num_threads(1)
        random.seed(info.seed)
        torch.manual_seed(info.seed)
        np.random.seed(info.seed % 2**32)

    def _exit(self, *_: object) -> None:
        """Ends the process by an exception, once, so that `finally` blocks of hooks run."""
        if not self._is_ending:
            self._is_ending = True
            raise SystemExit(self._exit_code)

    def _run_pass(self, job: Pass) -> None:
        self._feed = feed = self._settings.feed(job)
        while self._may_go_on():
            delivery: Delivery | WorkerError
            try:
                delivery = next(feed)
            except StopIteration:
                return
            except Exception:
                delivery = WorkerError(f"in worker process {self._settings.info.id}")
            is_error = isinstance(delivery, WorkerError)
            self._is_packing = True
            content = messages.packed_delivery(delivery)
            del delivery  # for the outlet copies what is still used here
            self._outlet.send(job.number, content)
            self._is_packing = False
            if is_error:
                return

    def _may_go_on(self) -> bool:
        """Waits for room for a delivery; returns whether the rest of the pass is wanted."""
        while self._passes.empty():
            if self._outlet.has_room():
                return True
            self._outlet.await_room()
        return False

    def _listen(self) -> None:
        """Takes orders until the parent is gone; then ends the process."""
        with contextlib.suppress(Closed):
            while True:
                kind, number, body = messages.read_order(self._sock, self._wait)
                if kind == messages.LEAVE:
                    self._outlet.leave(self._wait)
                elif kind == messages.PASS:
                    self._passes.put(pickle.loads(body))
                    self._outlet.wake()
                elif kind == messages.ASK:
                    self._report(number)
        self._exit_code = 0
        main = threading.main_thread().ident
        assert main is not None
        deadline = time.monotonic() + GRACE_SEC
        while time.monotonic() < deadline:  # again: one that comes just before a wait is lost
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(_POLL_SEC / 10)
        os._exit(0)

    def _report(self, number: int) -> None:
        """Describes what the main thread does."""
        task = "pickles a batch" if self._is_packing else f"computes {self._feed}"
        doing = describe_thread(threading.main_thread().ident or 0)
        messages.report(self._sock, number, f"It {task}. {doing}")

    def _wait(self) -> None:
        """Waits for an order of the parent.

        Raises:
            Closed: It is gone, though a fork of it may have the socket.
        """
        while not self._poll.poll(1000 * _POLL_SEC):
            parent = multiprocessing.parent_process()
            if os.getppid() != self._parent or (parent and not parent.is_alive()):
                raise Closed
