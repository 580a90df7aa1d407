"""What all examples here share: a small set of texts, a model, and loaders of this rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from energon_lite import (
    Batch,
    DefaultTaskEncoder,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
    stateless,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draw_data import text_samples, write_shards


class Encoder(DefaultTaskEncoder):
    """Makes input of the model: tokens are bytes, padded."""

    @stateless
    def encode_batch(self, batch: Batch) -> dict[str, Any]:
        tokens = torch.zeros(len(batch.text), 64, dtype=torch.long)
        for row, text in zip(tokens, batch.text, strict=True):
            line = torch.tensor(list(text.encode()[:64]))
            row[: len(line)] = line
        return {"tokens": tokens, "keys": batch.__key__}


class Model(nn.Module):
    """Guesses each byte from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))

    def forward(self, tokens: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.layers(tokens[:, :-1]).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())}


def draw_data(folder: Path) -> Path:
    """Writes 240 texts as shards into `folder / "texts"`, once, and prepares them."""
    texts = folder / "texts"
    if not (texts / ".nv-meta").exists():
        write_shards(texts, text_samples(240), samples_per_shard=30)
        prepare_dataset(
            texts, split_ratio="7,1", sample_type="TextSample", field_map={"text": "txt"}
        )
    return texts


def make_train_loader(
    texts: Path, *, group: Any = None, num_workers: int = 2, **settings: Any
) -> SavableDataLoader[dict[str, Any]]:
    """The batches of this process, which finds its place in the run by itself."""
    # The number of streams: a multiple of all numbers of ranks that the run may have.
    config = WorkerConfig.default_worker_config(num_workers, group, num_streams=12)
    settings = {"shuffle_buffer_size": 100, "task_encoder": Encoder(), **settings}
    dataset = get_train_dataset(texts, batch_size=4, worker_config=config, **settings)
    return get_savable_loader(dataset)


def report(trainer: str, found: list[list[str]], expected: list[list[str]]) -> None:
    """Prints whether the resumed steps had the samples that the unbroken run had."""
    assert expected, "nothing to compare"
    assert found == expected, f"{trainer}: the resumed run had other samples"
    print(f"{trainer}: {len(expected)} steps after the resume have the samples of the unbroken run")
