"""Batches of actors are those of local workers, wherever they run and whatever becomes of them."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import DefaultTaskEncoder, stateless

from ..helpers import Ranks, assert_same, blend_with_itself, train, validation
from ..loader import test_kinds_of_workers as kinds
from ..loader.workers import loader_of

ray = pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
ray_library = import_module("energon_lite.extras.cluster.ray_library")
RayWorkers: Any = import_module("energon_lite.extras.cluster.ray_workers").RayWorkers
pytestmark = pytest.mark.usefixtures("cluster")
NODES = "head", "other"
CLUSTER = "energon_lite.extras.cluster"


def workers_of(run: Ranks, rank: int = 0) -> list[Any]:
    deliveries: Any = run.loaders[rank]._run._deliveries
    return deliveries._workers


def process_of(worker: Any) -> int:
    """The process of an actor."""
    process: int = ray.get(worker._actor.place.remote())[1]
    return process


def has_ended(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_until(is_so: Any, limit_sec: float = 60) -> None:
    deadline = time.monotonic() + limit_sec
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("node", NODES)
def test_batches_and_states_are_those_of_local_workers(
    texts: Path, tmp_path: Path, node: str
) -> None:
    make = blend_with_itself(texts, tmp_path)
    whole = Ranks(make, 1, num_streams=6).slots(40)
    workers = RayWorkers(2, resources={node: 1})
    run = Ranks(make, 1, num_streams=6, workers=workers)
    found = run.slots(12)
    resumed = Ranks(make, 3, 1, worker_type="thread", states=run.save())
    found.update(resumed.slots(12))
    run = Ranks(make, 1, 1, worker_type=RayWorkers(resources={node: 1}), states=resumed.save())
    found.update(run.slots(16))
    assert_same(found, whole)


def test_finite_passes_are_those_without_workers(texts: Path) -> None:
    kinds.test_finite_passes_are_those_without_workers(texts, "ray")


@pytest.mark.parametrize("spares", [0, 1])
def test_actors_that_are_killed_change_no_batch(texts: Path, tmp_path: Path, spares: int) -> None:
    rng, make = random.Random(spares), blend_with_itself(texts, tmp_path)
    whole = Ranks(make, 1, num_streams=6).slots(60)
    run = Ranks(make, 1, num_streams=6, workers=RayWorkers(2, spares=spares), restart_workers=100)
    found, num_killed = {}, 0
    for _ in range(20):
        found.update(run.slots(3))
        if rng.random() < 0.5:
            with suppress(ray.exceptions.RayActorError):  # it was, and is not replaced yet
                os.kill(process_of(rng.choice(workers_of(run))), signal.SIGKILL)
                num_killed += 1
    assert_same(found, whole)
    assert num_killed >= 2


def test_spare_takes_over_from_the_only_actor(texts: Path, tmp_path: Path) -> None:
    make, workers = blend_with_itself(texts, tmp_path), RayWorkers(1, spares=1)
    whole = Ranks(make, 1, num_streams=2).slots(300)
    run = Ranks(make, 1, num_streams=2, workers=workers)
    found = run.slots(2)
    (spare,) = workers._pool.spare
    expected = ray.get(spare.place.remote())[1]
    os.kill(process_of(workers_of(run)[0]), signal.SIGKILL)
    found.update(run.slots(298))
    assert process_of(workers_of(run)[0]) == expected
    assert_same(found, whole)


def test_node_that_is_lost_changes_no_batch(cluster: Any, texts: Path, tmp_path: Path) -> None:
    make = blend_with_itself(texts, tmp_path)
    whole = Ranks(make, 1, num_streams=6).slots(40)
    lost = cluster.add_node(num_cpus=4, resources={"lost": 4}, object_store_memory=100 << 20)
    workers = RayWorkers(2, resources={"lost": 1}, spares=0)
    run = Ranks(make, 1, num_streams=6, workers=workers)
    found = run.slots(12)
    cluster.remove_node(lost, allow_graceful=False)
    workers.resources = {"other": 1}
    found.update(run.slots(28))
    assert_same(found, whole)


def test_passes_begin_again_with_the_same_actors(texts: Path) -> None:
    """Also when the pass before is left with batches that nothing takes."""
    make = validation(texts, "skipping")
    expected = [*Ranks(make, 1, num_streams=2).iterators[0]]
    run = Ranks(make, 1, num_streams=2, workers=RayWorkers(2, spares=0))
    (loader,) = run.loaders
    assert_same([*loader], expected)
    actors = [worker._actor for worker in workers_of(run)]
    for number in range(20):
        for batch, other in zip(loader, expected[: number % 3 + 1], strict=False):
            assert_same(batch, other)
    assert_same([*loader], expected)
    assert [worker._actor for worker in workers_of(run)] == actors


class Large(DefaultTaskEncoder):
    """Batches with large and small tensors and arrays."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        number = int(batch.__key__[0])
        return {
            "tensor": torch.full((300_000,), number, dtype=torch.int32),
            "array": np.full(300_000, number, np.int32), "small": np.full(3, number),
            "keys": batch.__key__,
        }  # fmt: skip


