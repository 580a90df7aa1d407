"""MosaicML Streaming: MDS shards of 64 MB, shuffled by its default algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.pillow_pictures import decoded
from benchmarks.peers.rows import Row

TITLE = "MosaicML Streaming"
PACKAGES = ["mosaicml-streaming==0.13.0"]


def without_operators() -> None:
    """Lets torchvision be imported, which `streaming` does though nothing here uses it.

    PyPI has no build of it for torch without CUDA, so its operators are missing there.
    """
    import torch

    if not torch.version.cuda:
        for name in ("nms", "qnms"):
            signature = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)


def prepare(sources: list[Any], folder: Path) -> None:
    without_operators()
    from streaming import MDSWriter

    for number, samples in enumerate(sources):
        is_text = samples.kind == "text"
        columns = {"sample": "str" if is_text else "bytes"}
        with MDSWriter(out=str(folder / f"source{number:04d}"), columns=columns) as writer:
            for sample in samples:
                writer.write({"sample": sample.decode() if is_text else sample})


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    without_operators()
    from streaming import Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Pictures(StreamingDataset):
        """Decodes in `__getitem__`, as the guide shows."""

        def __getitem__(self, at: Any) -> Any:
            return {"sample": decoded(super().__getitem__(at)["sample"], row.image_size)}

    class Encoded(StreamingDataset):
        """Makes tokens of texts, in the same place."""

        def __getitem__(self, at: Any) -> Any:
            return {"sample": encoded(super().__getitem__(at)["sample"])}

    clean_stale_shared_memory()
    streams = [
        Stream(local=str(folder / f"source{i:04d}"), proportion=1 / row.num_sources)
        for i in range(row.num_sources)
    ]
    is_hooked = row.group == "hooks"
    made = Pictures if row.is_decoded else Encoded if is_hooked else StreamingDataset
    dataset = made(streams=streams, batch_size=row.batch_size, shuffle=True)
    return StreamingDataLoader(
        dataset,
        batch_size=row.batch_size,
        collate_fn=in_lists if is_hooked else None,
        num_workers=row.workers,
        persistent_workers=row.workers > 0,
    )


def in_lists(samples: list[Any]) -> dict[str, list[Any]]:
    return {"sample": [sample["sample"] for sample in samples]}


def samples_of(batch: Any, row: Row) -> Any:
    return batch["sample"]


def lacks(row: Row) -> str:
    return "it does not pack" if row.group == "packed" else ""
