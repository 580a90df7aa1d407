"""Tries again what storage refuses for a moment: servers fail over, links drop."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from energon_lite.core.failures import is_worth_a_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

# For how long one file is tried, and for how long a whole dataset that cannot be read is waited
# for: servers fail over within minutes, and ranks wait for each other for ten. [Unit: second]
BRIEF_SEC, OUTAGE_SEC = 4.0, 300.0
# The first pause, how much longer each is than the one before, and the longest. [Unit: second]
_FIRST_SEC, _FACTOR, _LONGEST_SEC = 0.02, 4, 1.0

# Errors that may be gone a moment later, whichever file it is.
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ESTALE", "EAGAIN", "EINTR", "ETIMEDOUT", "ENOTCONN", "ECONNRESET", "ECONNABORTED",
        "ECONNREFUSED", "EPIPE", "EREMOTEIO", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "ESHUTDOWN", "ECOMM", "EPROTO", "EBUSY", "ENOLCK", "ENOMEM", "EBADF",
        "EKEYEXPIRED",
    )
    if hasattr(errno, name)
)  # fmt: skip

_current = threading.local()

# Tests put others in their place.
sleep = time.sleep
clock = time.monotonic


def briefly(error: OSError, _spent_sec: float) -> float:
    """Returns for how many seconds a file is tried after an error that may pass."""
    return BRIEF_SEC if error.errno in PASSING else 0.0


def retried(
    attempt: Callable[[], T],
    path: Path,
    patience: Callable[[OSError, float], float] = briefly,
    first: Exception | None = None,
) -> T:
    """Calls a function again, after longer and longer pauses, until it succeeds.

    Inside another such call it is called only once: the outer one tries again.

    Args:
        attempt: what to call.
        path: the file that it reads, for messages.
        patience: returns for how many seconds in all to try, by the newest error and the seconds
            spent so far. Asked once for each error, so it may do something about it.
        first: the error of a try that the caller made.

    Returns:
        What `attempt` returned.

    Raises:
        OSError: The newest error; after several tries it says how many, and in which time.
    """
    if getattr(_current, "is_trying", False):
        return attempt()
    slept, pause = 0.0, _FIRST_SEC
    begun, tries = (0.0, 1) if first is None else (clock(), 2)
    while True:
        try:
            result = _outermost(attempt)
        except OSError as error:
            # Since the first error: the attempt itself may take long.
            begun = begun or clock()
            spent = max(slept, clock() - begun)
            left = patience(error, spent) - spent
            if left <= 0:
                if first is None:
                    raise
                raise _with_tries(error, path, tries, spent) from None
            first = first or error
        else:
            if first is not None:
                _log_success(first, path, tries, max(slept, clock() - begun))
            return result
        sleep(min(pause, left))
        slept += min(pause, left)
        pause = min(pause * _FACTOR, _LONGEST_SEC)
        tries += 1


def _outermost(attempt: Callable[[], T]) -> T:
    _current.is_trying = True
    try:
        return attempt()
    finally:
        _current.is_trying = False


def _with_tries(error: OSError, path: Path, tries: int, spent: float) -> OSError:
    text = f"tried {tries} times in {spent:.1f} s"
    if error.errno is None:  # one of ours, which names its file
        return type(error)(f"{error} ({text})")
    return OSError(error.errno, f"{error.strerror} ({text})", error.filename or str(path))


def _log_success(error: Exception, path: Path, tries: int, spent: float) -> None:
    kind = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
    number = is_worth_a_line((kind, str(path.parent)))
    if number:
        logger.warning(
            "%s could be read at try %d, after %.1f s: %s (%s: %d times in this folder so far)",
            path, tries, spent, error, kind, number,
        )  # fmt: skip
