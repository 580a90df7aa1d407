"""Packing inside the pipeline: what a sample costs with everything around the packer."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import write_texts
from benchmarks.measure import Count, Entry, Figure, in_turn, probe
from benchmarks.test_packing import text_lengths
from energon_lite import (
    DefaultTaskEncoder,
    PackedBatch,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

GROUP = "Packs in the pipeline (lognormal lengths, capacity 8,192, buffer 256, 0 workers)"
NUM_SAMPLES, CAPACITY, BATCHES = 20_000, 8192, 600


class Tokens(DefaultTaskEncoder):
    """Encodes each text to the number of tokens in a list; leaves packs as they are."""

    def __init__(self, *, packs: bool) -> None:
        super().__init__()
        self.lengths = text_lengths(NUM_SAMPLES, CAPACITY).tolist()
        self.ids = torch.arange(CAPACITY)
        if packs:
            self.packing = Packing(capacity=CAPACITY)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        length = self.lengths[int(sample.__key__)]
        return {"__key__": sample.__key__, "input_ids": self.ids[:length]}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
        return {"__key__": [sample["__key__"] for sample in samples]}

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"__key__": [sample["__key__"] for sample in samples]}


class Sequences(Tokens):
    """The same with the library's packs and batches."""

    pack_selected_samples = DefaultTaskEncoder.pack_selected_samples
    batch = DefaultTaskEncoder.batch


def running(root: Path, encoder: Any, batch_size: int) -> Any:
    """A loader in the middle of its run."""
    dataset = get_train_dataset(
        root,
        batch_size=batch_size,
        shuffle_buffer_size=1000,
        task_encoder=encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    iterator = iter(get_savable_loader(dataset))
    next(iterator)
    return iterator


def test_packing_stage(benchmark: Any, entries: list[Entry], tmp_path: Path) -> None:
    root = tmp_path / "texts"
    write_texts(root, num_samples=NUM_SAMPLES, num_shards=4)
    mean = float(np.mean(text_lengths(NUM_SAMPLES, CAPACITY)))
    in_pack = round(CAPACITY / mean)
    loaders = {
        "packs": running(root, Tokens(packs=True), 1),
        "batches": running(root, Tokens(packs=False), in_pack),
        "sequences": running(root, Sequences(packs=True), 1),
    }
    found = in_turn(
        benchmark,
        {
            name: lambda loader=loader: [None for _ in islice(loader, BATCHES)]
            for name, loader in loaders.items()
        },
        rounds=5,
    )
    per_sample = {
        name: [seconds / BATCHES / in_pack for seconds in times] for name, times in found.items()
    }
    packing = [a - b for a, b in zip(per_sample["packs"], per_sample["batches"], strict=True)]
    batching = "reading, encoding, listing in fixed batches"
    entries += [
        Figure(GROUP, "packing alone, per sample", "µs", packing, goal_sec=5e-6),
        Figure(
            GROUP, "with packing, per sample", "µs", per_sample["packs"],
            batching, per_sample["batches"],
        ),
        Figure(
            GROUP, f"with packed tensors, per sample of {mean:.0f} tokens", "µs",
            per_sample["sequences"], batching, per_sample["batches"],
        ),
    ]  # fmt: skip
    if "ENERGON_PYTHON" in os.environ:
        python = os.environ["ENERGON_PYTHON"]
        theirs = [probe("energon_packing", root, CAPACITY, python=python) for _ in range(5)]
        entries += [
            Figure(
                GROUP, "with packing, per sample", "µs", per_sample["packs"],
                "Megatron-Energon 7.4, its hooks", [found["sample"] for found in theirs],
            ),
            Count(GROUP, "filled, by Energon's hooks", f"{theirs[0]['filled']:.2%}", ""),
        ]  # fmt: skip
    batches: list[PackedBatch] = list(islice(loaders["sequences"], 200))
    efficiency = sum(batch.efficiency for batch in batches) / len(batches)
    assert efficiency >= 0.9995
    entries.append(Count(GROUP, "filled", f"{efficiency:.4%}", "≥ 99.95 %"))
