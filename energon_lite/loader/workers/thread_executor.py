"""Worker threads: they compute the deliveries of their streams in the process of the training loop.

They start at once, share all that is in memory, and hand batches over without a copy. A thread
cannot be killed: it ends before the next hook, or with its delivery.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing.util
import threading
import time
import weakref
from queue import Empty, SimpleQueue
from typing import Any

from energon_lite.core.dataset import drawing_functions
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.global_generators import has_turn
from energon_lite.core.topology import WorkerConfig, current
from energon_lite.loader.workers.codec import WorkerError
from energon_lite.loader.workers.executor import (
    Executor,
    Pass,
    Wait,
    WorkerDied,
    WorkerSettings,
    next_of,
)  # fmt: skip
from energon_lite.loader.workers.rank_feed import Delivery, RankFeed
from energon_lite.loader.workers.watchdog import describe_thread
from energon_lite.storage.files import warn_once

logger = logging.getLogger(__name__)


# How long the hooks have at the end of the program, in threads that were given up.
_EXIT_SEC = 2.0
_PAUSE_SEC = 0.05

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _interrupt_left() -> None:
    """Raises SystemExit in the threads that are left, at the end of the program.

    Python ends a thread that returns from native code then. Torch would abort the program.
    """
    deadline = time.monotonic() + _EXIT_SEC
    while left := [thread for thread in list(_threads) if thread.is_alive()]:
        for thread in left:
            ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        left[0].join(_PAUSE_SEC)
        if time.monotonic() > deadline:
            return


# After the pools have ended their threads.
multiprocessing.util.Finalize(None, _interrupt_left, exitpriority=50)


class _Taken:
    """The order to compute another delivery, as one was taken."""


class ThreadExecutor(Executor):
    """One worker thread.

    Only queues are between it and the training loop: whatever runs at any moment, such as the end
    of a loader that was dropped in a garbage collection, may put something into them.
    """

    def __init__(self, settings: WorkerSettings, config: WorkerConfig) -> None:
        super().__init__(settings, config)
        self._orders: SimpleQueue[Pass | type[_Taken] | None] = SimpleQueue()
        # The last entry describes how the thread ended.
        self._outbox: SimpleQueue[tuple[int, Delivery | WorkerError] | str] = SimpleQueue()
        self._feed: RankFeed | None = None
        self._is_given_up = False
        self._may_draw = warn_of_draws(settings.info.dataset)
        self._thread = threading.Thread(
            target=self._run, name=f"energon_lite worker {self.name}", daemon=True
        )

    # ------------------------------------------------------------------- in the training loop

    def start(self, job: Pass) -> None:
        """Orders the thread to begin a pass."""
        self._orders.put(job)
        if self._thread.ident is None:
            _threads.add(self._thread)
            self._thread.start()

    def is_ready(self) -> bool:
        """Whether a delivery, or the end of the thread, can be received at once."""
        return not self._outbox.empty()

    def take(self, number: int, for_sec: float) -> Delivery | WorkerError | None:
        """Returns its next delivery, or the error that it met."""
        if self._may_draw and has_turn():
            raise FatalSampleError(
                "A hook that is not marked @stateless has the global generators, and waits for "
                "worker threads whose hooks need them: both would wait for ever. Mark the hooks of "
                "either with @stateless, or use num_workers=0 for the loader that the hook reads."
            )
        try:
            message = self._outbox.get(timeout=for_sec)
        except Empty:
            return None
        if isinstance(message, str):
            raise WorkerDied(message)
        if message[0] != number:
            return None
        self._orders.put(_Taken)
        return message[1]

    def look(self, wait: Wait) -> None:
        """Reports what it does, where a limit is due."""
        if wait.is_due():
            doing = describe_thread(self._thread.ident or 0)
            try:
                wait.on_report(f"It computes {self._feed or 'nothing'}. {doing}")
            except WorkerDied:
                self._is_given_up = True
                raise

    def leave(self) -> None:
        """Orders the thread to end."""
        self._orders.put(None)
        if (feed := self._feed) is not None:
            feed.stop()

    def end(self, for_sec: float) -> None:
        """Waits for the end, if it is worth it; then nothing waits for the thread any more."""
        has_begun = self._thread.ident is not None
        if has_begun and not self._is_given_up and self._thread is not threading.current_thread():
            self._thread.join(for_sec)
        if self._thread.is_alive() and not self._is_given_up:
            self._is_given_up = True
            logger.warning(
                "Worker %s has not ended: a thread cannot be killed, and ends when the call "
                "returns that it is in. %s",
                self.name,
                describe_thread(self._thread.ident or 0),
            )

    # ----------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        current.worker_id = self.settings.info.id
        how = "it was to end"
        try:
            order = self._orders.get()
            while order is not None:
                order = self._run_pass(order)
        except BaseException as error:  # of the machinery, or the end that a hook wants
            how = f"{type(error).__name__}: {error}"
        self._feed = None
        self._outbox.put(f"{self.name} ({how})")

    def _run_pass(self, job: Any) -> Any:
        """Computes a pass; returns the order that comes after it."""
        self._feed = feed = self.settings.feed(job)
        room, is_over = self.settings.run.prefetch_factor, False
        while True:
            while is_over or not room or not self._orders.empty():
                order = self._orders.get()
                if order is not _Taken:
                    return order  # the rest of this pass is not wanted
                room += 1
            room -= 1
            delivery = next_of(feed, f"in worker {self.name}")
            is_over = delivery is None
            if delivery is not None:
                self._outbox.put((job.number, delivery))
            del delivery


def warn_of_draws(dataset: Any) -> bool:
    """Warns, once, of hooks that may draw from the generators that the training loop draws from.

    Returns:
        Whether there are such hooks.
    """
    names = dict.fromkeys(f"{hook.name}, {hook.where}" for hook in drawing_functions(dataset))
    if names:
        warn_once(
            f"worker_type='thread': these may draw from the global generators of torch, numpy and "
            f"random: {'; '.join(names)}. So they run one at a time, and meanwhile the training "
            "loop must draw from none of these generators (CUDA's are not concerned). Mark those "
            "that draw nothing with @stateless, draw from sample_rng() in the others, or use "
            "worker_type='process'."
        )
    return bool(names)
