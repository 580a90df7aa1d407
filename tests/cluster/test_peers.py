"""Ranks that have the same place get the same batches, each of which is computed once."""

from __future__ import annotations

import os
import random
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import FatalSampleError

from ..helpers import Ranks, assert_same, train, validation
from ..loader.workers import ORDER
from .test_ray_workers import has_ended, wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
RayWorkers: Any = import_module("energon_lite.extras.cluster.ray_workers").RayWorkers

pytestmark = pytest.mark.usefixtures("cluster")
NUM_PEERS = 4


def peers(
    make: Any, num_peers: int = NUM_PEERS, states: Any = None, workers: Any = None, **config: Any
) -> list[Any]:
    """The loaders of all ranks of one place."""
    found = []
    for peer in range(num_peers):
        place = WorkerConfig(
            rank=0, world_size=1, num_workers=2, num_streams=4, peers=num_peers, peer=peer,
            worker_type=workers or RayWorkers(resources={"other": 0.1}), **config,
        )  # fmt: skip
        loader = get_savable_loader(make(place), max_skip_rate=1, restart_workers=20)
        if states is not None:
            loader.restore_state_global(states)
        found.append(loader)
    return found


def actors_of(loaders: list[Any]) -> set[str]:
    workers = [worker for loader in loaders for worker in loader._run._deliveries._workers]
    return {worker._actor._actor_id.hex() for worker in workers}


def num_computed(loader: Any) -> int:
    workers = loader._run._deliveries._workers
    return sum(ray.get([worker._actor.num_computed.remote() for worker in workers]))


def test_each_batch_is_computed_once(texts: Path) -> None:
    expected = Ranks(train(texts, "skipping"), 1, num_streams=4).slots(60)
    loaders = peers(train(texts, "skipping"))
    iterators = [iter(loader) for loader in loaders]
    for slot in range(60):
        for iterator in iterators:
            assert_same(next(iterator), expected[slot])
    ahead = 2 * 32 * (loaders[0].prefetch_factor + 1)
    assert 60 <= num_computed(loaders[0]) <= 60 + ahead
    assert actors_of(loaders[:1]) == actors_of(loaders[-1:]) == actors_of(loaders)


def test_peers_at_random_speeds_that_are_killed_and_resumed(texts: Path) -> None:
    rng, make = random.Random(3), train(texts, "expanding batches")
    expected = Ranks(make, 1, num_streams=4).slots(90)
    loaders = peers(make, 3)
    iterators = [iter(loader) for loader in loaders]
    places, num_killed = [0, 0, 0], 0
    for _ in range(100):
        peer = rng.randrange(3)
        for _ in range(rng.randint(1, 3)):
            if places[peer] < 90:
                assert_same(next(iterators[peer]), expected[places[peer]])
                places[peer] += 1
        if rng.random() < 0.04:
            workers = loaders[peer]._run._deliveries
            worker = workers and rng.choice(workers._workers)
            if worker:
                try:
                    os.kill(ray.get(worker._actor.place.remote())[1], signal.SIGKILL)
                    num_killed += 1
                except ray.exceptions.RayActorError:
                    pass  # it was, and is not replaced yet
    assert min(places) > 20
    assert num_killed
    states = [loaders[0].save_state_rank()]
    resumed = [iter(loader) for loader in peers(make, 2, states)]
    for slot in range(places[0], min(90, places[0] + 10)):
        for iterator in resumed:
            assert_same(next(iterator), expected[slot])


def test_peer_that_resumes_further_back_gets_the_same_batches(texts: Path) -> None:
    make = train(texts, "skipping")
    expected = Ranks(make, 1, num_streams=4).slots(40)
    first, second = peers(make, 2, workers=RayWorkers(max_bytes=20_000))
    batches = iter(first)
    early = None
    for slot in range(30):
        assert_same(next(batches), expected[slot])
        if slot == 4:
            early = first.save_state_rank()
    second.restore_state_rank(early)
    assert_same([next(iter(second)) for _ in range(25)], [expected[m] for m in range(5, 30)])
    third = peers(make, 2)[1]
    assert_same([next(iter(third)) for _ in range(5)], [expected[m] for m in range(5)])


def test_passes_of_a_validation_begin_again(texts: Path) -> None:
    make = validation(texts, "skipping")
    expected = [*Ranks(make, 1, num_streams=4).iterators[0]]
    loaders = peers(make, 2)
    for stop in (None, 3, 1, None):
        for loader in loaders:
            found = [batch for batch, _ in zip(loader, expected[:stop], strict=False)]
            assert_same(found, expected[:stop])


