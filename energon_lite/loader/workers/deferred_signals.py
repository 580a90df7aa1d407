"""Signals that wait: processes are started and ended whole, whatever is pressed or rings meanwhile.

Python runs the handlers of signals in the main thread, between any two instructions, and drops the
exceptions that they raise in callbacks such as those of a fork. Blocking a signal in the main
thread does not help: another thread takes it, and its handler runs in the main thread all the same.
"""

from __future__ import annotations

import signal
import threading
import weakref
from _thread import interrupt_main
from collections import deque
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from types import FrameType
from typing import Any

# The module `signal` makes enums of numbers first, and drops what a handler raises meanwhile.
_signal: Any = import_module("_signal")

# The handlers that wait, by their signals, and the signals that have come. One place for all
# blocks: where a handler's exception comes while these begin or end, nothing is held twice.
_waiting: dict[int, Callable[[int, FrameType | None], Any]] = {}
_came: list[Any] = []


class DeferredSignals:
    """Runs the handlers of signals that come in a `with` block after it, in the main thread.

    Other threads run no handlers; there it does nothing, nor in another such block. Whatever
    exception interrupts its beginning or its end, all handlers are installed again.
    """

    # Returns the block, or None: a block that was not left is forgotten with its object.
    _outermost: Callable[[], Any] = type(None)

    def __enter__(self) -> None:
        """Begins to defer signals."""
        is_main = threading.current_thread() is threading.main_thread()
        if DeferredSignals._outermost() is not None or not is_main:
            return
        try:
            for number in range(1, signal.NSIG):
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not _hold:
                    _waiting[number] = handler
                    _signal.signal(number, _hold)
            DeferredSignals._outermost = weakref.ref(self)
        except BaseException:
            try:
                _let_through()
            finally:
                _let_through()
            raise

    def __exit__(self, *_: object) -> None:
        """Lets the signals through that have come."""
        if DeferredSignals._outermost() is self:
            try:
                _let_through()
            finally:  # again, where a handler that is installed raised
                _let_through()


def _hold(number: int, frame: FrameType | None) -> None:
    if DeferredSignals._outermost() is None:  # a block begins or ends
        _waiting[number](number, frame)
    else:
        _came.append(number)


def _let_through() -> None:
    DeferredSignals._outermost = type(None)
    for number, handler in _waiting.items():
        _signal.signal(number, handler)
    _waiting.clear()
    # Without an instruction between two of them: of several handlers that raise, each one runs.
    deque(map(interrupt_main, map(_came.pop, repeat(0, len(_came)))), maxlen=0)
