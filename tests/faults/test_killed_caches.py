"""Whichever process of a job is killed: no content is wrong, and the next start finds no files."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from energon_lite import FileStoreCachePool

from .jobs import LIMIT_SEC, wait_until
from .lazies import late_packs, late_set

pytestmark = pytest.mark.processes


# A hundred packs a second on a busy machine.
READ_SEC = LIMIT_SEC + 16_000 / 100


def folders(caches: Path) -> list[Path]:
    return list(caches.glob("cache_*"))


def check_kills(
    server, root: Path, seed: int, *, num_samples: int, number: int, num_workers: int, kills: int
) -> None:
    """Kills worker processes of one job, and all of another one, at random."""
    rng = random.Random(seed)
    data, caches = late_set(root, num_samples), root / "caches"
    expected = list(late_packs(data, number, 0, "fork", None))
    assert len(set(expected)) > number / 2
    args = {
        "data": str(data), "caches": str(caches), "number": number, "num_workers": num_workers,
        "start_method": rng.choice(("fork", "spawn")),
    }  # fmt: skip
    with server.job("read_late", **args) as job:
        assert job.wait_for_reports(1, READ_SEC) == [expected[:10]]
        for _ in range(kills):
            time.sleep(rng.uniform(0, 0.2))
            workers = job.workers()
            with suppress(ProcessLookupError, IndexError):
                os.kill(rng.choice(workers), signal.SIGKILL)
        assert job.wait_for_reports(2, READ_SEC)[1] == expected
        assert job.end()[0] == 0
    assert folders(caches) == []
    with server.job("read_late", **{**args, "number": 10**9}) as job:
        assert job.wait_for_reports(1, READ_SEC) == [expected[:10]]
        time.sleep(rng.uniform(0, 0.5))
        assert len(folders(caches)) >= num_workers
        # Workers of a job that was killed alone may have the time to remove their folders.
        os.kill(job.pid, signal.SIGSTOP)
        for pid in (*job.workers(), job.pid):
            os.kill(pid, signal.SIGKILL)
        job.end()
        wait_until(lambda: not job.workers(), "end of the workers")
    assert folders(caches) != []
    living = FileStoreCachePool(parent_cache_dir=caches)
    assert folders(caches) == []
    (living.cache_dir / "0").write_text("used")
    FileStoreCachePool(parent_cache_dir=caches)
    assert folders(caches) == [living.cache_dir]
    living.close()


def test_killed_processes_leave_no_cache_behind(server, tmp_path: Path) -> None:
    check_kills(server, tmp_path, 1, num_samples=400, number=200, num_workers=2, kills=2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_eight_workers_with_ten_thousand_items_each_are_killed(server, tmp_path, seed) -> None:
    check_kills(server, tmp_path, seed, num_samples=10_000, number=16_000, num_workers=8, kills=40)
