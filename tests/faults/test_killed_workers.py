"""Workers that die or stall are replaced: the stream, the counts and the state stay the same.

`tests/loader/test_restarts.py` kills workers between batches; here they die at any moment.
"""

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

from energon_lite import FileStoreCachePool

from ..helpers import assert_same, through_json
from .acting import Act, acting, counts, loader_of, undisturbed, without_pid, workers
from .figures import Figures
from .lazies import late_packs, late_set

pytestmark = pytest.mark.processes

NUM_TEXTS = 60
Kill = Callable[[list[int]], None]
KILL, TERM, QUIT = signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT


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
    make: Any, texts: Path, kills: dict[int, Kill], num_batches: int, payload: int = 0, **args: Any
) -> float:
    """Fails if a run whose workers are killed after some batches differs from one without them.

    Returns the seconds of the longest wait for a batch.
    """
    expected, expected_counts = undisturbed(texts, payload, num_batches)
    others, longest = set(multiprocessing.active_children()), 0.0
    with loader_of(make, **{"num_workers": 2, "start_method": "fork", **args}) as loader:
        found: list[Any] = []
        since = time.monotonic()
        for batch in islice(loader, num_batches):
            longest = max(longest, time.monotonic() - since) if found else 0.0
            found.append(without_pid(batch))
            kills.get(len(found), lambda pids: None)(workers(others))
            since = time.monotonic()
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):  # a kill that is still to come
                thread.join()
        assert_same(found, expected)
        assert_same(counts(loader), expected_counts)
    return longest


@pytest.mark.parametrize(
    ("num_workers", "payload", "kills"),
    [
        (3, 200_000, {2: at_once(KILL, KILL), 7: at_once(KILL, TERM, QUIT), 12: at_once(TERM)}),
        (2, 1_000, {place: after(0.001, at_once(KILL)) for place in range(2, 47, 3)}),
    ],
)
def test_stream_and_counts_are_the_same_whatever_workers_are_killed(
    texts: Path, num_workers: int, payload: int, kills: dict[int, Kill]
) -> None:
    args = {"num_workers": num_workers, "payload": payload, "restart_workers": 1000}
    assert_undisturbed(acting(texts, payload), texts, kills, max(kills) + 11, **args)


@pytest.mark.parametrize(
    ("act", "words"),
    [(("exit", 3), "(exit code 3)"), (("kill", signal.SIGSEGV), "(signal 11)")],
)
def test_hook_that_ends_its_process_once_is_run_again(
    texts: Path, tmp_path: Path, act: Any, words: str, caplog: Any
) -> None:
    acts = {25: Act(*act, once=str(tmp_path / "done"))}  # not in the first batch of its worker
    assert_undisturbed(acting(texts, 0, acts), texts, {}, 40)
    assert (tmp_path / "done").exists()
    assert words in caplog.text


def test_hook_that_always_kills_its_process_ends_in_an_error(texts: Path) -> None:
    expected, _ = undisturbed(texts, 0, 30)
    found: list[Any] = []
    loader = loader_of(acting(texts, 0, {25: Act("kill", KILL)}), 2, "fork", restart_workers=2)
    with pytest.raises(RuntimeError, match=r"Worker process \d+ \(signal 9\)"):
        found.extend(without_pid(batch) for batch in loader)
    assert_same(found, expected[: len(found)])
    state = through_json(loader.save_state_rank())
    assert (state["count"], state["ended"]) == (len(found), False)
    mended = loader_of(acting(texts), 0, "fork")
    mended.restore_state_rank(state)
    rest = [without_pid(batch) for batch in islice(mended, 30 - len(found))]
    assert_same(rest, expected[len(found) :])


@pytest.mark.parametrize(
    ("num_samples", "number", "num_workers", "num_kills"),
    [(400, 200, 2, 2), pytest.param(10_000, 16_000, 8, 40, marks=pytest.mark.soak)],
)
def test_killed_workers_change_no_lazy_value_and_leave_no_cache_behind(
    tmp_path: Path, num_samples: int, number: int, num_workers: int, num_kills: int
) -> None:
    data, rng = late_set(tmp_path, num_samples), random.Random(1)
    expected, before = list(late_packs(data, number)), set(multiprocessing.active_children())
    assert len(set(expected)) > number / 2
    caches = tmp_path / "caches"
    pool = FileStoreCachePool(parent_cache_dir=caches, num_workers=2, max_cache_count=150)
    found, places = [], rng.sample(range(10, number), num_kills)
    for pack in late_packs(data, number, num_workers, cache_pool=pool):
        found.append(pack)
        if len(found) in places:
            assert len(list(caches.iterdir())) >= num_workers
            at_once(KILL)(rng.sample(workers(before), 1))
    assert found == expected
    pool.close()
    assert list(caches.iterdir()) == []


@pytest.mark.soak
def test_two_hundred_workers_killed_at_random(texts: Path) -> None:
    rng, methods = random.Random(12), ("fork", "spawn", "forkserver")
    all_figures = {
        method: Figures(f"kill -9 of workers in mid-run ({method}), s of the longest pause")
        for method in methods
    }
    num_killed = 0
    while num_killed < 200:
        method = rng.choice((*["fork"] * 8, *methods))  # the others import everything again
        payload = rng.choice((1_000, 50_000, 1_000_000, 5_000_000))
        args = {"num_workers": rng.choice((1, 2, 3)), "start_method": method, "payload": payload}
        number = min(rng.randint(6, 12) if method == "fork" else 2, 200 - num_killed)
        num_killed += number
        kills: dict[int, Kill] = {}
        for place in rng.sample(range(1, 60), number):
            kills[place] = after(rng.choice((0, 0.001, 0.01, 0.1)), at_once(KILL))
        figures = all_figures[method]
        with figures.trial((args, sorted(kills)), count=number):
            make = acting(texts, payload)
            figures.add(assert_undisturbed(make, texts, kills, 60, restart_workers=1000, **args))
    for figures in all_figures.values():
        figures.check()