@pytest.mark.parametrize("node", NODES)
def test_batches_may_be_kept_and_changed(texts: Path, node: str) -> None:
    with loader_of(texts, Large(), workers=RayWorkers(2, resources={node: 1})) as loader:
        kept = [batch for batch, _ in zip(loader, range(12), strict=False)]
        for number, batch in enumerate(kept):
            for name in ("tensor", "array", "small"):
                assert {*batch[name].tolist()} == {int(batch["keys"][0])}
                batch[name][:] = -number
        for number, batch in enumerate(kept):
            assert all({*batch[n].tolist()} == {-number} for n in ("tensor", "array", "small"))
        assert len(kept) == 12


class Failing(DefaultTaskEncoder):
    """Fails, or makes what cannot be sent."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how: Any = how
        if how == "settings":
            self.how = threading.Lock()

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.how == "hook":
            raise KeyError("no such column")
        return {"open": sys.stdin if self.how == "batch" else 0}


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("hook", Exception, r"(?s)in Ray worker \d on .*no such column"),
        ("batch", TypeError, r"batch\['open'\] is a TextIOWrapper, which cannot be sent"),
        ("settings", TypeError, r"how is a lock, which cannot be sent to a worker"),
    ],
)
def test_errors_have_their_type_and_name_the_place(
    texts: Path, how: str, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        next(iter(loader_of(texts, Failing(how), workers=RayWorkers(1), max_skip_rate=0)))


def test_actors_that_cannot_start_are_an_error_that_names_what_is_free(texts: Path) -> None:
    workers = RayWorkers(1, resources={"nowhere": 1}, start_timeout_sec=1.0)
    with pytest.raises(RuntimeError, match=r"has not started for .*nowhere(?s:.*)add nodes"):
        next(iter(loader_of(texts, DefaultTaskEncoder(), workers=workers)))


def test_actor_that_is_stuck_is_reported_and_replaced(
    texts: Path, tmp_path: Path, caplog: Any
) -> None:
    encoder, workers = kinds.Odd("sleep", tmp_path / "flag", 30), RayWorkers(1)
    with loader_of(texts, encoder, workers=workers, stall_timeout_sec=4.0) as loader:
        keys = [key for batch, _ in zip(loader, range(8), strict=False) for key in batch.__key__]
    assert len(set(keys)) == 16
    assert "(stuck for" in caplog.text
    assert re.search(r"encode_sample \(test_kinds_of_workers.py:\d+\), sample 00005", caplog.text)


def test_spares_and_actors_end_with_the_loader(texts: Path) -> None:
    workers = RayWorkers(2, spares=1)
    with loader_of(texts, DefaultTaskEncoder(), workers=workers) as loader:
        next(iter(loader))
        own = [worker._actor for worker in loader._run._deliveries._workers]
        actors = own + workers._pool.spare
        processes = [ray.get(actor.place.remote())[1] for actor in actors]
        del actors, own
        assert len(set(processes)) == 3
    wait_until(lambda: all(map(has_ended, processes)))


PROGRAM = """
import logging, os, signal, sys, time
from energon_lite import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.cluster.ray_workers import RayWorkers

