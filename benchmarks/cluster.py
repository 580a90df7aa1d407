"""Loading on a Ray cluster: `python -m benchmarks.cluster [PART ...]`; --help lists the parts.

The cluster is two nodes on this machine, and what is compared runs in the same call.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_lite import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from tests.helpers import text_set

STORE_BYTES = 1500 << 20
PARTS = "ready", "sustained", "kills", "nodes", "resumes"


class Bytes(DefaultTaskEncoder):
    """Batches of one tensor, and work that takes some time of a CPU."""

    def __init__(self, num_bytes: int, work_sec: float = 0.0) -> None:
        super().__init__()
        self.num_bytes, self.work_sec = num_bytes, work_sec

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        end = time.process_time() + self.work_sec
        while time.process_time() < end:
            pass
        return {"x": torch.full((self.num_bytes,), 3, dtype=torch.uint8), "keys": batch.__key__}


def loader_of(folder: Path, encoder: Any, workers: Any = None, **config: Any) -> Any:
    place = {"rank": 0, "world_size": 1, "num_workers": 0, "num_streams": 4, **config}
    dataset: Any = get_train_dataset(
        folder, batch_size=4, shuffle_buffer_size=100, worker_config=WorkerConfig(**place),
        task_encoder=encoder,
    )  # fmt: skip
    return get_savable_loader(dataset, workers=workers, restart_workers=1 << 20)


def waits_of(batches: Iterator[Any], number: int, pause_sec: float = 0.0) -> list[float]:
    """Seconds of each `next`, after a pause."""
    found = []
    for _ in range(number):
        time.sleep(pause_sec)
        since = time.perf_counter()
        next(batches)
        found.append(time.perf_counter() - since)
    return found


def row(*cells: Any) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def ready(folder: Path, workers: Any) -> None:
    row("batch that is ready", "median [ms]", "90 % [ms]")
    for size, pause in ((16 << 10, 0.02), (25_000_000, 0.5)):
        for node in ("head", "other"):
            loader = loader_of(folder, Bytes(size), workers(1, resources={node: 1}, spares=0))
            with loader:
                batches = iter(loader)
                waits_of(batches, 6, pause)
                waits = sorted(1000 * wait for wait in waits_of(batches, 30, pause))
            name = f"{size:,} bytes, {node} node"
            row(name, f"{statistics.median(waits):.2f}", f"{waits[26]:.2f}")


def sustained(folder: Path, workers: Any) -> None:
    import ray

    class Bare:
        def yielded(self, number: int, size: int) -> Iterator[Any]:
            for _ in range(number):
                yield np.full(size, 3, np.uint8)

    row("sustained from the other node", "batches/s", "MB/s", "of a bare loop")
    for size, number in ((1 << 10, 4000), (25_000_000, 40)):
        actor: Any = ray.remote(Bare).options(resources={"other": 1}).remote()
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 4}
        rates = []
        for _ in range(3):
            since = time.perf_counter()
            for reference in actor.yielded.options(**options).remote(number, size):
                ray.get(reference)
            bare = number / (time.perf_counter() - since)
            made = workers(1, resources={"other": 1}, spares=0)
            with loader_of(folder, Bytes(size), made) as loader:
                batches = iter(loader)
                next(batches)
                since = time.perf_counter()
                waits_of(batches, number)
                rates.append((number / (time.perf_counter() - since), bare))
        own, bare = max(rate for rate, _ in rates), max(rate for _, rate in rates)
        row(f"{size:,} bytes", f"{own:,.0f}", f"{own * size / 1e6:,.0f}", f"{own / bare:.2f}")


def kills(folder: Path, workers: Any, number: int) -> None:
    import ray

    row("kill -9 of an actor", "identical", "median pause [s]", "most [s]")
    for spares in (1, 0):
        expected = iter(loader_of(folder, Bytes(1 << 10)))
        pauses, is_same = [], True
        with loader_of(folder, Bytes(1 << 10), workers(2, spares=spares)) as loader:
            batches = iter(loader)
            for trial in range(number):
                victim = loader._run._deliveries
                if victim is not None:
                    actor = victim._workers[trial % 2]._actor
                    os.kill(ray.get(actor.place.remote())[1], signal.SIGKILL)
                longest = 0.0
                for _ in range(400):  # more than was computed ahead
                    since = time.perf_counter()
                    own = next(batches)
                    longest = max(longest, time.perf_counter() - since)
                    is_same = is_same and own["keys"] == next(expected)["keys"]
                pauses.append(longest)
                if spares:  # so that the next spare is warm
                    spare = loader.worker_config.worker_type._pool.spare
                    ray.get([actor.place.remote() for actor in spare])
        pauses = pauses[1:]
        pause = f"{statistics.median(pauses):.2f}", f"{max(pauses):.2f}"
        row(f"{number} times, {spares} spares", is_same, *pause)


def nodes(folder: Path, workers: Any, number: int, cluster: Any) -> None:
    """Removes nodes, and adds others, at random."""
    import ray

    expected = iter(loader_of(folder, Bytes(1 << 10)))
    rng, is_same, made = random.Random(1), True, workers(2, spares=1, resources={"spot": 1})
    spots = [cluster.add_node(num_cpus=4, resources={"spot": 4}) for _ in range(2)]
    pauses: dict[str, list[float]] = {"removed": [], "added": []}
    seen = []
    with loader_of(folder, Bytes(1 << 10), made) as loader:
        batches = iter(loader)
        next(batches), next(expected)
        for _ in range(number):
            kind = "added" if len(spots) < 2 else rng.choice(["added", "removed"])
            kind = "removed" if len(spots) > 3 else kind
            since = time.perf_counter()
            if kind == "removed":
                cluster.remove_node(spots.pop(rng.randrange(len(spots))), allow_graceful=False)
            else:
                spots.append(cluster.add_node(num_cpus=4, resources={"spot": 4}))
            longest = time.perf_counter() - since
            for _ in range(400):
                before = time.perf_counter()
                own = next(batches)
                longest = max(longest, time.perf_counter() - before)
                is_same = is_same and own["keys"] == next(expected)["keys"]
            while sum(node["Alive"] for node in ray.nodes()) > 2 + len(spots):
                time.sleep(0.05)
            if kind == "removed":
                seen.append(time.perf_counter() - since)
            pauses[kind].append(longest)
            with suppress(ray.exceptions.RayError):  # they may have been on the node
                ray.get([actor.place.remote() for actor in made._pool.spare])
    for spot in spots:
        cluster.remove_node(spot)
    row("node at random", "times", "identical", "median pause [s]", "most [s]")
    for kind, found in pauses.items():
        median = f"{statistics.median(found):.2f}", f"{max(found):.2f}"
        row(kind, len(found), is_same, *median)
    row("Ray lists it as lost after [s]", f"{statistics.median(seen):.1f}")


def resumes(folder: Path, workers: Any, number: int) -> None:
    """Saves and resumes, of each second one on Ray, on random topologies."""
    rng = random.Random(2)
    expected, states = iter(loader_of(folder, Bytes(1 << 10), num_streams=12)), None
    slots, num_same = {slot: next(expected)["keys"] for slot in range(80 * number)}, 0
    first = 0
    for trial in range(number):
        world_size, loaders = rng.choice([1, 2, 3, 4, 5]), []
        for rank in range(world_size):
            place = {"rank": rank, "world_size": world_size, "num_streams": 12, "num_workers": 1}
            made = workers(rng.randint(1, 2), {"CPU": 0.1}, spares=0) if trial % 2 else None
            loaders.append(loader_of(folder, Bytes(1 << 10), made, **place))
            if states is not None:
                loaders[-1].restore_state_global(states)
        iterators, is_same = [iter(loader) for loader in loaders], True
        for _ in range(rng.randint(1, 80 // world_size)):
            step = [next(iterator)["keys"] for iterator in iterators]
            is_same = is_same and sorted(step) == sorted(
                slots[first + rank] for rank in range(world_size)
            )
            first += world_size
        states = [loader.save_state_rank() for loader in loaders]
        for loader in loaders:
            loader.shutdown()
        num_same += is_same
    row("saved local, resumed on Ray, and back", f"identical: {num_same} of {number}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=PARTS, choices=[*PARTS, []])
    parser.add_argument("--number", type=int, default=20, help="kills, and nodes that are lost")
    settings = parser.parse_args()
    root = str(Path(__file__).parents[1])
    os.environ.update(PYTHONPATH=root, RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray.cluster_utils import Cluster

    from energon_lite.extras.cluster.ray_workers import RayWorkers

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 8, "resources": {"head": 8}, "object_store_memory": STORE_BYTES
        },
    )  # fmt: skip
    cluster.add_node(num_cpus=8, resources={"other": 8}, object_store_memory=STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        texts = text_set(Path(folder) / "texts", 2000)
        for part in settings.parts:
            number = settings.number
            more = {"kills": [number], "nodes": [number, cluster], "resumes": [number]}
            globals()[part](texts, RayWorkers, *more.get(part, []))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
