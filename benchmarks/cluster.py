"""Loading on a Ray cluster: `python -m benchmarks.cluster [ready sustained kills nodes peers]`.

The cluster is two nodes on this machine, and what is compared runs in the same call.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
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
PARTS = "ready", "sustained", "kills", "nodes", "peers"


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
    import ray

    row("node that is removed", "identical", "Ray's own detection [s]", "median pause [s]")
    expected = iter(loader_of(folder, Bytes(1 << 10)))
    pauses, seen, is_same = [], [], True
    made = workers(2, spares=1, resources={"spot": 1})
    lost = cluster.add_node(num_cpus=4, resources={"spot": 4})
    with loader_of(folder, Bytes(1 << 10), made) as loader:
        batches = iter(loader)
        next(batches), next(expected)
        for _ in range(number):
            kept = cluster.add_node(num_cpus=4, resources={"spot": 4})
            since = time.perf_counter()
            cluster.remove_node(lost, allow_graceful=False)
            longest = 0.0
            for _ in range(400):
                before = time.perf_counter()
                own = next(batches)
                longest = max(longest, time.perf_counter() - before)
                is_same = is_same and own["keys"] == next(expected)["keys"]
            while sum(node["Alive"] for node in ray.nodes()) > 3:
                time.sleep(0.05)
            seen.append(time.perf_counter() - since)
            pauses.append(longest)
            lost = kept
    cluster.remove_node(lost)
    found = f"{statistics.median(seen):.2f}", f"{statistics.median(pauses):.2f}"
    row(f"{number} times", is_same, *found)


def peers(folder: Path, workers: Any) -> None:
    import ray

    row("peers", "batches each", "computed", "CPU of actors [s]", "memory of the trainer [MiB]")
    for number in (1, 4):
        encoder, loaders = Bytes(100_000, 0.01), []
        for peer in range(number):
            made = workers(spares=0, resources={"other": 1})
            place = {"peers": number, "peer": peer, "worker_type": made, "num_workers": 2}
            loaders.append(loader_of(folder, encoder, **place))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(300):
            for iterator in iterators:
                next(iterator)
        actors = [worker._actor for worker in loaders[0]._run._deliveries._workers]
        pids = [ray.get(actor.place.remote())[1] for actor in actors]
        ticks = os.sysconf("SC_CLK_TCK")
        cpu = sum(
            sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            for pid in pids
        )
        computed = "" if number == 1 else sum(ray.get([a.num_computed.remote() for a in actors]))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        row(number, 300, computed, f"{cpu / ticks:.1f}", memory)
        for loader in loaders:
            loader.shutdown()


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
            more = {"kills": [settings.number], "nodes": [settings.number, cluster]}.get(part, [])
            globals()[part](texts, RayWorkers, *more)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
