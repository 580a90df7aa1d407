"""Handlers of signals: what they save can be restored, what they raise reaches the loop."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.core.global_generators import has_turn
from energon_lite.core.topology import current
from energon_lite.loader.workers.deferred_signals import DeferredSignals

from ..helpers import (
    MakeDataset,
    assert_same,
    ignore,
    keys_of,
    number_of,
    through_json,
    train,
)
from . import acting
from .figures import Figures
from .jobs import END_SEC, wait_until

pytestmark = pytest.mark.processes
NUM_TEXTS = 60

WORKERS = {
    "none": {"num_workers": 0},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "processes": {"num_workers": 2},
}


@contextmanager
def handling(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    """Installs a handler for a `with` block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def loader_of(make: MakeDataset, workers: str, **loader: Any) -> Any:
    config = WorkerConfig(
        rank=0, world_size=1, num_streams=4, global_error_handler=ignore, **WORKERS[workers]
    )
    return get_savable_loader(make(config), max_skip_rate=1, **loader)


# -------------------------------------------------------------------------------- saved states


def save_in_handlers(make: MakeDataset, workers: str, number: int, rng: random.Random) -> int:
    """Saves in a handler at random moments of `next`, and resumes from each state.

    Returns:
        How many states were saved while a batch was under way.
    """
    whole = loader_of(make, "none")
    expected = [(batch, whole.num_skipped) for batch in islice(passes(whole), 400)]
    loader, saved, num_received = loader_of(make, workers), [], 0
    longest = 1e-3

    def save(*_: object) -> None:
        saved.append((num_received, through_json(loader.save_state_rank())))

    with handling(signal.SIGALRM, save):
        batches = passes(loader)
        while len(saved) < number:
            if num_received > 350:
                loader.shutdown()
                loader, num_received = loader_of(make, workers), 0
                batches = passes(loader)
            before = len(saved)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
            batch = next(batches)
            # So that about half of the alarms ring before the batch is there.
            longest *= 0.9 if len(saved) == before else 1.1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert_same(batch, expected[num_received][0])
            num_received += 1
    loader.shutdown()
    for count, state in saved:
        resumed = loader_of(make, "none")
        resumed.restore_state_rank(state)
        found = [(batch, resumed.num_skipped) for batch in islice(passes(resumed), 3)]
        # A batch that was just being returned counts as received.
        count += found[0] != expected[count]
        assert_same(found, expected[count : count + 3])
    return len(saved)


def passes(loader: Any) -> Iterator[Any]:
    """Yields the batches of pass after pass."""
    while True:
        yield from loader


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "number", [10, pytest.param(170, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_a_state_saved_in_a_handler_is_restored(texts, workers, number) -> None:
    make = train(texts, "skipping", repeat=False, batch_size=3)
    assert save_in_handlers(make, workers, number, random.Random(number)) >= number


class Ringing(DefaultTaskEncoder):
    """Sends a signal to its own process while it encodes a sample.

    Args:
        way: "plain"; "wrapped", where it makes another error of what a handler raises; or
            "limited", where each fifth sample has a time limit, by a handler of the hook's own.
    """

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.way = way

    def encode_sample(self, sample: TextSample) -> TextSample:
        if self.way == "limited":
            if number_of(sample) % 5 == 0:
                with handling(signal.SIGUSR1, Pressed()):
                    signal.raise_signal(signal.SIGUSR1)
            return sample
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception:
            if self.way == "wrapped":
                raise ValueError("cannot encode")  # noqa: B904
            raise
        return sample


class Slow(DefaultTaskEncoder):
    """Takes its time for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def encode_sample(self, sample: TextSample) -> TextSample:
        time.sleep(self.seconds)
        return sample


def ringing(
    texts: Any, encoder: Any = None, num_workers: int = 0, batch_size: int = 3, **loader: Any
) -> Any:
    """A loader; by default it has a signal in each sample."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = get_train_dataset(
        texts, worker_config=config, batch_size=batch_size, shuffle_buffer_size=None,
        task_encoder=encoder or Ringing(),
    )  # fmt: skip
    return get_savable_loader(dataset, **loader)


def test_a_handler_restores_nothing_in_the_middle_of_a_batch(texts) -> None:
    loader = ringing(texts)
    state = loader.save_state_rank()

    def restore(*_: object) -> None:
        loader.restore_state_rank(state)

    batches = iter(loader)
    with handling(signal.SIGUSR1, lambda *_: None):
        expected = [keys_of(next(batches)) for _ in range(3)]
        loader.restore_state_rank(state)
    with handling(signal.SIGUSR1, restore), pytest.raises(RuntimeError, match="loader between two"):
        next(iter(loader))
    with handling(signal.SIGUSR1, lambda *_: None):
        assert list(map(keys_of, islice(loader, 3))) == expected


# -------------------------------------------------------------------------- exceptions of handlers


class Late(BaseException):
    """Raised by a handler."""


def ring(*_: object) -> None:
    raise Late


def interrupted(body: Callable[[], Any], number: int, longest: float) -> int:
    """Calls a function, with a handler that raises at a random moment of each call.

    Returns:
        How many exceptions came.
    """
    rng, came = random.Random(5), 0
    with handling(signal.SIGALRM, ring):
        for _ in range(number):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, longest))
                body()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Late:
                came += 1
    return came


