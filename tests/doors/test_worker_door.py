"""A kind of workers that the library does not know, made and registered outside of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import energon_lite.loader
from energon_lite import WorkerConfig
from energon_lite.core import topology
from energon_lite.loader.workers import executor
from energon_lite.loader.workers.executor import register_executor

from ..helpers import Ranks, assert_same, blend_with_itself
from .toy_executor import ProgramExecutor

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the executor for a test."""
    monkeypatch.setattr(topology, "WORKER_TYPES", [*topology.WORKER_TYPES])
    monkeypatch.setattr(executor, "WORKER_TYPES", topology.WORKER_TYPES)
    monkeypatch.setattr(executor, "_EXECUTORS", {**executor._EXECUTORS})
    register_executor("program", ProgramExecutor)


def test_states_resume_in_other_workers_and_a_program_that_dies_is_replaced(
    texts: Path, tmp_path: Path
) -> None:
    make = blend_with_itself(texts, tmp_path)
    whole = Ranks(make, 1, num_streams=6).slots(20)
    run = Ranks(make, 1, 1, num_streams=6, worker_type="program")
    found = run.slots(6)
    resumed = Ranks(make, 3, 1, worker_type="thread", states=run.save())
    found.update(resumed.slots(6))
    run = Ranks(make, 1, 1, worker_type="program", states=resumed.save(), restart_workers=1)
    found.update(run.slots(4))
    pool: Any = run.loaders[0]._run._deliveries
    pool._workers[0].program.kill()
    found.update(run.slots(4))
    assert_same(found, whole)
    pool._workers[0].program.kill()
    with pytest.raises(RuntimeError, match=r"Worker program \d+ of rank 0 died after batch"):
        run.slots(4)


def test_name_that_was_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match="'other' is not one of process, thread, ray, program"):
        WorkerConfig(rank=0, world_size=1, num_workers=1, worker_type="other")
    with pytest.raises(ValueError, match=r"start_method='fork' is of worker processes.*'program'"):
        WorkerConfig(
            rank=0, world_size=1, num_workers=1, worker_type="program", start_method="fork"
        )


def test_loader_knows_executors_only() -> None:
    inner = ("arena", "channel", "codec", "process_executor", "thread_executor", "worker_main")
    others = ("multiprocessing", "socket", "mmap", "subprocess", "queue")
    for path in Path(energon_lite.loader.__file__).parent.glob("*.py"):
        for name in [*others, *(f"energon_lite.loader.workers.{name}" for name in inner)]:
            assert not re.search(rf"^\s*(from|import) {name}\b", path.read_text(), re.M), path
