"""litData: chunks written by `optimize`, read shuffled by its own loader.

Chunks of 64 MB, as its guide has them, but of 1 MB for texts: with two workers a batch takes longer
the more samples a chunk has (13 µs per text with 1 MB, 26 with 8 MB, 85 with 64 MB).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.pillow_pictures import decoded
from benchmarks.peers.rows import Row

TITLE = "litData"
PACKAGES = ["litdata==0.2.76"]


def sample_at(index: int, samples: Any) -> Any:
    """What `optimize` calls for each sample."""
    return samples[index].decode() if samples.kind == "text" else samples[index]


def prepare(sources: list[Any], folder: Path) -> None:
    from litdata import optimize

    for number, samples in enumerate(sources):
        optimize(
            fn=partial(sample_at, samples=samples),
            inputs=list(range(len(samples))),
            output_dir=str(folder / f"source{number:04d}"),
            chunk_bytes="1MB" if samples.kind == "text" else "64MB",
            num_workers=1,
            start_method="fork",
            verbose=False,
        )


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    transform = None
    if row.is_decoded:
        transform = partial(decoded, size=row.image_size)
    elif row.group == "bytes":
        transform = bytes  # its memoryviews can neither be collated nor sent by a worker
    elif row.group == "hooks":
        transform = encoded
    opened = [
        StreamingDataset(str(folder / f"source{i:04d}"), shuffle=True, transform=transform)
        for i in range(row.num_sources)
    ]
    if row.num_sources == 1:
        dataset = opened[0]
    else:
        shares = [1 / row.num_sources] * row.num_sources
        dataset = CombinedStreamingDataset(opened, weights=shares, iterate_over_all=False)
    return StreamingDataLoader(
        dataset,
        batch_size=row.batch_size,
        collate_fn=list if row.group in ("bytes", "hooks") else None,
        num_workers=row.workers,
    )


def samples_of(batch: Any, row: Row) -> Any:
    return batch


def lacks(row: Row) -> str:
    return "its packs cut texts at fixed lengths" if row.group == "packed" else ""
