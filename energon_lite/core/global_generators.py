"""The global generators of torch (CPU), numpy and random: seeded for hooks, and put back.

CUDA's generators are left alone. Copying the states takes 2 microseconds here; by numpy's and
Python's own functions it takes 100.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import MT19937
from torch.utils.data import get_worker_info

from energon_lite.core.seeds import key_of
from energon_lite.core.state import Kind
from energon_lite.core.topology import Stream, current

T = TypeVar("T")

TORCH, NUMPY, PYTHON = 1, 2, 4
ALL = TORCH | NUMPY | PYTHON
GENERATORS = {"torch": TORCH, "numpy": NUMPY, "random": PYTHON}

# An MT19937 is 624 words and the place among them, in numpy (the place last) and in Python (first).
_MT_BYTES = 625 * 4
# The place and the word beside it: when numbers are drawn, one of the two changes.
_NUMPY_MARK = 623 * 4

_api: Any = np.random  # has functions that its type stubs do not export
_python: Any = vars(random)["_inst"]
# Numpy's generator while hooks run; the user's own one does not move meanwhile.
_numpy = MT19937(0)


def _python_address() -> int:
    """Returns where the words of `random` lie; 0 if they are not where CPython has them."""
    head = object.__basicsize__
    if type(_python) is not random.Random or random.Random.__basicsize__ < head + _MT_BYTES:
        return 0
    place, *words = (ctypes.c_uint32 * 625).from_address(id(_python) + head)
    return id(_python) + head if random.getstate()[1] == (*words, place) else 0


_PYTHON_ADDRESS = _python_address()


class _NumpyState:
    """The generator that numpy uses, its place, and whether a normal number waits.

    It is to be put back: making this may take a number.
    """

    def __init__(self) -> None:
        self.generator: Any = _api.get_bit_generator()
        self.full: Any = None
        if type(self.generator) is not MT19937:
            self.full = np.random.get_state(legacy=False)
            return
        self.address = self.generator.ctypes.state_address
        self.words = ctypes.string_at(self.address, _MT_BYTES)
        # Legacy normal numbers come in pairs. If the second one of a pair waits, this takes it,
        # and the generator does not move.
        waiting = np.random.standard_normal()
        if ctypes.string_at(self.address + _NUMPY_MARK, 8) == self.words[_NUMPY_MARK:]:
            words = np.frombuffer(self.words, np.uint32)
            self.full = ("MT19937", words[:624], int(words[624]), 1, waiting)

    def put(self) -> None:
        _api.set_bit_generator(self.generator)  # now no number waits
        if self.full is not None:
            np.random.set_state(self.full)
        else:
            ctypes.memmove(self.address, self.words, _MT_BYTES)


def _marks() -> tuple[Any, Any, Any]:
    """Returns for each generator what changes when numbers are drawn from it."""
    of_torch = torch.default_generator.get_state()
    return (
        ctypes.string_at(of_torch.data_ptr(), 64),
        _api.get_bit_generator() is _numpy and _NUMPY_PLACE.value,
        _PYTHON_PLACE.value if _PYTHON_PLACE is not None else random.getstate(),
    )


_NUMPY_PLACE = ctypes.c_uint64.from_address(_numpy.ctypes.state_address + _NUMPY_MARK)
_PYTHON_PLACE = ctypes.c_uint64.from_address(_PYTHON_ADDRESS) if _PYTHON_ADDRESS else None


class GlobalStates:
    """The states that the global generators have when this is made; they must be put back."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy = _NumpyState()
        if _PYTHON_ADDRESS:
            words = ctypes.string_at(_PYTHON_ADDRESS, _MT_BYTES)
            self._python: Any = (words, _python.gauss_next)
        else:
            self._python = random.getstate()

    def put(self, which: int = ALL) -> None:
        """Sets these generators back to their states."""
        if which & TORCH:
            torch.default_generator.set_state(self._torch)
        if which & NUMPY:
            self._numpy.put()
        if which & PYTHON and _PYTHON_ADDRESS:
            words, _python.gauss_next = self._python
            ctypes.memmove(_PYTHON_ADDRESS, words, _MT_BYTES)
        elif which & PYTHON:
            random.setstate(self._python)


def seed_generators(key: int, which: int = ALL) -> None:
    """Seeds these generators, each with other bits of a key of 128 bits."""
    if which & TORCH:
        torch.default_generator.manual_seed(key & (2**63 - 1))
    if which & NUMPY:
        _api.set_bit_generator(_numpy)
        np.random.seed(key >> 96)
    if which & PYTHON:
        random.seed(key)


