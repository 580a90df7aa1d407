from __future__ import annotations

from typing import Any

import pytest

from energon_lite import (
    MapDataset,
    ShuffleBufferDataset,
    WorkerConfig,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.topology import Stream

from ..helpers import in_file_order, number_of

NUM_TEXTS = 300


def order(dataset: Any) -> list[int]:
    return [number_of(sample) for sample in dataset]


def test_buffer_yields_a_permutation_in_which_samples_move_by_about_its_size(texts) -> None:
    found = order(ShuffleBufferDataset(in_file_order(texts), 50))
    assert sorted(found) == list(range(300))
    moved = [abs(place - number) for place, number in enumerate(found)]
    assert 20 < sum(moved) / len(moved) < 80
    # A sample cannot come before the buffer has read it.
    assert all(number < place + 50 for place, number in enumerate(found))


def test_all_samples_of_a_full_buffer_are_equally_likely_to_come_first(texts) -> None:
    def first(seed: int) -> int:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=seed)
        dataset = ShuffleBufferDataset(in_file_order(texts), 4, worker_config=config)
        return number_of(next(iter(dataset)))

    counts = [0] * 4
    for seed in range(200):
        counts[first(seed)] += 1
    assert min(counts) > 30


def test_order_depends_on_seed_stream_pass_source_and_depth(texts) -> None:
    def picks(seed: int = 0, stream: Any = None, name: str = "a", depth: int = 1) -> Any:
        stream = stream or Stream(0, 1)
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=seed)
        dataset = in_file_order(texts, name=name)
        for _ in range(depth):
            dataset = ShuffleBufferDataset(dataset, 64, worker_config=config)
        run = StreamRun(dataset, stream)
        return tuple(number_of(next(run)) for _ in range(20))

    variants = [
        picks(), picks(seed=1), picks(stream=Stream(0, 1, 1)), picks(name="b"), picks(depth=2),
        picks(stream=Stream(0, 2)), picks(stream=Stream(1, 2)),
    ]  # fmt: skip
    assert picks() == picks()
    assert len(set(variants)) == 7


@pytest.mark.parametrize("size", [None, 0, 1])
def test_no_size_is_no_buffer(texts, size) -> None:
    below = in_file_order(texts)
    dataset = ShuffleBufferDataset(MapDataset(below, lambda sample: sample), size)
    assert order(dataset) == list(range(300))
    assert ShuffleBufferDataset(below, size).config() == below.config()


@pytest.mark.parametrize("size", [5, 8])
def test_state_of_a_larger_buffer_is_refused(texts, size) -> None:
    run = StreamRun(ShuffleBufferDataset(in_file_order(texts), 9), Stream(0, 1))
    next(run)
    other = StreamRun(ShuffleBufferDataset(in_file_order(texts), size), Stream(0, 1))
    with pytest.raises(StateError, match=f"buffers 8 samples, which does not go with size={size}"):
        other.restore(run.snapshot())
