"""Computes slow pages in the background, so that requests return soon and Ctrl-C works."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread, local
from time import monotonic
from typing import Any

# A page is waited for so long before the browser gets its progress instead, and a page that no
# browser has asked for in the second time is given up. Browsers ask again after a second.
_WAIT_SEC, _ABANDONED_SEC = 1.5, 15.0
_here = local()


class ComputingError(Exception):
    """The page is not computed yet.

    Attributes:
        done: steps that are done.
        total: steps until the page is complete; 0 if they are not known.
    """

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done:,} of {total:,}")
        self.done, self.total = done, total


class _PageJob(Thread):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name="energon_lite preview")
        self._make, self.is_done = make, Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.progress, self.last_asked = (0, 0), monotonic()

    def run(self) -> None:
        _here.job = self
        try:
            self.result = self._make()
        except BaseException as error:
            self.error = error
        self.is_done.set()


class PageJobs:
    """Runs one thread for each page that is being computed."""

    def __init__(self) -> None:
        self._jobs: dict[str, _PageJob] = {}
        self._lock = Lock()

    def result(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` returns, or raises what it raises.

        Args:
            name: of the page; a page that is being computed is not begun again.
            make: computes the page.

        Raises:
            ComputingError: It takes longer. The next call with this name continues to wait.
        """
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = self._jobs[name] = _PageJob(make)
                job.start()
        job.last_asked = monotonic()
        if not job.is_done.wait(_WAIT_SEC):
            raise ComputingError(*job.progress)
        with self._lock:
            if self._jobs.get(name) is job:
                del self._jobs[name]
        if job.error is not None:
            raise job.error
        return job.result


def report_progress(done: int, total: int) -> None:
    """Notes how far the page of this thread is; without a page it does nothing.

    Raises:
        TimeoutError: No browser waits for the page any more.
    """
    job: _PageJob | None = getattr(_here, "job", None)
    if job is not None:
        job.progress = done, total
        if monotonic() - job.last_asked > _ABANDONED_SEC:
            raise TimeoutError("no browser waits for this page any more; load it again")