MOMENTS = pytest.mark.parametrize(
    "number", [300, pytest.param(5_000, marks=pytest.mark.soak)], ids=["few", "many"]
)


@MOMENTS
def test_ctrl_c_works_after_an_exception_at_any_moment(number) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def defer() -> None:
        try:
            with DeferredSignals():
                pass
        finally:
            changed = {n for n, old in handlers.items() if signal.getsignal(n) is not old}
            assert changed <= {signal.SIGALRM}
            assert signal.getsignal(signal.SIGALRM) is ring

    came = interrupted(defer, number, 5e-4)
    assert came > number / 20
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_all_signals_that_came_in_a_block_are_handled_though_one_raises() -> None:
    ran, held = [], []

    def note(number: int, _: object) -> None:
        ran.append(number)
        if len(ran) == 1:
            raise Late

    numbers = signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2
    with ExitStack() as stack:
        for number in numbers:
            stack.enter_context(handling(number, note))
        with suppress(Late), DeferredSignals():
            with DeferredSignals():
                for number in numbers:
                    signal.raise_signal(number)
            held.append([*ran])
    assert held == [[]]
    assert sorted(ran) == sorted(numbers)


@MOMENTS
def test_no_lock_stays_taken_after_an_exception_at_any_moment(texts, number) -> None:
    loader = loader_of(train(texts, "skipping"), "none")
    batches, kept = passes(loader), []

    def step() -> None:
        nonlocal batches
        try:
            next(batches)
        except Late as error:
            kept.append(error)  # and its frames
            batches = passes(loader)
            raise
        finally:
            assert not has_turn()
            assert current.context is None

    assert interrupted(step, number, 5e-3) > number / 20
    threads = loader_of(train(texts, "skipping"), "threads")
    next(iter(threads))
    threads.shutdown()


class Alarm(Exception):
    """Raised by a handler."""


class Pressed:
    """A handler that is an object."""

    def __call__(self, *_: object) -> None:
        raise TimeoutError("too late")


def raise_alarm(what: str, *_: object) -> None:
    raise Alarm(what)


@pytest.mark.parametrize(
    ("handler", "error", "way"),
    [
        (lambda *_: raise_alarm("x"), Alarm, "plain"),
        (Pressed(), TimeoutError, "plain"),
        (partial(raise_alarm, "x"), Alarm, "plain"),
        (Pressed(), TimeoutError, "wrapped"),
    ],
    ids=["function", "object", "partial", "behind another one"],
)
def test_an_error_of_a_handler_reaches_the_loop_as_it_is(texts, handler, error, way) -> None:
    loader = ringing(texts, Ringing(way))
    with handling(signal.SIGUSR1, handler), pytest.raises(error):
        next(iter(loader))
    with handling(signal.SIGUSR1, lambda *_: None):
        assert len(keys_of(next(iter(loader)))) == 3
    assert loader.num_skipped == {}


def test_samples_that_fail_while_an_error_of_a_handler_is_handled_are_skipped(texts) -> None:
    make = train(texts, "skipping")
    with handling(signal.SIGUSR1, Pressed()):
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError:
            loader = loader_of(make, "none")
            assert len(list(islice(loader, 20))) == 20
    assert sum(loader.num_skipped.values()) > 5


def test_a_time_limit_of_a_hook_skips_its_sample(texts) -> None:
    loader = ringing(texts, Ringing("limited"))
    found = [key for batch in islice(loader, 16) for key in keys_of(batch)]
    assert sum(loader.num_skipped.values()) >= 10
    assert all(int(key) % 5 for key in found)