# Held while hooks have the generators of this process; of its threads, one at a time. Only a `with`
# statement takes and releases it: between two instructions a handler of a signal may raise.
turn = threading.RLock()
# How long a fork waits until no other thread's hooks have the generators. In the child they would
# stay where the hooks are, and torch's lock of its generator might stay locked.
_FORK_SEC = 5.0
_forks: list[bool] = []


def has_turn() -> bool:
    """Returns whether a hook has the generators that waits for the caller."""
    return turn._is_owned()  # type: ignore[attr-defined, no-any-return]


def _end_fork(is_child: bool = False) -> None:
    if _forks.pop():
        turn.release()
    elif is_child:
        turn._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(
    before=lambda: _forks.append(turn.acquire(timeout=_FORK_SEC)),
    after_in_parent=_end_fork,
    after_in_child=lambda: _end_fork(is_child=True),
)


def call_seeded(key: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Returns the result of a function for which the global generators are seeded meanwhile."""
    with turn:
        before = GlobalStates()
        try:
            seed_generators(key)
            return function(*args, **kwargs)
        finally:
            before.put()


# Names of the generators that were drawn from, as a state has them.
GENERATORS_DRAWN = Kind(
    (),
    lambda names: type(names) is tuple and [n for n in GENERATORS if n in names] == list(names),
    f"some of {', '.join(GENERATORS)}",
)


class _Owner:
    """In a worker process: whose states the generators have."""

    generators: StreamGenerators | None = None


class StreamGenerators:
    """The global generators as the hooks of one stream see them.

    A generator stands at the stream's start until a hook draws from it, which is seen at the end of
    the item. From the next item on it is seeded for each call, by the hook and its input. So what a
    call draws does not depend on where the run was resumed, and hooks that draw nothing cost
    nothing. In a worker process the generators stay as they are between items; in the user's own
    process they are put back.

    Args:
        seed: of the run.
        stream: whose hooks draw.
        drawn: names of those that were drawn from before a resume.
        from_start: whether all are seeded for each call from the start, because a resume makes
            calls again.

    Attributes:
        drawn: the generators that are seeded for each call.
        turn: the lock that a `with` statement takes before this object; in a worker process none.
    """

    def __init__(
        self, seed: int, stream: Stream, drawn: Sequence[str] = (), from_start: bool = False
    ) -> None:
        self.drawn = ALL if from_start else sum(GENERATORS[name] for name in drawn)
        self._from_start = from_start
        place = (stream.num_streams, stream.index, stream.pass_index)
        self._key = key_of("generators", seed, *place)
        self._start: GlobalStates | None = None
        self._marks: tuple[Any, ...] = ()
        self._before: GlobalStates | None = None
        self._is_worker = get_worker_info() is not None and current.worker_id is None
        self.turn: AbstractContextManager[Any] = nullcontext() if self._is_worker else turn

    @property
    def names(self) -> tuple[str, ...]:
        """Names the generators that were drawn from, as the state has them."""
        drawn = 0 if self._from_start else self.drawn
        return tuple(name for name, bit in GENERATORS.items() if drawn & bit)

    def seed(self, *names: object) -> None:
        """Seeds what was drawn from, by texts, integers and tuples of these."""
        seed_generators(key_of(*names), self.drawn)

    def __enter__(self) -> None:
        """Takes over the generators."""
        if self._is_worker:
            if _Owner.generators is not self:
                self._begin()
            return
        try:
            self._before = GlobalStates()
            self._begin()
        except BaseException:  # such as an interrupt
            self._put_back()
            raise

    def _begin(self) -> None:
        _Owner.generators = self
        if self.drawn == ALL:
            return
        if self._start is None:
            seed_generators(self._key)
            self._marks = _marks()
            self._start = GlobalStates()
        self._start.put()

    def __exit__(self, *error: object) -> None:
        """Records which generators were drawn from, and puts the user's back."""
        try:
            if self.drawn != ALL:
                marks = zip(GENERATORS.values(), self._marks, _marks(), strict=True)
                for bit, before, now in marks:
                    if before != now:
                        self.drawn |= bit
        finally:
            if not self._is_worker:
                self._put_back()

    def _put_back(self) -> None:
        """Puts the user's generators back."""
        before, self._before = self._before, None
        if before is not None:
            before.put()
