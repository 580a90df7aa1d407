"""Whole jobs that are killed resume from their last state file, on any topology."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ..helpers import Ranks
from .acting import acting, without_pid
from .figures import Figures
from .jobs import Jobs, wait_until
from .scenes import digest

pytestmark = pytest.mark.processes
NUM_TEXTS = 600


def assert_unbroken_by_kills(
    jobs: Jobs, texts: Path, folder: Path, rng: random.Random, *, kills: int, finite: bool
) -> None:
    """Kills a job so often, lets it end, and compares all that was given with an unbroken run."""
    given: dict[int, int] = {}
    summary: Any = None
    args = {"texts": str(texts), "file": str(folder / f"state-{rng.random()}.json")}
    # 600 texts, of which 1 in 6 is skipped, in batches of 3; endless data are read further.
    shape = {"is_finite": finite, "num_slots": 30 * kills}
    while summary is None:
        topology = {"world_size": rng.randint(1, 3), "num_workers": rng.randint(0, 2)}
        seed, number = rng.randrange(1000), rng.randint(1, 40)
        with jobs.job("train_ranks", **args, **shape, **topology, seed=seed) as job:
            if kills:
                wait_until(
                    lambda job=job, number=number: (  # type: ignore[misc]
                        len(job.reports()) >= number or job.exit_code() is not None
                    ),
                    f"reports of {job!r}",
                )
            if kills and job.exit_code() is None:
                os.killpg(job.pid, signal.SIGKILL)
                kills -= 1
                job.end()
                job.seconds_until_clean(files=False)
            else:
                assert job.end()[0] == 0, job.stderr()
                summary = job.reports()[-1]
            for slot, value in (entry for entry in job.reports() if isinstance(entry, list)):
                assert given.setdefault(slot, value) == value, f"slot {slot} differs"
    whole = Ranks(acting(texts, 2_000, repeat=not finite), 1, num_streams=6)
    slots = whole.rest() if finite else whole.slots(summary["slots"])
    assert given == {slot: digest(without_pid(batch)) for slot, batch in slots.items()}
    assert summary["skipped"] == whole.loaders[0].num_skipped


@pytest.mark.parametrize("finite", [False, True])
def test_killed_job_resumes_on_another_topology(
    jobs: Jobs, texts: Path, tmp_path: Path, finite: bool
) -> None:
    rng = random.Random(5 + finite)
    assert_unbroken_by_kills(jobs, texts, tmp_path, rng, kills=1, finite=finite)


@pytest.mark.soak
def test_jobs_killed_fifty_times_at_random(jobs: Jobs, texts: Path, tmp_path: Path) -> None:
    rng, figures = random.Random(12), Figures("whole job killed, resumed on a random topology")
    for number in range(10):
        with figures.trial(number, count=5):
            odd = bool(number % 2)
            assert_unbroken_by_kills(jobs, texts, tmp_path, rng, kills=5, finite=odd)
    figures.check()
