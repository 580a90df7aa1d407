"""Items of one input of a generator hook are made again together, whatever stage holds them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BucketBatchDataset,
    Buckets,
    GroupBatchDataset,
    MapDataset,
    ModalitySplit,
    PackedSamplesOutput,
    Packing,
    PackingDataset,
    SavableDataset,
    ShuffleBufferDataset,
    SplitModalityBatchDataset,
    TextSample,
    sample_rng,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.stream_context import Again
from energon_lite.core.topology import Stream

from ..helpers import assert_same, number_of, source_of

NUM_CHUNKS, NUM_LINES = 12, 20
RUNS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def chunks(text_sets) -> Path:
    return text_sets(NUM_CHUNKS)


@stateless
def lines(chunk: TextSample) -> Iterator[TextSample]:
    RUNS[chunk.__key__] += 1
    for i in range(NUM_LINES):
        yield TextSample.derive_from(chunk, text=f"{chunk.__key__} {i} {sample_rng().random()}")


def length(line: TextSample) -> int:
    return 3 + len(line.text) % 7


def parity(line: TextSample) -> int:
    return number_of(line) % 2


@stateless
def listed(samples: list[TextSample]) -> list[str]:
    return [sample.text for sample in samples]


def select(samples: list[TextSample]) -> PackedSamplesOutput:
    half = max(2, len(samples) // 4 * 2)
    return PackedSamplesOutput([samples[i : i + 2] for i in range(0, half, 2)], samples[half:])


PACKING = Packing(capacity=40, buffer_size=30)
BALANCED = Packing(
    capacity=40, buffer_size=30, balance="quantile_sync", balance_window=4, cost=CostModel(1.0)
)
SPLIT = ModalitySplit(parity, shares={0: 1, 1: 1}, max_surplus=0.9, window=8)

STAGES: dict[str, Callable[[SavableDataset[Any]], SavableDataset[Any]]] = {
    "shuffle buffer": lambda below: ShuffleBufferDataset(below, 50),
    "groups": lambda below: GroupBatchDataset(below, 30, lambda s: (parity(s), None), listed),
    "buckets": lambda below: BucketBatchDataset(
        below, Buckets(max_tokens=40, window=40), listed, sample_length=length
    ),
    "packs": lambda below: PackingDataset(below, None, PACKING, listed, sample_length=length),
    "balanced packs": lambda below: PackingDataset(
        below, None, BALANCED, listed, sample_length=length
    ),
    "selected packs": lambda below: PackingDataset(below, 30, select, listed),
    "modality": lambda below: SplitModalityBatchDataset(
        below, SPLIT, 4, listed, sample_length=length
    ),
}


def stream_of(stage: str, root: Path) -> StreamRun[Any]:
    source = source_of(root, repeat=True)
    return StreamRun(STAGES[stage](MapDataset(source, lines)), Stream(0, 1))


@pytest.mark.parametrize("stage", STAGES)
def test_each_input_is_expanded_once_for_all_buffered_items(chunks: Path, stage: str) -> None:
    run = stream_of(stage, chunks)
    for _ in range(17):
        next(run)
    state = json.dumps(run.snapshot().to_json())
    RUNS.clear()
    expected = [next(run) for _ in range(30)]
    unbroken = Counter(RUNS)
    resumed = stream_of(stage, chunks)
    RUNS.clear()
    resumed.restore(Snapshot.from_json(json.loads(state)))
    assert_same([next(resumed) for _ in range(30)], expected)
    more = RUNS - unbroken
    assert more
    # Once for what a stage holds, and once for the input of the hook inside which the run stood.
    assert max(more.values()) <= 2 + (stage == "balanced packs")  # which has two buffers


def test_item_is_recreated_though_a_sibling_fails_now(chunks: Path) -> None:
    fails_at = 99

    @stateless
    def failing(chunk: TextSample) -> Iterator[TextSample]:
        for i in range(NUM_LINES):
            if i == fails_at:
                raise ValueError("no such line")
            yield TextSample.derive_from(chunk, text=f"{i}")

    source = source_of(chunks, repeat=True)
    dataset = ShuffleBufferDataset(MapDataset(source, failing), 15)
    run = StreamRun(dataset, Stream(0, 1))
    keys = []
    for _ in range(3):
        next(run)
        keys.append(run.key)
    again = Again(dataset.restore_sample, keys)
    first, *_, last = sorted(keys, key=lambda key: key[1])
    fails_at = last[1]
    assert again(first).text == str(first[1])
    with pytest.raises(ValueError, match="no such line"):
        again(last)
    fails_at = 99
    assert again(last).text == str(last[1])
    assert again(last).text == str(last[1])  # any number of times
