"""Measures in a process of its own: `python probes.py WHAT [PATH]` prints seconds as JSON.

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
    """Gives the time; importing torch leaves garbage whose collection may fall anywhere after."""
    gc.collect()
    return now()


def measure_import() -> dict[str, float]:
    start = now()
    import torch  # noqa: F401

    with_torch = now()
    import energon_lite  # noqa: F401

    return {"torch": with_torch - start, "package": now() - with_torch}


def megabytes(pid: object) -> float:
    """Memory of a process, what it shares with others counted in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


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


PROBES = {
    "import": measure_import,
    "open": measure_opening,
    "open-by-hand": measure_opening_by_hand,
    "blend-memory": measure_blend_memory,
    "energon": measure_energon,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
