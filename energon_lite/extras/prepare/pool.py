"""Work on many files in parallel processes, with the results in order and no way to hang."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from energon_lite.core.topology import num_cores

_MAX_WORKERS = 16
_MOST_QUEUED = 4096
_PARENT_POLL_SEC = 0.2
_NOTE_SEC = 60
_STUCK_SEC = 3600

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")


def _watch_parent(parent: int) -> None:
    """Ends this worker when its parent was killed, which no other signal would report."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_SEC)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ordered_results(
    function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int | None
) -> Iterator[Result]:
    """Calls a function on each task, and yields what it returned.

    Args:
        function: a function of a module.
        tasks: its arguments.
        num_workers: processes; with 0 or 1 this one does the work. None: as many as cores that
            this process may use, at most 16.

    Raises:
        RuntimeError: A worker process died, or none finished a task for an hour.
        Exception: What the function raised on a task, in the place of its result; see `outcome`.
    """
    if num_workers is None:
        num_workers = min(_MAX_WORKERS, num_cores())
    if num_workers <= 1 or len(tasks) <= 1:
        yield from map(function, tasks)
        return
    # Forked workers start at once and need no importable main module.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(num_workers, len(tasks)),
        multiprocessing.get_context(method),
        initializer=_watch_parent,
        initargs=(os.getpid(),),
    )
    try:
        queue = iter(tasks)
        futures = deque(executor.submit(function, task) for task in islice(queue, _MOST_QUEUED))
        for task in tasks:
            if not _wait(futures):
                for worker in set(multiprocessing.active_children()) - others:
                    worker.kill()
                raise RuntimeError(
                    f"no worker process finished a task for {_STUCK_SEC} s; they are stopped. "
                    f"The first open task: {task!s:.300}. Check that its files can be "
                    "read, and run the same command again"
                )
            yield futures.popleft().result()
            futures.extend(executor.submit(function, task) for task in islice(queue, 1))
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process died (killed, or out of memory). Run the same command again; fewer "
            "processes (num_workers, --num-workers) need less memory"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def outcome(function: Callable[[Task], Result], task: Task) -> Result | Exception:
    """Calls a function, and returns its result, or the ValueError or OSError that it raised."""
    try:
        return function(task)
    except (ValueError, OSError) as error:
        return error


def _wait(futures: deque[Future[Result]]) -> bool:
    """Waits for the first of the futures; returns False where all of them stand still."""
    waited, num_done = 0, 0
    while wait([futures[0]], timeout=_NOTE_SEC).not_done:
        done = sum(future.done() for future in futures)
        waited, num_done = 0 if done > num_done else waited + _NOTE_SEC, done
        if waited >= _STUCK_SEC:
            return False
        if waited:
            logger.warning("no task was finished for %d seconds; still waiting", waited)
    return True
