"""Handlers of signals: what they save can be restored, what they raise reaches the loop."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
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

pytestmark = pytest.mark.processes

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
    "number", [15, pytest.param(170, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_a_state_saved_in_a_handler_is_restored(texts, workers, number) -> None:
    make = train(texts, "skipping", repeat=False, batch_size=3)
    assert save_in_handlers(make, workers, number, random.Random(number)) >= number


class Ringing(DefaultTaskEncoder):
    """Sends a signal to its own process while it encodes a sample."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        signal.raise_signal(signal.SIGUSR1)
        return sample


def ringing(texts: Any, encoder: Any = None) -> Any:
    """A loader without workers; by default it has a signal in each sample."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"batch_size": 3, "shuffle_buffer_size": 8, "task_encoder": encoder or Ringing()}
    dataset = get_train_dataset(texts, worker_config=config, **settings)
    return get_savable_loader(dataset)


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


def test_a_block_that_was_not_left_holds_nothing_and_the_next_one_restores_all() -> None:
    before = signal.getsignal(signal.SIGINT)
    DeferredSignals().__enter__()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with DeferredSignals():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_all_signals_that_came_in_a_block_are_handled_though_one_raises() -> None:
    ran = []

    def note(number: int, _: object) -> None:
        ran.append(number)
        if len(ran) == 1:
            raise Late

    numbers = signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2
    with ExitStack() as stack:
        for number in numbers:
            stack.enter_context(handling(number, note))
        with suppress(Late), DeferredSignals(), DeferredSignals():
            for number in numbers:
                signal.raise_signal(number)
            assert ran == []
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

    def __call__(self, number: int, frame: Any) -> None:
        raise TimeoutError("too late")


def raise_alarm(what: str, *_: object) -> None:
    raise Alarm(what)


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (lambda *_: raise_alarm("x"), Alarm),
        (Pressed(), TimeoutError),
        (partial(raise_alarm, "x"), Alarm),
    ],
    ids=["function", "object", "partial"],
)
def test_an_error_of_a_handler_reaches_the_loop_as_it_is(texts, handler, error) -> None:
    loader = ringing(texts)
    with handling(signal.SIGUSR1, handler), pytest.raises(error):
        next(iter(loader))
    with handling(signal.SIGUSR1, lambda *_: None):
        assert len(keys_of(next(iter(loader)))) == 3
    assert loader.num_skipped == {}


class Wrapping(Ringing):
    """Makes another error of what a handler raises."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        try:
            return super().encode_sample(sample)
        except Exception:
            raise ValueError("cannot encode")  # noqa: B904


def test_an_error_of_a_handler_is_found_behind_another_one(texts) -> None:
    with handling(signal.SIGUSR1, Pressed()), pytest.raises(TimeoutError, match="too late"):
        next(iter(ringing(texts, Wrapping())))


def test_samples_that_fail_while_an_error_of_a_handler_is_handled_are_skipped(texts) -> None:
    make = train(texts, "skipping")
    with handling(signal.SIGUSR1, Pressed()):
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError:
            loader = loader_of(make, "none")
            assert len(list(islice(loader, 20))) == 20
    assert sum(loader.num_skipped.values()) > 5


class Limited(Ringing):
    """Has a handler of its own for each sample."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        with handling(signal.SIGUSR1, Pressed()):
            return super().encode_sample(sample) if number_of(sample) % 5 == 0 else sample


def test_a_time_limit_of_a_hook_skips_its_sample(texts) -> None:
    loader = ringing(texts, Limited())
    found = [key for batch in islice(loader, 16) for key in keys_of(batch)]
    assert sum(loader.num_skipped.values()) >= 10
    assert all(int(key) % 5 for key in found)


class Slow(DefaultTaskEncoder):
    """Takes its time for each sample."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        time.sleep(0.001)
        return sample


@MOMENTS
def test_no_error_of_a_handler_is_taken_for_a_broken_sample(texts, number, monkeypatch) -> None:
    dropped: list[Any] = []  # by Python, as in `__del__`
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    loader = ringing(texts, Slow())
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
    assert len(dropped) <= 1 + rung // 50
    assert loader.num_skipped == {}


class Sleepy(DefaultTaskEncoder):
    """Is waited for."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        time.sleep(0.8)  # longer than the time between two looks at the worker
        return sample


@pytest.mark.parametrize("place", ["process_executor.Path", "channel.Channel._read"])
def test_a_time_limit_of_the_loop_is_no_dead_worker(texts, place, monkeypatch) -> None:
    """A handler often raises TimeoutError, which is an OSError, as sockets and files raise."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method="fork")
    dataset = get_train_dataset(
        texts, batch_size=1, worker_config=config, task_encoder=Sleepy(), shuffle_buffer_size=None
    )
    loader = get_savable_loader(dataset, restart_workers=0)
    batches = iter(loader)
    next(batches)

    def late(*_: object) -> None:
        raise TimeoutError("too late")

    with monkeypatch.context() as patched:
        patched.setattr(f"energon_lite.loader.workers.{place}", late)
        with pytest.raises(TimeoutError, match="too late"):
            list(islice(batches, 3))
    loader.shutdown()
