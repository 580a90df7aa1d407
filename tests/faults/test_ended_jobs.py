"""However a training job ends, it ends as Python does, and its workers leave nothing behind.

A terminal sends SIGINT to all processes of a job, a scheduler only to the first.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .figures import Figures
from .jobs import Job, Jobs, wait_until

pytestmark = pytest.mark.processes
NUM_TEXTS = 60

INT, KILL, ALARM = signal.SIGINT, signal.SIGKILL, signal.SIGALRM
# The reports that a job has made when it is ended; at "asleep" there is a file.
MOMENTS = {"start": 1, "first batch": 1, "asleep": 1, "body": 2, "end": 3}


class End(NamedTuple):
    """How a job ends.

    Attributes:
        args: of the scene.
        moment: when it gets the signal.
        signals: what it gets, one soon after the other; none if it ends by itself.
        to_all: whether its workers get it, too.
        codes: how it may end; -2 is how Python ends at a KeyboardInterrupt.
        words: what it prints, in one traceback; nothing without.
    """

    args: dict[str, Any]
    moment: str = "start"
    signals: tuple[int, ...] = ()
    to_all: bool = False
    codes: tuple[int, ...] = (0,)
    words: str = ""


CTRL_C = {"codes": (-INT,), "words": "KeyboardInterrupt"}
ENDS = {
    "Ctrl-C at the start": End({}, "start", (INT,), True, **CTRL_C),
    "two to the first process in the first batch":
        End({"hook": "slow"}, "first batch", (INT, INT), **CTRL_C),
    "two in the loop": End({"payload": 16_000}, "body", (INT, INT), True, **CTRL_C),
    "Ctrl-C at the end": End({"way": "fall off"}, "end", (INT,), True, codes=(-INT, 0)),
    "sys.exit": End({"way": "sys.exit", "payload": 200_000}, codes=(5,)),
    "exception": End({"way": "raise", "payload": 200_000}, codes=(1,), words="LookupError"),
    "loader in a circle": End({"way": "circle", "payload": 200_000}),
    "loader is shut down": End({"way": "with", "payload": 200_000}),
    "end of the program": End({"way": "fall off", "payload": 200_000}),
    "killed while workers work": End({"payload": 16_000}, "body", (KILL,), codes=(-KILL,)),
    "_exit while they are blocked":
        End({"way": "block", "payload": 2_000_000}, "body", (ALARM,), codes=(7,)),
    "killed while they sleep": End({"hook": "sleep"}, "asleep", (KILL,), codes=(-KILL,)),
    "killed while they compute": End({"hook": "compute"}, "asleep", (KILL,), codes=(-KILL,)),
    "killed, blocked in a thread":
        End({"from_thread": True, "way": "block", "payload": 5_000_000}, "body", (KILL,),
            codes=(-KILL,)),
}  # fmt: skip


def num_tracebacks(text: str) -> int:
    """Counts the tracebacks in a text; those of one chain of exceptions are one.

    A second interrupt may come when Python is ending, in other libraries' functions.
    """
    chained = text.count("\nDuring handling of") + text.count("\nThe above exception was the")
    ignored = text.split("Exception ignored in")[1:]
    of_others = sum("energon_lite" not in part for part in ignored)
    return text.count("Traceback (most recent call last)") - chained - of_others


def seconds_to_end(job: Job, end: End, pause_sec: float = 0.0) -> float:
    """Ends a job; returns how long it took to end and to leave nothing, or fails."""
    job.wait_for_reports(MOMENTS[end.moment] if end.signals else 1)
    if end.moment == "asleep":
        wait_until((job.folder / "asleep").exists, "asleep")
    time.sleep(0.3 if end.moment == "first batch" else pause_sec)
    since = time.monotonic()
    for number in end.signals:
        if job.exit_code() is None:
            (os.killpg if end.to_all else os.kill)(job.pid, number)
        time.sleep(0.05 if number == INT else 0)
    code, _ = job.end()
    # multiprocessing removes the fork server's folder at the very end of the process.
    is_hard = len(end.signals) == 2 and job.args.get("start_method") == "forkserver"
    job.seconds_until_clean(files=not is_hard and not {KILL, ALARM} & {*end.signals})
    text = job.stderr()
    assert code in end.codes, f"exit code {code}: {text}"
    assert end.words in text
    assert num_tracebacks(text) <= (1 if INT in end.signals or end.words else 0), text
    assert "exited unexpectedly" not in text
    return time.monotonic() - since


@pytest.mark.parametrize("name", ENDS)
def test_every_end_of_a_job_leaves_nothing(jobs: Jobs, texts: Path, name: str) -> None:
    with jobs.job("train", texts=str(texts), **ENDS[name].args) as job:
        assert seconds_to_end(job, ENDS[name]) < 30


@pytest.mark.soak
def test_three_hundred_ends_at_random(jobs: Jobs, texts: Path) -> None:
    # Python imports the user's program, and torch, before a spawned worker does anything of ours.
    rng, figures = random.Random(12), {name: Figures(f"{name}, s to the end") for name in ENDS}
    for trial in range(300):
        name = list(ENDS)[trial % len(ENDS)]
        args = {
            **ENDS[name].args,
            "start_method": rng.choice(("fork", "spawn", "forkserver")),
            "num_workers": rng.choice((1, 2, 4)),
            "payload": int(10 ** rng.uniform(3, 7.7)),
        }
        with jobs.job("train", texts=str(texts), **args) as job, figures[name].trial(args):
            figures[name].add(seconds_to_end(job, ENDS[name], rng.uniform(0, 0.3)))
    for figure in figures.values():
        figure.check()
