"""SPDL: files decoded by its own threads; it has neither a format nor blends."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.rows import Row

TITLE = "SPDL"
PACKAGES = ["spdl==0.8.0"]


def prepare(sources: list[Any], folder: Path) -> None:
    (samples,) = sources
    for i, sample in enumerate(samples):
        path = folder / f"{i % 100:02d}" / f"{samples.key(i)}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sample)


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    from spdl.pipeline import PipelineBuilder

    read = read_files if row.group == "bytes" else partial(decode_files, size=row.image_size)
    threads = max(1, row.workers)
    pipeline = (
        PipelineBuilder()
        .add_source(shuffled(sorted(map(str, folder.glob("*/*.jpg")))))
        .aggregate(row.batch_size)
        .pipe(read, concurrency=threads)
        .add_sink(4)
        .build(num_threads=threads)
    )
    pipeline.start()
    return pipeline


def shuffled(paths: list[str]) -> Iterator[str]:
    while True:
        yield from random.sample(paths, len(paths))


def read_files(paths: list[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


def decode_files(paths: list[str], size: int | None) -> Any:
    import spdl.io

    width = height = None
    if size is not None:
        from PIL import Image

        with Image.open(paths[0]) as picture:
            scale = size / min(picture.size)
            width, height = (round(side * scale) for side in picture.size)
    buffer = spdl.io.load_image_batch(paths, width=width, height=height, pix_fmt="rgb24")
    return spdl.io.to_torch(buffer).permute(0, 3, 1, 2)


def samples_of(batch: Any, row: Row) -> Any:
    return batch


def lacks(row: Row) -> str:
    return "" if row.group in ("bytes", "pictures") else "it has no format for small samples"
