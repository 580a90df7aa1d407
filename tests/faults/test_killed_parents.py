"""Whatever becomes of a training process, its workers end with it and leave nothing behind."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from .figures import Figures
from .jobs import Job, wait_until

pytestmark = pytest.mark.processes

ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGALRM: 7}  # the job answers SIGALRM by os._exit


def seconds_outlived(job: Job, end: signal.Signals) -> float:
    """Ends the parent; returns how long anything outlived it."""
    os.kill(job.pid, end)
    code, _ = job.end()
    assert code == ENDS[end], job.stderr()
    return job.seconds_until_clean(files=False)


def wait_for(job: Job, state: str) -> None:
    """Waits until the workers of a job are in some state."""
    if state in ("sleeping", "computing"):
        wait_until((job.folder / "asleep").exists, state)
    else:
        job.wait_for_reports(2)


@pytest.mark.parametrize(
    ("state", "payload", "end"),
    [
        ("busy", 16_000, signal.SIGKILL),
        ("blocked", 2_000_000, signal.SIGALRM),
        ("sleeping", 0, signal.SIGKILL),
        ("computing", 0, signal.SIGKILL),
    ],
)
def test_workers_end_with_their_parent(server, texts, state, payload, end) -> None:
    args = {"texts": str(texts), "start_method": "fork", "num_workers": 2}
    with server.job("train_until_killed", state=state, payload=payload, **args) as job:
        wait_for(job, state)
        assert seconds_outlived(job, end) < 30


@pytest.mark.parametrize("state", ["busy", "blocked"])
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.soak) for m in ("spawn", "forkserver"))]
)
def test_workers_that_a_helper_thread_started_end_with_the_process(
    server, texts, method, state
) -> None:
    args = {"texts": str(texts), "start_method": method, "num_workers": 2, "from_thread": True}
    with server.job("train_until_killed", state=state, payload=5_000_000, **args) as job:
        wait_for(job, state)
        assert seconds_outlived(job, signal.SIGKILL) < 10


@pytest.mark.soak
def test_a_hundred_parents_killed_at_random(server, texts) -> None:
    rng = random.Random(12)
    running = Figures("parent killed, s until its workers are gone")
    # Python imports the user's program, and torch, before a spawned worker does anything of ours.
    starting = Figures("parent killed while workers start, s until they are gone")
    for trial in range(100):
        start_method = ("fork", "spawn", "forkserver")[trial % 3]
        figures = starting if trial % 4 == 0 else running
        args = {
            "texts": str(texts),
            "start_method": start_method,
            "num_workers": rng.choice((1, 2, 4)),
            "payload": int(10 ** rng.uniform(3, 7.7)),
            "state": rng.choice(("busy", "blocked", "sleeping", "computing")),
        }
        with server.job("train_until_killed", **args) as job, figures.trial(args):
            job.wait_for_reports(1)
            if figures is running:
                wait_for(job, args["state"])
            time.sleep(rng.uniform(0, 0.3))
            figures.add(seconds_outlived(job, rng.choice(list(ENDS))))
    running.check()
    starting.check()
