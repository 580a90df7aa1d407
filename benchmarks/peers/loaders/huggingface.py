"""HF datasets: an Arrow table on disk behind torch's DataLoader, which fetches it by batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.pillow_pictures import resized
from benchmarks.peers.rows import Row

TITLE = "HF datasets"
PACKAGES = ["datasets==5.2.0"]


def prepare(sources: list[Any], folder: Path) -> None:
    from datasets import Dataset, Features, Value

    for number, samples in enumerate(sources):
        is_text = samples.kind == "text"
        table = Dataset.from_dict(
            {"sample": [s.decode() for s in samples] if is_text else list(samples)},
            features=Features({"sample": Value("string" if is_text else "binary")}),
        )
        table.save_to_disk(folder / f"source{number:04d}")


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    from datasets import Image, interleave_datasets, load_from_disk
    from torch.utils.data import DataLoader

    opened = [load_from_disk(folder / f"source{i:04d}") for i in range(row.num_sources)]
    if row.num_sources == 1:
        dataset = opened[0]
    else:
        shares = [1 / row.num_sources] * row.num_sources
        dataset = interleave_datasets(opened, shares, seed=0, stopping_strategy="all_exhausted")
    if row.is_decoded:
        dataset = dataset.cast_column("sample", Image(mode="RGB"))
        if row.image_size is None:
            dataset = dataset.with_format("torch")
        else:
            size = row.image_size

            def resize(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
                return {"sample": [resized(picture, size) for picture in batch["sample"]]}

            dataset = dataset.with_transform(resize)
    if row.group == "hooks":

        def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {"sample": [encoded(text) for text in batch["sample"]]}

        dataset = dataset.with_transform(encode)
    return DataLoader(
        dataset,
        collate_fn=list if row.group == "hooks" else None,
        batch_size=row.batch_size,
        shuffle=True,
        num_workers=row.workers,
        persistent_workers=row.workers > 0,
    )


def samples_of(batch: Any, row: Row) -> Any:
    return [s["sample"] for s in batch] if row.group == "hooks" else batch["sample"]


def lacks(row: Row) -> str:
    return "packs are made beforehand, by other libraries" if row.group == "packed" else ""