@MOMENTS
def test_no_error_of_a_handler_is_taken_for_a_broken_sample(texts, number, monkeypatch) -> None:
    dropped: list[Any] = []  # by Python, as in `__del__`
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    loader = ringing(texts, Slow(0.001))
    batches, rung, reached = iter(loader), 0, 0
    rng = random.Random(8)

    def late(*_: object) -> None:
        nonlocal rung
        rung += 1
        raise rng.choice((Alarm, TimeoutError, ValueError, OSError))("late")

    with handling(signal.SIGALRM, late):
        for _ in range(number // 3):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-2))
                next(batches)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (Alarm, OSError, ValueError) as error:
                reached += str(error) == "late"
                batches = iter(loader)
    assert reached + len(dropped) == rung > number // 30
    # Hypothesis measures collections by a callback, if it has run before.
    own = [args for args in dropped if "gc_callback" not in repr(args.object)]
    assert len(own) <= 1 + rung // 50
    assert loader.num_skipped == {}


@pytest.mark.parametrize("place", ["process_executor.Path", "channel.Channel._read"])
def test_a_time_limit_of_the_loop_is_no_dead_worker(texts, place, monkeypatch) -> None:
    """A handler often raises TimeoutError, which is an OSError, as sockets and files raise."""
    # Longer than the time between two looks at the worker.
    loader = ringing(texts, Slow(0.8), num_workers=1, batch_size=1, restart_workers=0)
    batches = iter(loader)
    next(batches)
    with monkeypatch.context() as patched:
        patched.setattr(f"energon_lite.loader.workers.{place}", Pressed())
        with pytest.raises(TimeoutError, match="too late"):
            list(islice(batches, 3))
    loader.shutdown()


# ----------------------------------------------------------------------- loops that are broken off


def broken(body: Callable[[], None], first_sec: float, second_sec: float) -> None:
    """Runs a function, ended by an exception at some moment, and another one soon after it.

    More follow, as Python drops exceptions in some places, such as `__del__`.
    """
    pauses, is_armed = [second_sec], True

    def ring_again(*_: object) -> None:
        if is_armed:
            signal.setitimer(signal.ITIMER_REAL, pauses.pop() if pauses else 1)
            raise Alarm

    with handling(signal.SIGALRM, ring_again), suppress(Alarm):
        try:
            signal.setitimer(signal.ITIMER_REAL, first_sec)
            body()
        except Alarm:
            pass
        is_armed = False


def threads_and_files() -> tuple[int, int]:
    """How many threads and open files this process has, without those of loaders that are gone."""
    gc.collect()
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def break_often(texts: Any, rng: random.Random, *, rounds: int, start_method: str, num: int) -> int:
    """Breaks a loop with a stopped worker again and again; returns the batches lost on the way.

    An exception can come between the loader, which has given a batch, and the loop, which has not
    got it yet. So the state says where the run stands, and is at most one batch ahead.
    """
    make = acting.acting(texts, 2_000)
    expected, _ = acting.undisturbed(texts, 2_000, 200)
    before, used = set(multiprocessing.active_children()), threads_and_files()
    loader = acting.loader_of(make, num, start_method)
    count = lost = 0
    longest = 0.3 if start_method == "fork" else 4

    def loop() -> None:
        nonlocal count
        for number, batch in enumerate(loader):
            index, count = count, count + 1
            assert_same(acting.without_pid(batch), expected[index])
            if number == 2:
                os.kill(rng.choice(acting.workers(before)), signal.SIGSTOP)

    for _ in range(rounds):
        broken(loop, rng.uniform(0.001, longest), rng.choice((0.0001, 0.001, 0.02, 0.05)))
        state = through_json(loader.save_state_rank())
        assert not state["ended"]
        assert count <= state["count"] <= count + 1
        lost += state["count"] - count
        count = state["count"]
        resumed = acting.loader_of(make, 0, "fork")
        resumed.restore_state_rank(state)
        found = [acting.without_pid(batch) for batch in islice(resumed, 3)]
        assert_same(found, expected[count : count + 3])
    loader.shutdown()
    wait_until(lambda: set(multiprocessing.active_children()) <= before, "processes", END_SEC)
    loader = resumed = None
    wait_until(lambda: threads_and_files()[0] <= used[0], "threads", END_SEC)
    assert threads_and_files()[1] <= used[1] or start_method != "fork"  # pipes to their servers
    return lost


def test_loop_broken_twice_while_a_worker_is_stopped_resumes_exactly(texts) -> None:
    # A batch that was under way when the exception came may be lost; never more.
    assert break_often(texts, random.Random(3), rounds=3, start_method="fork", num=2) <= 3


@pytest.mark.soak
def test_loops_broken_at_two_hundred_random_moments(texts) -> None:
    rng, figures = random.Random(12), Figures("exceptions at random moments, batches lost")
    for _ in range(20):
        how = {"start_method": rng.choice(("fork", "fork", "spawn", "forkserver"))}
        with figures.trial(how, count=10):
            figures.add(break_often(texts, rng, rounds=10, num=rng.choice((1, 2, 3)), **how))
    figures.check()
