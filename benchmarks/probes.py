"""Measures in a separate process: `python probes.py WHAT [PATH]` prints seconds as JSON.

Imports nothing at the top, since it also runs in a Python that has only Megatron-Energon.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

now = time.perf_counter


def start_clock() -> float:
    """Returns the time; importing torch leaves garbage whose collection may fall anywhere after."""
    gc.collect()
    return now()


def measure_import() -> dict[str, float]:
    start = now()
    import torch  # noqa: F401

    with_torch = now()
    from energon_lite import (  # noqa: F401
        DefaultTaskEncoder,
        WorkerConfig,
        get_loader,
        get_train_dataset,
    )

    return {"torch": with_torch - start, "package": now() - with_torch}


def megabytes(pid: object) -> float:
    """Memory of a process, what it shares with others counted in parts; no page of a file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    own = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) for line in lines if line.startswith(own)) / 1024


def measure_blend_memory(path: str, num_workers: str, num_batches: str) -> dict[str, float]:
    import multiprocessing

    import torch  # noqa: F401

    bare = megabytes("self")
    from energon_lite import WorkerConfig, get_loader, get_train_dataset

    dataset = get_train_dataset(
        path,
        batch_size=32,
        shuffle_buffer_size=100,
        worker_config=WorkerConfig(
            rank=0, world_size=1, num_workers=int(num_workers), start_method="fork"
        ),
    )
    loader = get_loader(dataset)
    batches = iter(loader)
    for _ in itertools.islice(batches, int(num_batches)):
        pass
    gc.collect()
    own = megabytes("self")
    workers = sum(megabytes(child.pid) for child in multiprocessing.active_children())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"over_torch": own - bare, "all": own + workers, "files": files}


def measure_opening(path: str) -> dict[str, float]:
    from energon_lite import WorkerConfig, get_loader, get_train_dataset

    start = start_clock()
    dataset = get_train_dataset(
        path,
        batch_size=32,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    loader = get_loader(dataset)
    opened = now()
    batch = next(iter(loader))
    first = now()
    assert len(batch.text) == 32
    return {"open": opened - start, "first": first - opened}


def measure_opening_by_hand(path: str) -> dict[str, float]:
    from pathlib import Path

    from benchmarks.baselines import first_texts, read_metadata

    start = start_clock()
    shards = read_metadata(Path(path))
    opened = now()
    texts = first_texts(Path(path), shards[:32])
    first = now()
    assert len(texts) == 32
    return {"open": opened - start, "first": first - opened}


def measure_energon(path: str) -> dict[str, float]:
    from megatron.energon import WorkerConfig, get_loader, get_train_dataset

    start = start_clock()
    dataset: Any = get_train_dataset(
        path,
        batch_size=32,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    batches = iter(get_loader(dataset))
    next(batches)
    opened = now()
    num_samples = sum(len(batch.text) for batch in itertools.islice(batches, 300))
    return {"open": opened - start, "sample": (now() - opened) / num_samples}


def measure_energon_packing(path: str, capacity: str) -> dict[str, float]:
    """Packs by Energon's hooks, with the packer of its users: longest first, by bisection."""
    from bisect import bisect_right, insort

    import numpy as np
    import torch
    from megatron.energon import (
        DefaultTaskEncoder,
        WorkerConfig,
        get_loader,
        get_train_dataset,
        stateless,
    )

    limit = int(capacity)
    drawn = np.random.Generator(np.random.Philox(20250509)).lognormal(np.log(400), 1.0, 20_000)
    lengths = np.clip(np.rint(drawn), 1, limit).astype(np.int64).tolist()

    class Packs(DefaultTaskEncoder):  # type: ignore[misc]
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            by_length: list[tuple[int, int]] = []
            for number, sample in enumerate(samples):
                insort(by_length, (lengths[int(sample.__key__)], number))
            packs = []
            while by_length:
                room, pack = limit, []
                while True:
                    place = bisect_right(by_length, (room, len(samples))) - 1
                    if place < 0:
                        break
                    length, number = by_length.pop(place)
                    room -= length
                    pack.append(samples[number])
                packs.append(pack)
            return packs

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            filled.append(sum(lengths[int(sample.__key__)] for sample in samples) / limit)
            sizes.append(len(samples))
            return samples[0]

    filled: list[float] = []
    sizes: list[int] = []
    torch.manual_seed(0)
    dataset: Any = get_train_dataset(
        path,
        batch_size=1,
        packing_buffer_size=256,
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        task_encoder=Packs(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    batches = iter(get_loader(dataset))
    next(batches)
    sizes.clear()
    filled.clear()
    start = start_clock()
    for _ in itertools.islice(batches, 1000):
        pass
    return {"sample": (now() - start) / sum(sizes), "filled": sum(filled) / len(filled)}


PROBES = {
    "energon_packing": measure_energon_packing,
    "import": measure_import,
    "open": measure_opening,
    "open-by-hand": measure_opening_by_hand,
    "blend-memory": measure_blend_memory,
    "energon": measure_energon,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
