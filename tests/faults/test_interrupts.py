"""Ctrl-C at any moment, an exception or `sys.exit` in the loop: the job ends, and leaves nothing.

A terminal sends SIGINT to all processes of the job, a scheduler only to the first.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from .figures import Figures
from .jobs import Job

pytestmark = pytest.mark.processes

INTERRUPTED = -signal.SIGINT  # how Python ends at a KeyboardInterrupt
MOMENTS = ("start", "first batch", "body", "end")


def num_tracebacks(job: Job) -> int:
    """Counts the tracebacks that a job printed; those of one chain of exceptions are one.

    A second interrupt may come when Python is ending, in other libraries' functions.
    """
    text = job.stderr()
    chained = text.count("\nDuring handling of") + text.count("\nThe above exception was the")
    ignored = text.split("Exception ignored in")[1:]
    of_others = sum("energon_lite" not in part for part in ignored)
    return text.count("Traceback (most recent call last)") - chained - of_others


def interrupt(job: Job, *, all_processes: bool, times: int) -> None:
    """Sends SIGINT, as Ctrl-C does or as a scheduler does."""
    for _ in range(times):
        if job.exit_code() is None:
            (os.killpg if all_processes else os.kill)(job.pid, signal.SIGINT)
        time.sleep(0.05)


def seconds_to_end(job: Job, exit_codes: set[int], *, files: bool = True) -> float:
    """How long a job took to end, and to leave nothing; fails if it ended otherwise."""
    code, ended = job.end()
    cleaned = job.seconds_until_clean(files=files)
    assert code in exit_codes, f"exit code {code}: {job.stderr()}"
    assert num_tracebacks(job) <= 1, job.stderr()
    assert "exited unexpectedly" not in job.stderr()
    return ended + cleaned


def wait_for(job: Job, moment: str) -> None:
    """Waits until a job is where it shall be interrupted."""
    job.wait_for_reports({"start": 1, "first batch": 1, "body": 2, "end": 3}[moment])
    if moment == "first batch":
        time.sleep(0.3)


def args_of(texts: Any, moment: str, **args: Any) -> dict[str, Any]:
    """Arguments of `train_and_leave`."""
    way = "fall off" if moment == "end" else "train"
    return {"texts": str(texts), "way": way, "slow": moment == "first batch", **args}


@pytest.mark.parametrize(
    ("moment", "all_processes", "times", "payload"),
    [
        ("start", True, 1, 0),
        ("first batch", False, 2, 0),
        ("body", True, 1, 3_000_000),
        ("body", True, 2, 16_000),
        ("end", True, 1, 16_000),
    ],
)
def test_ctrl_c_ends_the_job_as_python_does_and_leaves_nothing(
    server, texts, moment, all_processes, times, payload
) -> None:
    args = args_of(texts, moment, start_method="fork", num_workers=2, payload=payload)
    with server.job("train_and_leave", **args) as job:
        wait_for(job, moment)
        interrupt(job, all_processes=all_processes, times=times)
        seconds_to_end(job, {INTERRUPTED, 0} if moment == "end" else {INTERRUPTED})
        assert job.stderr().count("KeyboardInterrupt") or moment == "end"


@pytest.mark.parametrize(
    ("way", "code"),
    [("sys.exit", 5), ("raise", 1), ("drop", 0), ("circle", 0), ("with", 0), ("fall off", 0)],
)
def test_every_end_of_the_loop_leaves_nothing(server, texts, way, code) -> None:
    args = {"texts": str(texts), "start_method": "fork", "num_workers": 2, "payload": 200_000}
    with server.job("train_and_leave", way=way, **args) as job:
        seconds_to_end(job, {code})
        assert num_tracebacks(job) == (1 if way == "raise" else 0), job.stderr()


@pytest.mark.soak
def test_a_hundred_interrupts_at_random(server, texts) -> None:
    rng, figures = random.Random(12), Figures("Ctrl-C, s until nothing is left")
    for _ in range(100):
        moment = rng.choice(MOMENTS)
        start_method = rng.choice(("fork", "fork", "spawn", "forkserver"))
        how = {"all_processes": rng.random() < 0.5, "times": rng.choice((1, 2))}
        args = args_of(
            texts,
            moment,
            start_method=start_method,
            num_workers=rng.choice((1, 2, 4)),
            payload=int(10 ** rng.uniform(3, 7.5)),
        )
        trial = (moment, how, args)
        with server.job("train_and_leave", **args) as job, figures.trial(trial):
            wait_for(job, moment)
            time.sleep(rng.uniform(0, {"start": 3, "body": 0.2}.get(moment, 0.02)))
            since = time.monotonic()
            interrupt(job, **how)
            codes = {INTERRUPTED, 0} if moment == "end" else {INTERRUPTED}
            # multiprocessing removes the fork server's folder at the very end of the process.
            files = not (start_method == "forkserver" and how["times"] == 2)
            seconds_to_end(job, codes, files=files)
            figures.add(time.monotonic() - since)
    figures.check()


@pytest.mark.soak
def test_every_end_of_the_loop_with_any_start_method(server, texts) -> None:
    rng, figures = random.Random(13), Figures("sys.exit, exception, dropped loader: s to the end")
    ways = {"sys.exit": 5, "raise": 1, "drop": 0, "circle": 0, "with": 0, "fall off": 0}
    for trial in range(60):
        way = list(ways)[trial % 6]
        args = {
            "texts": str(texts),
            "start_method": rng.choice(("fork", "spawn", "forkserver")),
            "num_workers": rng.choice((1, 2, 4)),
            "payload": int(10 ** rng.uniform(3, 7.5)),
        }
        with server.job("train_and_leave", way=way, **args) as job, figures.trial((way, args)):
            job.wait_for_reports(2)
            figures.add(seconds_to_end(job, {ways[way]}))
    figures.check()
