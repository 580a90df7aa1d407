"""Ranks of one place get the batches of the first one, whose workers are on Ray."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from energon_lite import WorkerConfig, get_savable_loader

from ..helpers import Ranks, assert_same, train
from ..rank_processes import in_ranks

ray = pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
RayWorkers: Any = import_module("energon_lite.extras.cluster.ray_workers").RayWorkers


def run(rank: int, texts: Path) -> tuple[list[Any], Any, bool]:
    """The batches and the state of one of two peers, and whether it needed Ray."""
    workers = RayWorkers(2, {"CPU": 0.1})
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=2, num_streams=4, peers=2, peer=rank,
        worker_type=workers, peer_group=dist.group.WORLD,
    )  # fmt: skip
    loader: Any = get_savable_loader(train(texts, "skipping")(config), max_skip_rate=1)
    batches = iter(loader)
    found = [next(batches) for _ in range(10)]
    if rank == 0:
        worker = loader._run._deliveries._workers[0]
        os.kill(ray.get(worker._inner._actor.place.remote())[1], signal.SIGKILL)
    found += [next(batches) for _ in range(200)]
    return found, loader.save_state_rank(), ray.is_initialized()


def test_first_peer_loads_on_ray_for_all(
    cluster: Any, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    expected = Ranks(train(texts, "skipping"), 1, num_streams=4)
    slots = [*expected.slots(210).values()]
    ranks = in_ranks(run, 2, tmp_path, texts, start_method="spawn")
    after = expected.slots(4)
    for rank, (found, state, is_on_ray) in enumerate(ranks):
        assert_same(found, slots)
        assert_same(Ranks(train(texts, "skipping"), 1, states=[state]).slots(4), after)
        assert is_on_ray == (rank == 0)
