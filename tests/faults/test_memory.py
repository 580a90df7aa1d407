"""Memory, open files and threads of a long run stay as they are after its first tenth."""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path

import pytest

from energon_lite.storage.yaml import dump_yaml

from ..helpers import text_set
from .figures import Figures
from .jobs import Job, Jobs, Usage

pytestmark = [pytest.mark.processes, pytest.mark.soak]

# How long the packed run takes; 1,800 s are the figures of docs/reference/reliability.md.
PACKED_SEC = float(os.environ.get("SOAK_PACKED_SEC", "1800"))
# Until each of the sources has been read a few times, memory grows.
NUM_BATCHES = int(os.environ.get("SOAK_NUM_BATCHES", "40000"))
MOST_GROWTH = 0.02


def usage_over_time(job: Job, num_batches: float, limit_sec: float) -> list[Usage]:
    """Measures a job until it has made so many batches, or for so long."""
    found: list[Usage] = []
    start = time.monotonic()
    job.wait_for_reports(1)
    while job.reports()[-1] < num_batches and time.monotonic() - start < limit_sec:
        assert job.exit_code() is None, job.stderr()
        found.append(Usage.of(job.pid))
        time.sleep(limit_sec / 1000)
    return found


def check(name: str, job: Job, found: list[Usage]) -> None:
    """Compares the last tenth of a run with the second."""
    figures = Figures(name)
    tenth = len(found) // 10
    assert tenth >= 2, f"{job!r} was too short to measure: {job.stderr()}"
    num_batches = job.reports()[-1]
    with figures.trial(name):
        early, late = found[tenth : 2 * tenth], found[-tenth - 1 : -1]
        before, after = (
            Usage(*map(statistics.median, zip(*part, strict=True))) for part in (early, late)
        )
        figures.note(
            f"{before.memory_kib / 1024:.1f} -> {after.memory_kib / 1024:.1f} MiB "
            f"({after.memory_kib / before.memory_kib - 1:+.2%}), {num_batches} batches, "
            f"{before.files} -> {after.files} files, {before.threads} -> {after.threads} threads"
        )
        growth = after.memory_kib / before.memory_kib - 1
        assert growth <= MOST_GROWTH, [usage.memory_kib for usage in found]
        assert after.files <= max(usage.files for usage in early)
        assert after.threads <= max(usage.threads for usage in early)
    figures.check()


def test_memory_of_three_hundred_sources_is_flat(jobs: Jobs, tmp_path: Path) -> None:
    parts = [
        {"path": str(text_set(tmp_path / f"texts-{number:03d}", 40)), "weight": 1 + number % 7}
        for number in range(300)
    ]
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend = tmp_path / "blend.yaml"
    blend.write_text(dump_yaml({**head, "splits": {"train": {"blend": parts}}}))
    with jobs.job("train_long", path=str(blend), is_packed=False) as job:
        check("memory: 300 sources x 2 workers", job, usage_over_time(job, NUM_BATCHES, 900))


def test_memory_of_a_packed_run_is_flat(jobs: Jobs, tmp_path: Path) -> None:
    path = text_set(tmp_path / "texts", 5000, num_shards=10)
    with jobs.job("train_long", path=str(path), is_packed=True) as job:
        check("memory: packed run", job, usage_over_time(job, math.inf, PACKED_SEC))
