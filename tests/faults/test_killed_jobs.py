"""Whole jobs that are killed resume from their last state file, on any topology."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ..helpers import Ranks
from .acting import acting, without_pid
from .figures import Figures
from .jobs import Job, JobServer, processes_of, wait_until
from .scenes import digest

pytestmark = pytest.mark.processes


def until_reported(job: Job, number: int) -> bool:
    """Waits until a job has reported so many batches; returns whether it is still running."""
    wait_until(
        lambda: len(job.reports()) >= number or job.exit_code() is not None, f"reports of {job!r}"
    )
    return job.exit_code() is None


def assert_unbroken_by_kills(
    server: JobServer, texts: Path, folder: Path, rng: random.Random, *, kills: int, finite: bool
) -> None:
    """Kills a job so often, lets it end, and compares all that was given with an unbroken run."""
    given: dict[int, int] = {}
    summary: Any = None
    args = {"texts": str(texts), "file": str(folder / f"state-{rng.random()}.json")}
    # 600 texts, of which 1 in 6 is skipped, in batches of 3; endless data are read further.
    shape = {"is_finite": finite, "num_slots": 30 * kills}
    while summary is None:
        topology = {"world_size": rng.randint(1, 3), "num_workers": rng.randint(0, 2)}
        seed = rng.randrange(1000)
        with server.job("train_ranks", **args, **shape, **topology, seed=seed) as job:
            if kills and until_reported(job, rng.randint(1, 40)):
                os.killpg(job.pid, signal.SIGKILL)
                kills -= 1
                job.end()
                job.seconds_until_clean(files=False)
            else:
                assert job.end()[0] == 0, job.stderr()
                summary = job.reports()[-1]
            for slot, value in (entry for entry in job.reports() if isinstance(entry, list)):
                assert given.setdefault(slot, value) == value, f"slot {slot} differs"
    assert_unbroken(acting(texts, 2_000, repeat=not finite), given, summary, finite)


def assert_unbroken(make: Any, given: dict[int, int], summary: Any, finite: bool) -> None:
    """Fails if slots or counts differ from those of a run that was not killed."""
    whole = Ranks(make, 1, num_streams=6)
    slots = whole.rest() if finite else whole.slots(summary["slots"])
    assert given == {slot: digest(without_pid(batch)) for slot, batch in slots.items()}
    assert summary["skipped"] == whole.loaders[0].num_skipped


@pytest.mark.parametrize("finite", [False, True])
def test_killed_job_resumes_on_another_topology(server, many_texts, tmp_path, finite) -> None:
    rng = random.Random(5 + finite)
    assert_unbroken_by_kills(server, many_texts, tmp_path, rng, kills=1, finite=finite)


@pytest.mark.soak
def test_jobs_killed_fifty_times_at_random(server, many_texts, tmp_path) -> None:
    rng, figures = random.Random(12), Figures("whole job killed, resumed on a random topology")
    for number in range(10):
        with figures.trial(number, count=5):
            assert_unbroken_by_kills(
                server, many_texts, tmp_path, rng, kills=5, finite=bool(number % 2)
            )
    figures.check()


def run_a_job(folder: Path, texts: Path, pids: Any) -> None:
    """Starts a job, and waits for ever."""
    server = JobServer(folder)
    args = {"texts": str(texts), "start_method": "fork", "num_workers": 2, "payload": 10}
    with server.job("train_until_killed", state="blocked", **args) as job:
        job.wait_for_reports(2)
        pids.send((server.pid, job.pid))
        signal.pause()


def test_jobs_and_their_server_end_with_tests_that_are_killed(texts, tmp_path) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context: Any = multiprocessing.get_context("fork")
    tests = context.Process(target=run_a_job, args=(tmp_path / "jobs", texts, sender))
    tests.start()
    server, job = receiver.recv()
    assert processes_of(job)
    tests.kill()
    tests.join()
    wait_until(lambda: not Path(f"/proc/{server}").exists(), "end of the server")
    wait_until(lambda: not processes_of(job), "end of the job")
