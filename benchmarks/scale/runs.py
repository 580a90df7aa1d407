"""Datasets and loaders that parts have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import write_texts
from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

CAPACITY = 8192
# Log-normal, mean 665, at most a pack.
LENGTHS = np.random.default_rng(0).lognormal(np.log(400), 1.0, 1 << 16).clip(16, CAPACITY)
LENGTHS = LENGTHS.astype(np.int64)
_LENGTHS = LENGTHS.tolist()


class Texts(DefaultTaskEncoder):
    """Packs of texts, by lengths that are drawn by the number of the text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.packing = Packing(CAPACITY, **settings)

    @stateless
    def sample_length(self, sample: Any) -> int:
        found: int = _LENGTHS[int(sample.__key__) % len(_LENGTHS)]
        return found

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> int:
        return len(samples)


def text_set(
    root: Path, num_samples: int = 100_000, num_shards: int = 10, mean_bytes: int = 500
) -> Path:
    """Writes and prepares texts, unless they are there."""
    if not (root / ".nv-meta").exists():
        write_texts(root, num_samples=num_samples, num_shards=num_shards, mean_bytes=mean_bytes)
    return root


def write_blend(file: Path, members: Sequence[dict[str, Any]]) -> Path:
    """Writes a metadataset that blends its members."""
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    file.write_text(json.dumps({**head, "splits": {"train": {"blend": members}}}))
    return file


def open_loader(path: Path, config: dict[str, Any], **settings: Any) -> SavableDataLoader[Any]:
    """Opens a loader; by default of one rank without workers, of batches of 16."""
    worker_config = WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **config})
    defaults = {"batch_size": 16, "shuffle_buffer_size": 1000, "max_samples_per_sequence": 100}
    dataset = get_train_dataset(path, worker_config=worker_config, **{**defaults, **settings})
    return get_savable_loader(dataset)
