"""Trying again: servers fail over, links drop, and no sample is lost for it."""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TypeVar

from energon_lite.core.errors import FatalSampleError, is_worth_a_line, pass_on
from energon_lite.storage.os_errors import FINAL, FULL, PASSING, explained

logger = logging.getLogger(__name__)

T = TypeVar("T")

# For how long one file is tried, and for how long a whole dataset that cannot be read is waited
# for: servers fail over within minutes, and ranks wait for each other for ten. [Unit: second]
BRIEF_SEC, OUTAGE_SEC = 4.0, 300.0
# The first pause, how much longer each is than the one before, and the longest. [Unit: second]
_FIRST_SEC, _FACTOR, _LONGEST_SEC = 0.02, 4, 1.0

# So long after a file could not be read, it is tried for a moment only. [Unit: second]
_AFTERWARDS_SEC, _MOMENT_SEC = 60.0, 0.1
# The number of files of which that is remembered.
_MOST_FAILED = 1000

_current = threading.local()

# Tests replace both.
sleep = time.sleep
clock = time.monotonic


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Logs a warning, once in each process."""
    logger.warning("%s", message)


def briefly(error: OSError, _spent_sec: float) -> float:
    """Returns for how many seconds a file is tried after an error that may pass."""
    return BRIEF_SEC if error.errno in PASSING else 0.0


def retried(
    attempt: Callable[[], T],
    path: PurePath,
    patience: Callable[[OSError, float], float] = briefly,
    first: Exception | None = None,
) -> T:
    """Calls a function again, after longer and longer pauses, until it succeeds.

    Inside another such call it is called only once: the outer one tries again.

    Args:
        attempt: what to call.
        path: the file that it reads, for messages.
        patience: returns for how many seconds in all to try, by the newest error and the seconds
            spent so far. Called once for each error, so it may do something about it.
        first: the error of a try that the caller made.

    Returns:
        What `attempt` returned.

    Raises:
        OSError: The newest error; after several tries with their number and time.
    """
    if getattr(_current, "is_trying", False):
        return attempt()
    pass_on(first)
    slept, pause = 0.0, _FIRST_SEC
    begun, tries = (0.0, 1) if first is None else (clock(), 2)
    while True:
        _current.is_trying = True
        try:
            result = attempt()
            break
        except OSError as error:
            pass_on(error)
            # Since the first error: the attempt itself may take long.
            begun = begun or clock()
            spent = max(slept, clock() - begun)
            left = patience(error, spent) - spent
            if left <= 0:
                if first is None:
                    raise
                raise _with_tries(error, path, tries, spent) from None
            first = first or error
        finally:
            _current.is_trying = False
        sleep(min(pause, left))
        slept += min(pause, left)
        pause = min(pause * _FACTOR, _LONGEST_SEC)
        tries += 1
    if first is not None:
        kind = errno.errorcode.get(getattr(first, "errno", None) or 0, type(first).__name__)
        number = is_worth_a_line((kind, str(path.parent)))
        if number:
            logger.warning(
                "%s could be read at try %d, after %.1f s: %s (%s: %d times in this folder so far)",
                path, tries, max(slept, clock() - begun), first, kind, number,
            )  # fmt: skip
    return result


def _remedy_of(error: OSError) -> str:
    is_full = error.errno in FULL
    return "Raise the limit" if is_full else "Bring the storage (or the access to it) back"


class Patience:
    """Reads files of a dataset or a folder again, while their storage fails.

    A file is tried for some seconds, and for a minute after that for a moment only. While no other
    file can be read either, it is tried for some minutes: the samples are fine.

    Args:
        root: of the files, for messages.
    """

    def __init__(self, root: PurePath) -> None:
        self._root = root
        # Until when a file that failed is tried for a moment only, and its error.
        self._failed: dict[PurePath, tuple[float, OSError]] = {}

    def retried(
        self,
        attempt: Callable[[], T],
        path: PurePath,
        others_can_be_read: Callable[[], bool],
        first: Exception | None = None,
        close_files: Callable[[], bool] = lambda: False,
    ) -> T:
        """Calls a function that reads from a file, again and again.

        Args:
            attempt: what to call.
            path: the file.
            others_can_be_read: returns whether it is this file only that cannot be read.
            first: the error of a try that the caller made.
            close_files: called where no more files can be opened; returns whether some were open.

        Returns:
            What `attempt` returned.

        Raises:
            OSError: This file cannot be read.
            FatalSampleError: None can be read.
        """
        if getattr(_current, "is_trying", False):
            return attempt()
        until, _ = self._failed.get(path, (0.0, None))
        is_away, away_sec = False, 0.0

        def patience(error: OSError, spent_sec: float) -> float:
            nonlocal is_away, away_sec
            if error.errno in FINAL:
                return 0.0
            if error.errno in FULL:
                is_away = not close_files()
                return away_sec + BRIEF_SEC
            was_away, is_away = is_away, not others_can_be_read()
            if was_away:
                away_sec = spent_sec
            if not is_away:
                return away_sec + (_MOMENT_SEC if clock() < until else BRIEF_SEC)
            if not was_away:
                logger.warning(
                    "%s cannot be read (%s): an outage; waiting for %d s at most",
                    path, error, OUTAGE_SEC,
                )  # fmt: skip
            return OUTAGE_SEC

        try:
            return retried(attempt, path, patience, first)
        except OSError as error:
            pass_on(error)
            if is_away:
                raise FatalSampleError(
                    f"{path} cannot be read any more, an outage: {error}. No sample was skipped "
                    f"for it. {_remedy_of(error)}, and resume from the last state"
                ) from error
            raise self._remembered(error, path) from None

    def _remembered(self, error: OSError, path: PurePath) -> OSError:
        """Returns the error of a file, or the same one of before, which names the tries."""
        _, before = self._failed.get(path, (0.0, None))
        if before is None or error.errno != before.errno:
            before = explained(error, path)
        if len(self._failed) >= _MOST_FAILED:
            self._failed.clear()
        self._failed[path] = clock() + _AFTERWARDS_SEC, before
        return before


def _with_tries(error: OSError, path: PurePath, tries: int, spent: float) -> OSError:
    text = f"tried {tries} times in {spent:.1f} s"
    if error.errno is None:  # one of ours, which names its file
        return type(error)(f"{error} ({text})")
    return OSError(error.errno, f"{error.strerror} ({text})", error.filename or str(path))