class Large(DefaultTaskEncoder):
    @stateless
    def encode_batch(self, batch: Any) -> Any:
        number = int(batch.__key__[0])
        return {"tensor": torch.full((300_000,), number), "array": np.full(300_000, number)}


def test_peers_cannot_change_what_others_see(texts: Path) -> None:
    def make(config: WorkerConfig) -> Any:
        settings: Any = {"batch_size": 2, "worker_config": config, "task_encoder": Large(), **ORDER}
        return get_train_dataset(texts, **settings)

    loaders = [iter(loader) for loader in peers(make, 3, workers=RayWorkers(2))]
    for _ in range(4):
        for batch in map(next, loaders):
            number = int(batch["array"][0])
            assert number >= 0
            for name in ("tensor", "array"):
                assert {*batch[name].tolist()} == {number}
                batch[name][:] = -1


def test_kinds_of_workers_that_would_compute_again_are_refused(texts: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2, peers=4, peer=1)
    loader = get_savable_loader(train(texts)(config))
    with pytest.raises(ValueError, match=r"peers=4 with workers of kind 'process'.*broadcast"):
        next(iter(loader))


def test_one_spare_takes_the_place_of_an_actor_for_all_peers(texts: Path) -> None:
    make = train(texts, "skipping")
    expected = Ranks(make, 1, num_streams=4).slots(4 * 90)
    place = {"resources": {"other": 0.1}}
    loaders = [peers(make, 3, workers=RayWorkers(2, **place))[peer] for peer in range(3)]
    iterators = [iter(loader) for loader in loaders]

    def take(first: int, number: int) -> None:
        for slot in range(first, first + number):
            for iterator in iterators:
                assert_same(next(iterator), expected[slot])

    take(0, 40)
    for number in range(3):
        before = actors_of(loaders)
        assert len(before) == 2
        names = [own["name"] for own in ray.util.list_named_actors(all_namespaces=True)]
        group = loaders[0]._run._deliveries._workers[0]._shared_name.split("/")[0]
        (spare,) = {f"{group}/spare/{number}"}.intersection(names)
        replacement = ray.get_actor(spare, "energon_lite")
        ray.get(replacement.place.remote())
        worker = loaders[0]._run._deliveries._workers[number % 2]
        os.kill(ray.get(worker._actor.place.remote())[1], signal.SIGKILL)
        take(40 + 100 * number, 100)  # some were made before
        assert actors_of(loaders) - before == {replacement._actor_id.hex()}
        assert len(actors_of(loaders)) == 2
    late = peers(make, 3, workers=RayWorkers(2, **place))[2]
    assert_same([next(iter(late)) for _ in range(5)], [expected[slot] for slot in range(5)])
    assert actors_of([late]) == actors_of(loaders)


def test_peers_change_their_workers_and_leave_no_actor_behind(texts: Path) -> None:
    make = train(texts, "skipping")
    expected = Ranks(make, 1, num_streams=4).slots(60)
    loaders = peers(make, 2, workers=RayWorkers(2, {"CPU": 0.1}, spares=0))
    iterators = [iter(loader) for loader in loaders]
    before: set[int] = set()
    for slot in range(60):
        if slot % 20 == 10:
            before |= processes_of(loaders)
            for loader in loaders:
                loader.use_workers(1 + slot // 20)
        for iterator in iterators:
            assert_same(next(iterator), expected[slot])
    living = processes_of(loaders)
    assert len(living) == 3
    wait_until(lambda: all(map(has_ended, before - living)))


def processes_of(loaders: list[Any]) -> set[int]:
    workers = [worker for loader in loaders for worker in loader._run._deliveries._workers]
    return {ray.get(worker._actor.place.remote())[1] for worker in workers}


class Away(DefaultTaskEncoder):
    """Fails while a file is there."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index >= 4 and Path(self.file).exists():
            raise FatalSampleError("the disk is away")
        return batch


def test_error_that_passes_is_not_kept_for_those_that_try_again(
    texts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "away"
    file.touch()

    def make(config: WorkerConfig) -> Any:
        settings: Any = {"batch_size": 2, "worker_config": config, **ORDER}
        return get_train_dataset(texts, task_encoder=Away(str(file)), **settings)

    loaders = peers(make, 2, workers=RayWorkers(2, {"CPU": 0.1}, spares=0))
    found: list[list[Any]] = [[], []]
    for _ in range(2):
        with pytest.raises(FatalSampleError, match="the disk is away"):
            found[0].extend(loaders[0])
    file.unlink()
    for batches, loader in zip(found, loaders, strict=True):
        while len(batches) < 12:
            batches.append(next(iter(loader)))
    expected = Ranks(make, 1, num_streams=4).slots(12)
    for batches in found:
        assert_same(dict(enumerate(batches)), expected)
