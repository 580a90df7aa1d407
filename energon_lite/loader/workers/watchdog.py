"""Reports what the threads of a process do when a batch takes too long."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from types import FrameType

from energon_lite.core.user_function import FunctionRun, UserFunction
from energon_lite.formats.shards import ShardReader
from energon_lite.loader.workers.deferred_signals import DeferredSignals
from energon_lite.sources.sample_loader import SampleLoader

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the waits for a batch; used as a context manager around each.

    After too long a wait it logs, once for that wait, the stack of every thread (file and line, no
    values: these may hold data).

    Args:
        timeout_sec: longest silent wait; 0 watches nothing.
        initial_timeout_sec: the same for the first batch; 0 for `timeout_sec`.
    """

    def __init__(self, timeout_sec: float, initial_timeout_sec: float) -> None:
        self.timeout_sec = timeout_sec
        self._limit_sec = initial_timeout_sec or timeout_sec
        self._since: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        """Begins a wait."""
        if self._limit_sec and self._thread is None:
            with DeferredSignals():
                self._thread = threading.Thread(
                    target=_watch, args=(weakref.ref(self),), name="watchdog", daemon=True
                )
                self._thread.start()
        self._since = time.monotonic()  # last: where an exception comes before, no wait has begun

    def __exit__(self, *_: object) -> None:
        """Ends a wait."""
        self._since = None
        self._limit_sec = self.timeout_sec

    def check(self, reported: float | None) -> float | None:
        """Warns if the current wait is too long; returns when the wait reported last began."""
        since, limit = self._since, self._limit_sec
        if since is None or not limit or since == reported:
            return reported
        if (waited := time.monotonic() - since) > limit:
            logger.warning(
                "No batch for %.0f s (watchdog_timeout_seconds=%g). What the threads of this "
                "process do:\n%s", waited, limit, _stacks(),
            )  # fmt: skip
            return since
        return reported


def _watch(reference: weakref.ref[Watchdog]) -> None:
    """Checks until the watchdog has ended with its loader; keeps neither alive."""
    reported: float | None = None
    while (watchdog := reference()) is not None:
        reported = watchdog.check(reported)
        pause = min(1.0, (watchdog._limit_sec or 1.0) / 4)
        del watchdog
        time.sleep(pause)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != own
    )


def describe_thread(ident: int) -> str:
    """Returns what a thread does, with file and line of each call; no values of the data."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "It has ended."
    where = next(filter(None, (_doing(f) for f, _ in traceback.walk_stack(frame))), "")
    return f"{where}\n{''.join(traceback.format_stack(frame))}"


_KNOWN = {function.__code__ for function in (
    UserFunction.call, UserFunction.expand, FunctionRun.call_each, SampleLoader.__call__,
    ShardReader.extents, ShardReader._read_runs,
)}  # fmt: skip


def _doing(frame: FrameType) -> str:
    code = frame.f_code
    names = frame.f_locals if code in _KNOWN else {}
    own = names.get("spec") or names.get("self")
    if isinstance(own, UserFunction) and "argument" in names:
        return f"It runs {own.doing(names['key'], names['argument'])}."
    if isinstance(own, SampleLoader):
        return f"It decodes {own.place_of(names['members'], names['shard'], names['place'])}."
    if isinstance(own, ShardReader) and "number" in names:
        return f"It reads {own.path_of(names['number'])}."
    return ""
