"""Main function of a worker process: computes the deliveries of its streams, and sends them.

The main thread computes and sends. A second one sleeps until the training loop has an order or a
question, and ends the process when the loop has ended, whatever the other one does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing import forkserver
from queue import SimpleQueue
from typing import Any

import numpy as np

from energon_lite.core import batch_memory
from energon_lite.loader.workers import channel
from energon_lite.loader.workers.channel import Channel, Closed, Outlet
from energon_lite.loader.workers.codec import WAYS, WorkerJob, packed_delivery
from energon_lite.loader.workers.executor import GRACE_SEC, Pass, WorkerSettings, become, next_of
from energon_lite.loader.workers.rank_feed import RankFeed
from energon_lite.loader.workers.watchdog import describe_thread

# How long the thread that listens sleeps before it looks whether the parent is there.
_POLL_SEC = 0.5
# Between two signals to a main thread that is to end.
_PAUSE_SEC = 0.05
_PR_SET_PDEATHSIG = 1


def work(
    data: socket.socket, control: socket.socket, job: WorkerJob, dies_with_parent: bool, home: str
) -> None:
    """Runs a worker process until the training loop closes the sockets, or ends.

    Args:
        data: to the training loop, for deliveries.
        control: the same, for orders and reports.
        job: the settings of the process, and the pass that it computes first.
        dies_with_parent: whether the kernel may kill it when the thread that started it ends; it
            also ends a process that is stopped, or in native code that keeps Python's lock.
        home: this file in the training loop; the path of a fork server may lead to another one.
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
    orders = Channel(control)
    with contextlib.suppress(Closed):
        advice = _SAME_PATH
        try:
            if home != __file__:
                raise ImportError(f"the fork server imported {__file__}, the program {home}")
            advice = _IMPORTED
            settings, first = job()
            advice = ""
            _Work(Channel(data), orders, settings).run(first)
        except Exception as error:  # of our own code, or of what unpickles the job
            if isinstance(error, Closed):
                raise
            advice = advice or channel.remedy(error)
            text = f"{type(error).__name__}: {error}; {advice}"
            orders.send(channel.FAILED, body=_sent(text if advice else traceback.format_exc()))
            sys.exit(1)


def _sent(text: str) -> bytes:
    return text.encode(errors="replace")


_SAME_PATH = "set PYTHONPATH to the folder of the latter, or install it only once"
_IMPORTED = (
    "a worker process of 'spawn' or 'forkserver' imports the program again. It does not have the "
    "classes and functions of a notebook or an interpreter, nor those of a script below "
    f"`if __name__ == '__main__':`. {WAYS}"
)


class _Work:
    def __init__(self, data: Channel, orders: Channel, settings: WorkerSettings) -> None:
        self._orders = orders
        self._settings = settings
        self._exit_code = 128 + signal.SIGTERM
        self._ending = 0  # id of the exception that ends it, which holds nothing alive
        self._parent = os.getppid()
        self._passes: SimpleQueue[Pass] = SimpleQueue()
        self._is_packing = False
        self._outlet = Outlet(data, settings.run.prefetch_factor)
        self._feed: RankFeed | None = None

    def run(self, first: Pass) -> None:
        """Computes passes; the end is an exception of the signal's handler."""
        self._set_up()
        threading.Thread(target=self._listen, name="listening", daemon=True).start()
        try:
            self._passes.put(first)
            while True:
                self._run_pass(self._passes.get())
        except KeyboardInterrupt:  # of a hook: the signal is ignored
            sys.exit(128 + signal.SIGINT)
        except SystemExit as error:
            if id(error) != self._ending:
                text = f"a hook called sys.exit({error.code!r}); raise SkipSample or an error in it"
                self._orders.send(channel.FAILED, body=_sent(text))
            raise
        finally:
            self._ending = self._ending or -1

    def _set_up(self) -> None:
        signal.set_wakeup_fd(-1)  # of an event loop in the parent
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, self._exit)
        sys.unraisablehook = self._on_ignored
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        # What a fork inherits stays shared with the parent as long as no collection walks it.
        gc.freeze()
        batch_memory.new_block = self._outlet.empty
        # A fork by a hook would write where this process writes, too.
        os.register_at_fork(after_in_child=partial(setattr, batch_memory, "new_block", np.empty))
        os.register_at_fork(after_in_child=self._outlet.keep_writes)
        become(self._settings.info)

    def _exit(self, *_: object) -> None:
        """Ends the process by an exception, once, so that `finally` blocks of hooks run."""
        if not self._ending:
            end = SystemExit(self._exit_code)
            self._ending = id(end)
            raise end

    def _on_ignored(self, ignored: Any) -> None:
        """Lets the next signal raise where Python dropped the exception, as in an import."""
        if id(ignored.exc_value) == self._ending:
            self._ending = 0
        else:
            sys.__unraisablehook__(ignored)

    def _run_pass(self, job: Pass) -> None:
        self._feed = feed = self._settings.feed(job)
        where, is_over = f"in worker process {self._settings.info.id}", False
        while self._outlet.is_wanted(is_over):
            delivery = next_of(feed, where)
            is_over = delivery is None
            if delivery is None:
                continue
            self._is_packing = True
            content = packed_delivery(delivery, where)
            del delivery  # for the outlet copies what is still used here
            self._outlet.send(job.number, content)
            self._is_packing = False

    def _listen(self) -> None:
        """Takes orders until the parent is gone; then ends the process."""
        with contextlib.suppress(Closed):
            while self._is_parent_alive():
                if (order := self._orders.receive()) is None:
                    self._orders.is_ready(_POLL_SEC)
                elif order.kind == channel.PASS:
                    self._passes.put(pickle.loads(order.body))
                else:
                    self._report(order.number)
        self._exit_code = 0
        main = threading.main_thread().ident
        assert main is not None
        deadline = time.monotonic() + GRACE_SEC
        while time.monotonic() < deadline:  # again: one that comes just before a wait is lost
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(_PAUSE_SEC)
        os._exit(0)

    def _is_parent_alive(self) -> bool:
        """Whether the training loop has not ended; a fork of it may have the sockets, too."""
        parent = multiprocessing.parent_process()
        return os.getppid() == self._parent and not (parent and not parent.is_alive())

    def _report(self, number: int) -> None:
        """Describes what the main thread does."""
        task = "pickles a batch" if self._is_packing else f"computes {self._feed}"
        doing = describe_thread(threading.main_thread().ident or 0)
        self._orders.send(channel.REPORT, number, _sent(f"It {task}. {doing}"))
