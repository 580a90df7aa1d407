"""Data whose samples name files of a store, and packs that read them late."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from energon_lite import (
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    Lazy,
    Sample,
    basic_sample_keys,
    cooker,
    edataclass,
    get_train_dataset,
    stateless,
)

from ..conftest import write_tar
from ..helpers import metadataset, prepared
from .acting import loader_of

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


def late_set(folder: Path, num_samples: int) -> Path:
    """Writes crude samples and the files that they name, of 4 to 40 KB; returns the metadataset."""
    (folder / "media").mkdir(parents=True)
    for number in range(NUM_FILES):
        text = f"file {number} " + "x" * (4000 + 363 * number)
        (folder / "media" / f"{number}.bin").write_text(text)
    members = [(f"{i:05d}.txt", f"{i % NUM_FILES}.bin".encode()) for i in range(num_samples)]
    write_tar(folder / "crude" / "shard-0.tar", members)
    prepared(folder / "crude", "CrudeWebdataset")
    aux = {"media": "filesystem://./media"}
    (folder / "data.yaml").write_text(yaml.safe_dump(metadataset({"path": "crude", "aux": aux})))
    return folder / "data.yaml"


def late_packs(
    data: Path, number: int, num_workers: int = 0, start_method: str = "fork", **loader: Any
) -> Iterator[int]:
    """Yields a number for each of the first packs, which tells its content."""

    def make(config: Any) -> Any:
        return get_train_dataset(
            data, worker_config=config, batch_size=None, packing_buffer_size=100,
            shuffle_buffer_size=None, max_samples_per_sequence=None, task_encoder=LateEncoder(),
        )  # fmt: skip

    with loader_of(make, num_workers, start_method, restart_workers=10_000, **loader) as packs:
        for pack in islice(packs, number):
            yield zlib.crc32(repr((pack["__key__"], pack["text"])).encode())
