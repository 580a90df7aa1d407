"""Data whose samples name files of a store, a task encoder that reads them late, and its job."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from energon_lite import (
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    FileStoreCachePool,
    Lazy,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..conftest import write_tar
from ..helpers import metadataset, prepared

NUM_FILES = 100


@edataclass
class Late(Sample):
    """A sample whose content is read in `postencode_sample`."""

    media: Lazy[bytes]
    kept: Lazy[str]


@cooker(need_cache=True)
def cook_late(sample: Any, media: Any, cache: CachePool) -> Late:
    kept: Lazy[str] = cache.to_cache(f"kept {sample['__key__']}", sample["__key__"])
    lazy = cache.get_lazy(media, sample["txt"])
    return Late(**basic_sample_keys(sample), media=lazy, kept=kept)


class LateEncoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Reads files when their samples leave the buffer."""

    cookers = (Cooker(cook_late),)

    @stateless
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[i : i + 5] for i in range(0, len(samples), 5)]

    @stateless
    def postencode_sample(self, sample: Late) -> dict[str, Any]:
        text = f"{sample.media.get(sample).decode()[:20]} {sample.kept.get()}"
        assert f"kept {sample.__key__}" in text
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "text": text}

    @stateless
    def pack_selected_samples(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**samples[0], "text": [sample["text"] for sample in samples]}


def content(number: int) -> str:
    """The content of a file, of 4 to 40 KB."""
    return f"file {number} " + "x" * (4000 + 363 * number)


def late_set(folder: Path, num_samples: int) -> Path:
    """Writes crude samples and the files that they name; returns the metadataset."""
    (folder / "media").mkdir(parents=True)
    for number in range(NUM_FILES):
        (folder / "media" / f"{number}.bin").write_text(content(number))
    members = [
        (f"{number:05d}.txt", f"{number % NUM_FILES}.bin".encode()) for number in range(num_samples)
    ]
    write_tar(folder / "crude" / "shard-0.tar", members)
    prepared(folder / "crude", "CrudeWebdataset")
    path = folder / "data.yaml"
    aux = {"media": "filesystem://./media"}
    path.write_text(yaml.safe_dump(metadataset({"path": "crude", "aux": aux})))
    return path


def late_packs(
    data: Path, number: int, num_workers: int, start_method: str, pool: CachePool | None
) -> Iterator[int]:
    """Yields a number for each of the first packs, which tells its content."""
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=num_workers, num_streams=8, start_method=start_method
    )
    dataset = get_train_dataset(
        data, worker_config=config, batch_size=None, packing_buffer_size=100,
        shuffle_buffer_size=None, max_samples_per_sequence=None, task_encoder=LateEncoder(),
    )  # fmt: skip
    with get_savable_loader(dataset, cache_pool=pool, restart_workers=10_000) as loader:
        for pack in islice(loader, number):
            yield zlib.crc32(repr((pack["__key__"], pack["text"])).encode())


def read_late(
    report: Callable[[Any], None],
    data: str,
    caches: str,
    number: int,
    num_workers: int,
    start_method: str,
) -> None:
    """Reads packs with a small cache; reports the first ten, and all at the end.

    Args:
        report: called twice.
        data: the metadataset.
        caches: parent folder of the caches.
        number: of packs.
        num_workers: how many worker processes there are.
        start_method: of the worker processes.
    """
    pool = FileStoreCachePool(parent_cache_dir=caches, num_workers=2, max_cache_count=150)
    packs = late_packs(Path(data), number, num_workers, start_method, pool)
    first = list(islice(packs, 10))
    report(first)
    report([*first, *packs])
