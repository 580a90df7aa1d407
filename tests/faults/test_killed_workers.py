"""Workers that die or stall are replaced: the stream, the counts and the state stay the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import SavableDataLoader

from ..helpers import assert_same, through_json
from .acting import Act, acting, counts, loader_of, undisturbed, without_pid, workers
from .figures import Figures

pytestmark = pytest.mark.processes

Kill = Callable[[list[int]], None]


def run(
    loader: SavableDataLoader[Any], num_batches: int, kills: dict[int, Kill]
) -> tuple[list[Any], float]:
    """The batches of a loader whose workers are killed after some, and the longest wait for one."""
    others = set(multiprocessing.active_children())
    found: list[Any] = []
    longest = 0.0
    since = time.monotonic()
    for batch in islice(loader, num_batches):
        if found:  # workers have started
            longest = max(longest, time.monotonic() - since)
        found.append(without_pid(batch))
        if len(found) in kills:
            kills[len(found)](workers(others))
        since = time.monotonic()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):  # a kill that is still to come
            thread.join()
    return found, longest


def at_once(*signals: signal.Signals) -> Kill:
    """Sends each signal to another worker."""

    def kill(pids: list[int]) -> None:
        assert pids, "no workers"
        for pid, number in zip(pids, signals, strict=False):
            with suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(pid, number)

    return kill


def after(delay_sec: float, kill: Kill) -> Kill:
    """Kills some time after the batch, while the loop waits for others."""
    return lambda pids: threading.Timer(delay_sec, kill, (pids,)).start()


def assert_undisturbed(
    texts: Path, kills: dict[int, Kill], *, payload: int, num_batches: int, **args: Any
) -> float:
    """Fails if a run whose workers are killed differs from one without processes.

    Returns the seconds of the longest wait for a batch.
    """
    make = acting(texts, payload)
    expected, expected_counts = undisturbed(texts, payload, num_batches)
    with loader_of(make, restart_workers=1000, **args) as loader:
        found, longest = run(loader, num_batches, kills)
        assert_same(found, expected)
        assert_same(counts(loader), expected_counts)
        return longest


KILL, TERM, QUIT = signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT


@pytest.mark.parametrize(
    ("num_workers", "payload", "kills"),
    [
        (2, 200_000, {2: at_once(KILL, KILL), 9: at_once(TERM)}),
        (3, 1_000, {1: at_once(QUIT), 7: at_once(KILL, TERM, QUIT)}),
        (2, 1_000, {place: at_once(KILL) for place in range(2, 47, 3)}),
    ],
)
def test_stream_and_counts_are_the_same_whatever_workers_are_killed(
    texts, num_workers, payload, kills
) -> None:
    args = {"num_workers": num_workers, "start_method": "fork"}
    assert_undisturbed(texts, kills, payload=payload, num_batches=max(kills) + 11, **args)


@pytest.mark.parametrize("act", [("exit", 3), ("kill", signal.SIGSEGV)])
def test_hook_that_ends_its_process_once_is_run_again(texts, tmp_path, act, caplog) -> None:
    acts = {25: Act(*act, once=str(tmp_path / "done"))}  # not in the first batch of its worker
    expected, expected_counts = undisturbed(texts, 0, 40)
    with loader_of(acting(texts, 0, acts), 2, "fork") as loader:
        assert_same(run(loader, 40, {})[0], expected)
        assert_same(counts(loader), expected_counts)
    assert (tmp_path / "done").exists()
    assert {"exit": "(exit code 3)", "kill": "(signal 11)"}[act[0]] in caplog.text


def test_hook_that_always_kills_its_process_ends_in_an_error(texts) -> None:
    deadly = {25: Act("kill", KILL)}
    expected, _ = undisturbed(texts, 0, 30)
    found: list[Any] = []
    loader = loader_of(acting(texts, 0, deadly), 2, "fork", restart_workers=2)
    with pytest.raises(RuntimeError, match=r"Worker process \d+ \(signal 9\)"):
        found.extend(without_pid(batch) for batch in loader)
    assert_same(found, expected[: len(found)])
    state = through_json(loader.save_state_rank())
    assert state["count"] == len(found)
    assert not state["ended"]
    mended = loader_of(acting(texts), 0, "fork")
    mended.restore_state_rank(state)
    rest = [without_pid(batch) for batch in islice(mended, 30 - len(found))]
    assert_same(rest, expected[len(found) :])


@pytest.mark.soak
def test_two_hundred_workers_killed_at_random(texts) -> None:
    rng = random.Random(12)
    methods = ("fork", "spawn", "forkserver")
    all_figures = {
        method: Figures(f"kill -9 of workers in mid-run ({method}), s of the longest pause")
        for method in methods
    }
    num_killed = 0
    while num_killed < 200:
        method = rng.choice((*["fork"] * 8, *methods))  # the others import everything again
        args = {"num_workers": rng.choice((1, 2, 3)), "start_method": method}
        payload = rng.choice((1_000, 50_000, 1_000_000, 5_000_000))
        number = min(rng.randint(6, 12) if method == "fork" else 2, 200 - num_killed)
        num_killed += number
        kills: dict[int, Kill] = {}
        for place in rng.sample(range(1, 60), number):
            kills[place] = after(rng.choice((0, 0.001, 0.01, 0.1)), at_once(KILL))
        figures = all_figures[method]
        with figures.trial((args, payload, sorted(kills)), count=number):
            figures.add(assert_undisturbed(texts, kills, payload=payload, num_batches=60, **args))
    for figures in all_figures.values():
        figures.check()
