"""Signals that wait: processes are started and ended whole, whatever is pressed or rings meanwhile.

Python runs the handlers of signals in the main thread, between any two instructions, and drops the
exceptions that they raise in callbacks such as those of a fork. Blocking a signal in the main
thread does not help: another thread takes it, and its handler runs in the main thread all the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# What terminals, schedulers and trainers send.
_NUMBERS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class DeferredSignals:
    """Runs the handlers of signals that come in a `with` block after it, in the main thread.

    Other threads run no handlers; there it does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[int] = []
        self._is_over = False

    def __enter__(self) -> None:
        """Begins to defer signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # the end of the block was interrupted before this handler was replaced
            self._handlers[number](number, frame)
        else:
            self._came.append(number)

    def __exit__(self, *_: object) -> None:
        """Lets the signals through that have come."""
        self._is_over = True
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(self._came):
            signal.raise_signal(number)
