"""Exceptions that come at any moment, as Ctrl-C does, never change the place of a run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ..helpers import assert_same, through_json
from .acting import acting, loader_of, undisturbed, without_pid, workers
from .figures import Figures
from .jobs import END_SEC, wait_until

pytestmark = pytest.mark.processes


class Alarm(Exception):
    """Raised by a signal handler."""


def broken(body: Callable[[], None], first_sec: float, second_sec: float) -> None:
    """Runs a function, ended by an exception at some moment, and another one soon after it.

    More follow, as Python drops exceptions in some places, such as `__del__`.
    """
    pauses = [second_sec]
    is_armed = True

    def ring(*_: object) -> None:
        if is_armed:
            signal.setitimer(signal.ITIMER_REAL, pauses.pop() if pauses else 1)
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    with suppress(Alarm):
        try:
            signal.setitimer(signal.ITIMER_REAL, first_sec)
            body()
        except Alarm:
            pass
    is_armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def threads_and_files() -> tuple[int, int]:
    """How many threads and open files this process has, without those of loaders that are gone."""
    gc.collect()
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def break_often(
    texts: Any, rng: random.Random, *, rounds: int, start_method: str, **args: Any
) -> int:
    """Breaks a loop with a stopped worker again and again; returns the batches lost on the way.

    An exception can come between the loader, which has given a batch, and the loop, which has not
    got it yet. So the state says where the run stands, and is at most one batch ahead.
    """
    make = acting(texts, 2_000)
    expected, _ = undisturbed(texts, 2_000, 200)
    before, used = set(multiprocessing.active_children()), threads_and_files()
    loader = loader_of(make, start_method=start_method, **args)
    count = lost = 0
    longest = 0.3 if start_method == "fork" else 4

    def loop() -> None:
        nonlocal count
        for number, batch in enumerate(loader):
            index, count = count, count + 1
            assert_same(without_pid(batch), expected[index])
            if number == 2:
                os.kill(rng.choice(workers(before)), signal.SIGSTOP)

    for _ in range(rounds):
        broken(loop, rng.uniform(0.001, longest), rng.choice((0.0001, 0.001, 0.02, 0.05)))
        state = through_json(loader.save_state_rank())
        assert not state["ended"]
        assert count <= state["count"] <= count + 1
        lost += state["count"] - count
        count = state["count"]
        resumed = loader_of(make, 0, "fork")
        resumed.restore_state_rank(state)
        found = [without_pid(batch) for batch in islice(resumed, 3)]
        assert_same(found, expected[count : count + 3])
    loader.shutdown()
    wait_until(lambda: set(multiprocessing.active_children()) <= before, "processes", END_SEC)
    loader = resumed = None
    wait_until(lambda: threads_and_files()[0] <= used[0], "threads", END_SEC)
    if start_method == "fork":  # the others keep pipes to their servers
        assert threads_and_files()[1] <= used[1]
    return lost


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_loop_broken_twice_while_a_worker_is_stopped_resumes_exactly(texts, num_workers) -> None:
    args = {"start_method": "fork", "num_workers": num_workers}
    # A batch that was under way when the exception came may be lost; never more.
    assert break_often(texts, random.Random(3), rounds=3, **args) <= 3


@pytest.mark.soak
def test_loops_broken_at_two_hundred_random_moments(texts) -> None:
    rng, figures = random.Random(12), Figures("exceptions at random moments, batches lost")
    for _ in range(20):
        args = {
            "start_method": rng.choice(("fork", "fork", "spawn", "forkserver")),
            "num_workers": rng.choice((1, 2, 3)),
        }
        with figures.trial(args, count=10):
            figures.add(break_often(texts, rng, rounds=10, **args))
    figures.check()
