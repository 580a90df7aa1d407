"""Measures hooks, cookers and decoders from outside, in a copy of a task encoder."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from energon_lite.task_encoder.base import HOOKS, AnyTaskEncoder

DECODE = "decode"


class HookClock:
    """Counts the seconds of functions, each without those of the functions that it calls.

    Attributes:
        seconds: by name; decoding in a hook is apart from that while samples are read.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = threading.local()  # `sec` of the functions inside the current one

    def on(self, encoder: AnyTaskEncoder) -> AnyTaskEncoder:
        """Returns a copy of an encoder whose own hooks, cookers and decoder are measured."""
        timed = copy.copy(encoder)
        for name in sorted(HOOKS):
            hook = getattr(encoder, name)
            # Stages look for the library's own, which make batches of whole columns.
            is_own = str(getattr(hook, "__module__", "")).startswith("energon_lite.")
            if encoder.overrides(name) and not is_own:
                setattr(timed, name, self._timed(f"hook {name}", hook))
        cookers = [
            dataclasses.replace(cooker, cook=self._timed("hook cook", cooker.cook))
            for cooker in encoder.cookers
        ]
        timed.cookers = cookers  # type: ignore[misc]  # of this instance
        if encoder.decoder is not None:
            timed.decoder = copy.copy(encoder.decoder)
            object.__setattr__(timed.decoder, "decoder_of", self._decoders(encoder.decoder))
        return timed

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = function(*args, **kwargs)
            end = object()
            while (item := self.run(name, next, items, end)) is not end:
                yield item

        if inspect.isgeneratorfunction(inspect.unwrap(function)):
            return generate
        return functools.update_wrapper(functools.partial(self.run, name, function), function)

    def _decoders(self, decoder: Any) -> Callable[[str], Any]:
        @functools.cache
        def decoder_of(part: str) -> Any:
            decode = decoder.decoder_of(part)
            return decode and functools.partial(self.run, DECODE, decode)

        return decoder_of

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function and counts its time."""
        outer_sec = getattr(self._inner, "sec", None)
        if name == DECODE and outer_sec is not None:
            name = "decode in hooks"
        self._inner.sec, since = 0.0, perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            sec = perf_counter() - since
            self.seconds[name] += sec - self._inner.sec
            self._inner.sec = None if outer_sec is None else outer_sec + sec
