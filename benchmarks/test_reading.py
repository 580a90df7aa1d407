"""Pictures of 74 KB left as bytes: from the page cache, and from storage."""

from __future__ import annotations

import os
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.data import tar_member
from benchmarks.measure import Count, Entry, Figure, in_turn
from energon_lite import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.prepare import prepare_dataset

NUM_SHARDS, PER_SHARD, BATCH, NUM_READ = 8, 1000, 16, 1920
ORDERS: dict[str, dict[str, Any]] = {
    "window 10,000": {"shuffle_buffer_size": 10_000, "max_samples_per_sequence": None},
    "window 10,000, sequences of 100": {
        "shuffle_buffer_size": 10_000, "max_samples_per_sequence": 100,
    },
    "completely random": {"shuffle_buffer_size": 0, "max_samples_per_sequence": 1},
}  # fmt: skip


class Undecoded(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Leaves pictures as bytes."""

    decoder = None


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Path:
    """8,000 samples in 8 shards: 600 MB."""
    rng, root = random.Random(0), folder / "pictures"
    root.mkdir()
    content = rng.randbytes(1 << 22)
    for shard in range(NUM_SHARDS):
        with (root / f"shard-{shard}.tar").open("wb") as file:
            for key in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                at, size = rng.randrange(1 << 21), rng.randrange(45_000, 103_000)
                file.write(tar_member(f"{key:06d}.jpg", content[at : at + size]))
            file.write(bytes(1024))
            os.fsync(file.fileno())  # what is not yet written stays in the page cache
    settings: dict[str, Any] = {"sample_type": "ImageSample", "field_map": {"image": "jpg"}}
    prepare_dataset(root, split_parts={"train": ".*"}, num_workers=0, **settings)
    return root


def loader_of(root: Path, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    encoder = Undecoded()
    return get_savable_loader(
        get_train_dataset(
            root, batch_size=BATCH, worker_config=config, task_encoder=encoder, **settings
        )
    )


def drop(root: Path) -> None:
    """Takes the shards out of the page cache."""
    for path in root.glob("*.tar"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_seconds() -> float:
    """Time in which no other process had the core that this one could have used."""
    waited_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.perf_counter() - waited_ns / 1e9


def bytes_from_storage() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_pictures_from_the_page_cache(benchmark: Any, entries: list[Entry], pictures: Path) -> None:
    batches = iter(loader_of(pictures, shuffle_buffer_size=100, max_samples_per_sequence=100))
    rng = random.Random(1)
    files = [os.open(path, os.O_RDONLY) for path in sorted(pictures.glob("*.tar"))]
    places = [(rng.choice(files), rng.randrange(100 << 10) * 512) for _ in range(NUM_READ)]
    for path in pictures.glob("*.tar"):
        path.read_bytes()

    def read() -> None:
        for _ in islice(batches, NUM_READ // BATCH):
            pass

    def read_by_hand() -> None:
        batch: list[bytes] = []
        for file, at in places:
            batch = [*batch[-BATCH:], os.pread(file, 74_000, at)]

    found = in_turn(benchmark, {"ours": read, "pread": read_by_hand}, rounds=7)
    ours, theirs = ([t / NUM_READ for t in found[k]] for k in found)
    name = "pictures of 74 KB as bytes, page cache"
    entries.append(Figure("Reading", name, "µs", ours, "pread into bytes", theirs, goal_ratio=3.5))


@pytest.mark.parametrize("order", ORDERS)
def test_pictures_from_cold_storage(
    benchmark: Any, entries: list[Entry], pictures: Path, order: str
) -> None:
    sizes = [path.stat().st_size for path in sorted(pictures.glob("*.tar"))]
    num_bytes = sum(sizes) * NUM_READ // (NUM_SHARDS * PER_SHARD)
    from_storage: list[int] = []
    ours: list[float] = []
    theirs: list[float] = []

    def read() -> None:
        batches = iter(loader_of(pictures, **ORDERS[order]))
        drop(pictures)
        before, since = bytes_from_storage(), own_seconds()
        for _ in islice(batches, NUM_READ // BATCH):
            pass
        ours.append((own_seconds() - since) / NUM_READ)
        from_storage.append(bytes_from_storage() - before)

    def read_in_sequence() -> None:
        drop(pictures)
        since = own_seconds()
        left, buffer = num_bytes, bytearray(1 << 20)
        for path in sorted(pictures.glob("*.tar")):
            with path.open("rb", buffering=0) as file:
                while left > 0 and (size := file.readinto(buffer)):
                    left -= size
        theirs.append((own_seconds() - since) / NUM_READ)

    in_turn(benchmark, {"ours": read, "sequence": read_in_sequence}, rounds=5)
    if not any(from_storage):
        pytest.skip("the folder of temporary files is not on storage that can be dropped")
    name = f"pictures of 74 KB, cold, {order}"
    entries.append(Figure("Reading", name, "µs", ours[1:], "as many bytes in sequence", theirs[1:]))
    ratio = sorted(from_storage)[len(from_storage) // 2] / num_bytes
    name = f"cold, {order}: bytes read over used, {NUM_READ:,} pictures"
    entries.append(Count("Reading", name, f"{ratio:.2f}", "<= 1.3", ratio <= 1.3))
    assert ratio <= 1.3
