"""What hooks cost: random numbers, generators, and re-creating buffered samples."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import TextData
from benchmarks.measure import Entry, Figure
from energon_lite import (
    BatchDataset,
    BucketBatchDataset,
    Buckets,
    DefaultTaskEncoder,
    MapDataset,
    SavableDataset,
    ShuffleBufferDataset,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    stateless,
)
from energon_lite.core import global_generators
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream

RANDOM, LINES = "Random numbers in hooks, batches of 16", "Chunks of 1,000 lines"
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
NUM_SAMPLES = 8000


def encoder(draw: Callable[[], Any], mark: Any = None) -> Any:
    """A task encoder whose `encode_sample` draws."""

    class Drawing(DefaultTaskEncoder[Any, Any, Any, Any]):
        def encode_sample(self, sample: TextSample) -> TextSample:
            draw()
            return sample

        @stateless
        def encode_batch(self, batch: Any) -> int:
            return len(batch.text)

    if mark is not None:
        Drawing.encode_sample = mark(Drawing.encode_sample)  # type: ignore[method-assign]
    return Drawing()


def draw_of_each() -> None:
    random.random()
    np.random.rand()
    torch.rand(())


@pytest.mark.parametrize("is_worker", [True, False])
def test_random_numbers(
    benchmark: Any,
    entries: list[Entry],
    few_texts: TextData,
    monkeypatch: pytest.MonkeyPatch,
    is_worker: bool,
) -> None:
    monkeypatch.setattr(global_generators, "get_worker_info", lambda: is_worker or None)
    encoders = {
        "none": encoder(int, stateless),
        "no mark, nothing drawn": encoder(int),
        "no mark, random.random()": encoder(random.random),
        "no mark, torch, numpy and random": encoder(draw_of_each),
        "restore_seeds=True": encoder(draw_of_each, stateless(restore_seeds=True)),
    }
    runs = {
        name: StreamRun(
            get_train_dataset(
                few_texts.root, batch_size=16, task_encoder=own, worker_config=CONFIG
            ),
            Stream(0, 1),
        )
        for name, own in encoders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}

    def measure() -> None:
        for name, run in runs.items():
            since = time.process_time()
            for _ in range(NUM_SAMPLES // 16):
                next(run)
            times[name].append((time.process_time() - since) / NUM_SAMPLES)

    benchmark.pedantic(measure, rounds=7, warmup_rounds=1)
    place = "in a worker" if is_worker else "in your own process"
    for name in list(runs)[1:]:
        more = [max(0.0, a - b) for a, b in zip(times[name], times["none"], strict=True)]
        goal = 1e-6 if "nothing" in name else None
        entries.append(
            Figure(RANDOM, f"{name}, {place}: more per sample", "µs", more, goal_sec=goal)
        )


@stateless
def lines(chunk: TextSample) -> Iterator[TextSample]:
    """Makes 1,000 samples of one."""
    text = chunk.text
    for i in range(1000):
        yield TextSample(__key__=chunk.__key__, __restore_key__=(), text=text[: 5 + i % 120])


@stateless
def length(line: TextSample) -> int:
    return len(line.text)


@stateless
def listed(samples: list[TextSample]) -> list[str]:
    return [sample.text for sample in samples]


@pytest.mark.parametrize("kind", ["batches of 32", "buckets of 4,096"])
def test_lines_of_chunks(
    benchmark: Any, entries: list[Entry], few_texts: TextData, kind: str
) -> None:
    source = get_train_dataset(few_texts.root, batch_size=None, worker_config=CONFIG)
    below = ShuffleBufferDataset(MapDataset(source, lines), 1000)
    dataset: SavableDataset[Any] = BatchDataset(below, 32, listed)
    if kind.startswith("buckets"):
        buckets = Buckets(max_tokens=4096, window=1000)
        dataset = BucketBatchDataset(below, buckets, listed, sample_length=length)
    run = StreamRun(dataset, Stream(0, 1))
    per_line: list[float] = []
    restoring: list[float] = []

    def measure() -> None:
        num_lines = 0
        since = time.process_time()
        while num_lines < 20_000:
            num_lines += len(next(run))
            state = run.snapshot()
        per_line.append((time.process_time() - since) / num_lines)
        text = state.to_json()
        expected = next(run)
        since = time.perf_counter()
        resumed = StreamRun(dataset, Stream(0, 1))
        resumed.restore(Snapshot.from_json(text))
        first = next(resumed)
        restoring.append(time.perf_counter() - since)
        assert first == expected

    benchmark.pedantic(measure, rounds=5, warmup_rounds=1)
    name = f"shuffle buffer of 1,000, {kind}"
    entries.append(Figure(LINES, f"{name}: CPU per line", "µs", per_line, goal_sec=8e-6))
    entries.append(Figure(LINES, f"{name}: restore, first batch", "ms", restoring, goal_sec=0.2))