class Encoder(DefaultTaskEncoder):
    def encode_batch(self, batch):
        logging.getLogger("of.hooks").warning("logged by an actor")
        return {"keys": batch.__key__, "process": os.getpid()}

config = WorkerConfig(rank=0, world_size=1, num_workers=0)
dataset = get_train_dataset(sys.argv[1], batch_size=2, shuffle_buffer_size=None,
    max_samples_per_sequence=None, worker_config=config, task_encoder=Encoder())
loader = get_savable_loader(dataset, workers=RayWorkers(1, spares=0))
batch = next(iter(loader))
assert len(batch["keys"]) == 2
print(batch["process"], flush=True)
time.sleep(3)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["end", "kill"])
def test_programs_with_encoders_of_their_own_leave_nothing(
    cluster: Any, texts: Path, tmp_path: Path, how: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(texts), how], text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == (-signal.SIGKILL if how == "kill" else 0), found.stderr
    assert "logged by an actor" in found.stdout + found.stderr
    process = int(re.findall(r"^\d+$", found.stdout, re.M)[-1])
    wait_until(lambda: has_ended(process))


def test_actors_are_outside_of_the_placement_group_of_the_trainer(texts: Path) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())

    @ray.remote(num_cpus=1)
    def first_keys() -> list[str]:
        workers = RayWorkers(1, spares=0, start_timeout_sec=60.0)
        with loader_of(texts, DefaultTaskEncoder(), workers=workers) as loader:
            return [*next(iter(loader)).__key__]

    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    assert ray.get(first_keys.options(scheduling_strategy=place).remote()) == ["00000", "00001"]
    remove_placement_group(group)


def test_local_cpus_are_taken_first(cluster: Any, texts: Path) -> None:
    here = ray.get_runtime_context().get_node_id()
    with loader_of(texts, DefaultTaskEncoder(), workers=RayWorkers(2, local_first=True)) as loader:
        next(iter(loader))
        workers = loader._run._deliveries._workers
        nodes = {ray.get(worker._actor.place.remote())[2] for worker in workers}
    assert nodes == {here}


def test_fork_of_the_program_is_refused(texts: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_library, "_connected_in", os.getpid() + 1)
    with pytest.raises(RuntimeError, match="forked from one that is connected to Ray"):
        next(iter(loader_of(texts, DefaultTaskEncoder(), workers=RayWorkers(1))))


def test_other_versions_on_a_node_are_an_error_that_names_both(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{CLUSTER}.sent_values._versions", lambda: ("0.0.1", "3.9"))
    run = Ranks(train(texts), 1, workers=RayWorkers(1, {"CPU": 0.1}))
    words = r"has energon_lite 0\.0\.1 and Python 3\.9, this node energon_lite .*install the same"
    with pytest.raises(RuntimeError, match=words):
        run.slots(1)


@pytest.mark.parametrize("name", ["OutOfDiskError", "ObjectStoreFullError"])
def test_object_store_that_is_full_is_an_error_with_a_remedy(
    texts: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = Ranks(train(texts), 1, num_streams=1).slots(300)
    run = Ranks(train(texts), 1, workers=RayWorkers(1, {"CPU": 0.1}))
    found: dict[int, Any] = {}

    def take(number: int) -> None:
        for _ in range(number):
            found.update(run.slots(1))

    take(1)

    def get(*_: Any, **__: Any) -> Any:
        raise getattr(ray.exceptions, name)("no room for 25 MB")

    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", get)
        with pytest.raises(RuntimeError, match=r"object store of a node is full.*max_bytes"):
            take(200)
    run.iterators = [iter(run.loaders[0])]
    take(5)
    assert_same(found, {slot: whole[slot] for slot in range(len(found))})
