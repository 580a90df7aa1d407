"""Packs planned by a length index: full, similar on all ranks, and nothing buffered."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.measure import Count, Entry, Figure, in_turn
from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    stateless,
)
from energon_lite.balance import CostModel, imbalance
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.extras.inspect.draws import draw_packs
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory

GROUP = "Planned packs (documents, median 1,500 tokens, packs of 32,768, 8 streams)"
NUM_SAMPLES, CAPACITY, STREAMS = 200_000, 32_768, 8
COST = CostModel(token=1, token_squared=1 / 24_576)


def document_lengths() -> Any:
    """Log-normal, median 1,500, sigma 1.3, at most a pack."""
    drawn = np.random.default_rng(0).lognormal(np.log(1500), 1.3, NUM_SAMPLES)
    return np.clip(drawn, 1, CAPACITY).astype(np.int64)


class Documents(DefaultTaskEncoder):
    """Encodes each text to the number of tokens in a list; leaves packs as they are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.lengths = document_lengths().tolist()
        self.packing = Packing(CAPACITY, **settings)

    def sample_length(self, sample: TextSample) -> int:
        length: int = self.lengths[int(sample.__key__)]
        return length

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> list[str]:
        return [sample.__key__ for sample in samples]


def dataset_of(root: Path, encoder: Documents) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=STREAMS)
    return get_train_dataset(
        root,
        batch_size=None,
        shuffle_buffer_size=1000,
        task_encoder=encoder,
        worker_config=config,
    )


@pytest.fixture(scope="module")
def documents(many_texts: Any) -> Path:
    root: Path = many_texts.root
    factory = load_factory(root)
    write_lengths(root, factory.split_part, "documents", document_lengths(), factory.data)
    return root


SHARED: dict[str, Any] = {"balance": "global_window", "cost": COST, "lengths": "documents"}


def test_shared_plan(documents: Path, entries: list[Entry]) -> None:
    """The packs of all streams, without reading a sample."""
    for name, settings, goal in (
        ("each stream by itself", {"cost": COST, "lengths": "documents"}, None),
        ("a shared plan, 64 steps", SHARED, 0.01),
    ):
        dataset = dataset_of(documents, Documents(**settings))
        while type(dataset).__name__ != "PlannedPacks":
            dataset = dataset.dataset
        costs, tokens, packs = [], 0, 0
        for index in range(STREAMS):
            drawn = draw_packs(dataset, Stream(index, STREAMS), 1000)
            costs.append(np.bincount(drawn.draws.items, drawn.draws.costs))
            tokens += int(drawn.draws.tokens.sum())
            packs += drawn.num_items
        steps = min(map(len, costs))
        found = float(imbalance(np.stack([own[:steps] for own in costs], axis=1)))
        filled = tokens / packs / CAPACITY
        assert filled > 0.999
        assert goal is None or found <= goal
        entries.append(
            Count(GROUP, f"imbalance, {name}", f"{found:.4f}", f"≤ {goal:g}" if goal else "")
        )
        entries.append(Count(GROUP, f"filled, {name}", f"{filled:.3%}", "≥ 99.9 %"))


def test_time_and_state(documents: Path, benchmark: Any, entries: list[Entry]) -> None:
    """A run with and without a plan, and the time to save and to resume it."""
    runs = {}
    for name, settings in (
        ("streaming", {}),
        ("planned", {"lengths": "documents"}),
        ("shared", SHARED),
    ):
        dataset = dataset_of(documents, Documents(**settings))
        runs[name] = StreamRun(dataset, Stream(0, STREAMS))
        next(runs[name])
    counts: dict[str, list[int]] = {name: [] for name in runs}

    def give(name: str) -> None:
        counts[name].append(sum(len(pack) for pack in islice(runs[name], 600)))

    found = in_turn(benchmark, {name: partial(give, name) for name in runs}, rounds=5)
    per_sample = {
        name: [t / n for t, n in zip(times, counts[name][-len(times) :], strict=True)]
        for name, times in found.items()
    }
    streaming = "packs as samples come, per sample"
    for name, what in (("planned", "planned"), ("shared", "planned for all 8 streams")):
        figure = Figure(
            GROUP, f"{what}, reading included, per sample", "µs", per_sample[name], streaming,
            per_sample["streaming"],
        )  # fmt: skip
        entries.append(figure)
    sizes = {name: len(json.dumps(run.snapshot().to_json())) for name, run in runs.items()}
    text = f"{sizes['planned']:,} and {sizes['shared']:,}, against {sizes['streaming']:,}"
    entries.append(
        Count(GROUP, "bytes of a stream's state: own, shared, and as samples come", text, "")
    )
