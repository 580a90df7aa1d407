"""Samples per second of text, and what snapshots take of it."""

from __future__ import annotations

import itertools
import os
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.baselines import (
    open_shards,
    shuffled_places,
    text_batches,
    text_batches_at,
    typed_batches,
)
from benchmarks.conftest import TextData
from benchmarks.measure import Entry, Figure, in_turn, probe
from energon_lite import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream

BATCH = 32
LOOP = "mmap loop, file order"
SHUFFLED_LOOP = "mmap loop, random order"
TYPED_LOOP = "mmap loop that makes typed samples"
GROUP = "200,000 texts of 500 B, batches of 32"


def training_set(data: TextData, shuffle_buffer_size: int = 100, num_workers: int = 0) -> Any:
    return get_train_dataset(
        data.root,
        batch_size=BATCH,
        shuffle_buffer_size=shuffle_buffer_size,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
    )


def check_batch(batch: Any, data: TextData) -> None:
    """What is measured is the real thing: typed, with keys, restore keys, sources and text."""
    assert type(batch).__name__ == "TextSample"
    assert len(batch.text) == len(set(batch.__key__)) == BATCH
    assert batch.text == [data.texts[key] for key in batch.__key__]
    assert [source.file_names for (source,) in batch.__sources__] == [
        (f"{key}.txt",) for key in batch.__key__
    ]
    assert batch.__restore_key__[0] == "batch"
    assert len(batch.__restore_key__) == 2 + BATCH


def taking(batches: Iterator[Any], count: int) -> Callable[[], None]:
    """A function that takes the next `count` batches."""

    def take() -> None:
        for _ in itertools.islice(batches, count):
            pass

    return take


def going_through(make: Callable[[], Iterator[Any]]) -> Callable[[], None]:
    """A function that goes through a pass."""

    def go() -> None:
        for _ in make():
            pass

    return go


def per_sample(seconds: list[float], num_samples: int) -> list[float]:
    return [value / num_samples for value in seconds]


@pytest.mark.parametrize(
    ("name", "window", "num_workers"),
    [
        ("training, window 100", 100, 0),
        ("training, window 1,000", 1000, 0),
        ("training, window 100, 2 workers", 100, 2),
    ],
)
def test_training_batches(
    benchmark: Any,
    entries: list[Entry],
    many_texts: TextData,
    name: str,
    window: int,
    num_workers: int,
) -> None:
    shards = open_shards(many_texts.root)
    batches = iter(get_loader(training_set(many_texts, window, num_workers)))
    for batch in itertools.islice(batches, 20):
        check_batch(batch, many_texts)
    num_samples = len(many_texts.texts)
    functions = {
        "ours": taking(batches, num_samples // BATCH),
        LOOP: going_through(lambda: text_batches(shards, BATCH)),
    }
    is_main = window == 100 and num_workers == 0
    if is_main:
        places = shuffled_places(shards)
        root = str(many_texts.root)
        functions[SHUFFLED_LOOP] = going_through(lambda: text_batches_at(places, BATCH))
        functions[TYPED_LOOP] = going_through(lambda: typed_batches(shards, BATCH, root))
    found = in_turn(benchmark, functions, rounds=5)
    ours, *loops = (per_sample(times, num_samples) for times in found.values())
    for reference, loop in zip(list(found)[1:], loops, strict=True):
        goal = 4.0 if is_main and reference == LOOP else None
        entries.append(Figure(GROUP, name, "/s", ours, reference, loop, goal_ratio=goal))


def test_validation_batches(benchmark: Any, entries: list[Entry], many_texts: TextData) -> None:
    shards = open_shards(many_texts.root)
    dataset = get_val_dataset(
        many_texts.root,
        split_part="train",
        batch_size=BATCH,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    loader = get_loader(dataset)
    for batch in itertools.islice(loader, 20):
        check_batch(batch, many_texts)
    found = in_turn(
        benchmark,
        {
            "ours": going_through(lambda: iter(loader)),
            "loop": going_through(lambda: text_batches(shards, BATCH)),
        },
        rounds=5,
    )
    ours, loop = (per_sample(found[k], len(many_texts.texts)) for k in found)
    entries.append(Figure(GROUP, "validation, file order", "/s", ours, LOOP, loop))


@pytest.mark.skipif("ENERGON_PYTHON" not in os.environ, reason="ENERGON_PYTHON is not set")
def test_megatron_energon(entries: list[Entry], many_texts: TextData) -> None:
    ours, theirs = [], []
    take = taking(iter(get_loader(training_set(many_texts))), 2000)
    for round_index in range(4):
        theirs.append(probe("energon", many_texts.root, python=os.environ["ENERGON_PYTHON"]))
        start = time.perf_counter()
        take()
        if round_index:
            ours.append((time.perf_counter() - start) / (2000 * BATCH))
    times = [found["sample"] for found in theirs[1:]]
    entries.append(
        Figure(GROUP, "training, window 100", "/s", ours, "Megatron-Energon, the same", times)
    )


def test_snapshot_of_every_batch(
    benchmark: Any,
    entries: list[Entry],
    many_texts: TextData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Takes turns every 1,024 samples, as the cost is far below the noise between two passes."""
    batches = iter(get_loader(training_set(many_texts)))
    turn = 1024 // BATCH
    take = taking(batches, turn)
    taking(batches, 32 * turn)()
    with_snapshots: list[float] = []
    without: list[float] = []

    def measure() -> None:
        for number in range(200):
            order = [(StreamRun.snapshot, with_snapshots), (lambda run: None, without)]
            for snapshot, times in order if number % 2 else reversed(order):
                with monkeypatch.context() as patch:
                    patch.setattr(StreamRun, "snapshot", snapshot)
                    start = time.perf_counter()
                    take()
                    times.append((time.perf_counter() - start) / 1024)

    benchmark.pedantic(measure, rounds=3)
    assert len(with_snapshots) == len(without) >= 200
    group = "Snapshots and state"
    entries.append(
        Figure(
            group, "a snapshot of every batch", "/s", with_snapshots,
            "no snapshots", without, goal_ratio=1.02,
        )
    )  # fmt: skip

    run = StreamRun(training_set(many_texts), Stream(0, 1))
    next(run)
    alone = [seconds / 10_000 for seconds in timeit.repeat(run.snapshot, number=10_000, repeat=7)]
    batch = [BATCH * seconds for seconds in without[: len(alone)]]
    entries.append(Figure(group, "StreamRun.snapshot()", "µs", alone, "computing the batch", batch))
