"""Ranks that share a stream, as their number does not divide the streams, compute it once."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from energon_lite import DefaultTaskEncoder, WorkerConfig, get_train_dataset, stateless
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.topology import RankSlots

from ..helpers import Ranks, assert_same, train, validation
from ..loader.workers import ORDER

ray = pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
RayWorkers: Any = import_module("energon_lite.extras.cluster.ray_workers").RayWorkers
pytestmark = pytest.mark.usefixtures("cluster")


def on_ray(make: Any, world_size: int, num_streams: int = 8, **settings: Any) -> Ranks:
    workers = RayWorkers(1, {"CPU": 0.1}, spares=0)
    settings = {"restart_workers": 100, **settings}
    return Ranks(make, world_size, 1, num_streams=num_streams, worker_type=workers, **settings)


def workers_of(run: Ranks) -> dict[str, Any]:
    """The workers of all ranks, by their actors."""
    found = {}
    for loader in run.loaders:
        deliveries = loader._run._deliveries
        for worker in deliveries._workers if deliveries else ():
            found[worker._actor._actor_id.hex()] = worker
    return found


@pytest.mark.parametrize(("world_size", "num_streams"), [(3, 8), (5, 2), (6, 4)])
def test_each_batch_is_computed_once(texts: Path, world_size: int, num_streams: int) -> None:
    make = train(texts, "skipping")
    expected = Ranks(make, 1, num_streams=num_streams).slots(60)
    run = on_ray(make, world_size, num_streams, prefetch_factor=1)
    assert_same(run.slots(60), expected)
    slots = RankSlots(0, 0, world_size, num_streams)
    num_shared = sum(map(slots.is_shared, range(num_streams)))
    shared = [worker for worker in workers_of(run).values() if worker.config.peers > 1]
    assert len(shared) == num_shared
    computed = sum(ray.get([worker._actor.num_computed.remote() for worker in shared]))
    needed = sum(slots.is_shared(slot % num_streams) for slot in range(60))
    # Each rank has up to `prefetch_factor` made ahead of each of its shared streams.
    ahead = sum(worker.config.peers * 3 for worker in shared)
    assert needed <= computed <= needed + ahead


@pytest.mark.parametrize("world_size", [3, 5, 6])
def test_passes_that_end_are_those_of_local_workers(texts: Path, world_size: int) -> None:
    make = validation(texts, "skipping")
    for num_streams in (4, 7):
        expected = Ranks(make, world_size, num_streams=num_streams)
        run = on_ray(make, world_size, num_streams)
        for _ in range(2):
            assert_same(run.rest(), expected.rest())
            for ranks in (run, expected):
                ranks.iterators = [iter(loader) for loader in ranks.loaders]


class Failing(DefaultTaskEncoder):
    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index >= 7:
            raise FatalSampleError("the disk is gone")
        return batch


def test_errors_reach_all_ranks_that_share_the_stream(texts: Path) -> None:
    def make(config: WorkerConfig) -> Any:
        settings: Any = {"batch_size": 2, "worker_config": config, **ORDER}
        return get_train_dataset(texts, task_encoder=Failing(), **settings)

    run = on_ray(make, 3, 2)
    for rank, iterator in enumerate(run.iterators):
        found = []
        with pytest.raises(FatalSampleError, match="the disk is gone"):
            found.extend(iterator)
        assert len(found) == (7 - rank + 2) // 3


def test_ranks_at_random_speeds_that_are_killed_and_resumed_elsewhere(texts: Path) -> None:
    rng, make = random.Random(7), train(texts, "expanding batches")
    expected = Ranks(make, 1, num_streams=8).slots(120)
    found: dict[int, Any] = {}
    states, num_killed = None, 0
    for world_size in (3, 5, 2, 7):
        run = on_ray(make, world_size, states=states)
        ahead = [0] * world_size
        for _ in range(14):
            rank = rng.choice([n for n in range(world_size) if ahead[n] < min(ahead) + 4])
            slot, batch = run.next(rank)
            found[slot] = batch
            ahead[rank] += 1
            if rng.random() < 0.15:
                with suppress(ray.exceptions.RayActorError):  # it was, and is not replaced yet
                    worker = rng.choice([*workers_of(run).values()])
                    os.kill(ray.get(worker._actor.place.remote())[1], signal.SIGKILL)
                    num_killed += 1
        for rank in range(world_size):  # a state is saved in step
            while ahead[rank] < max(ahead):
                slot, found_batch = run.next(rank)
                found[slot] = found_batch
                ahead[rank] += 1
        states = run.save()
        for loader in run.loaders:
            loader.shutdown()
    assert num_killed
    assert_same(dict(sorted(found.items())), {slot: expected[slot] for slot in sorted(found)})
    assert sorted(found) == [*range(len(found))]
