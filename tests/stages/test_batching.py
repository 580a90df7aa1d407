from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from energon_lite import BatchDataset, GroupBatchDataset, WorkerConfig, stateless
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.stages.epochs import EpochizeDataset, LimitDataset

from ..helpers import number_of, source_of, text_set

NUM_TEXTS = 10
source = partial(source_of, training=False)


@stateless
def numbers(samples: list[Any]) -> list[int]:
    return [number_of(sample) for sample in samples]


@stateless
def parity(sample: Any) -> tuple[int, None]:
    return number_of(sample) % 2, None


def test_last_batch_is_partial_or_dropped(texts) -> None:
    kept = BatchDataset(source(texts), 4, numbers)
    assert list(kept) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    dropped = BatchDataset(source(texts), 4, numbers, drop_last=True)
    assert list(dropped) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (len(kept), len(dropped)) == (3, 2)


def test_batch_knows_its_slot_and_the_keys_of_its_samples(texts) -> None:
    run = StreamRun(BatchDataset(source(texts, block=2), 2, numbers), Stream(1, 2))
    assert [next(run), next(run)] == [[2, 3], [6, 7]]
    assert run.key == ("batch", 3, ("texts/train", 0, 6, 5), ("texts/train", 0, 7, 7))


def test_groups_are_emitted_when_full_and_at_the_end_in_the_order_they_began(texts) -> None:
    dataset = GroupBatchDataset(source(texts), 3, parity, numbers)
    assert list(dataset) == [[0, 2, 4], [1, 3, 5], [6, 8], [7, 9]]
    dropped = GroupBatchDataset(source(texts), 3, parity, numbers, drop_last=True)
    assert list(dropped) == [[0, 2, 4], [1, 3, 5]]


def test_ends_of_passes_change_neither_config_nor_keys(texts) -> None:
    below = source(texts)
    for dataset in (LimitDataset(below, 3), EpochizeDataset(below, 3)):
        assert dataset.config() == below.config()
        assert len(dataset) == 3
        run = StreamRun(dataset, Stream(0, 1))
        next(run)
        assert dataset.restore_sample(run.key).__key__ == "00000"


def plain_batch(samples: list[Any]) -> list[int]:
    return [number_of(sample) for sample in samples]


@pytest.mark.parametrize("grouped", [False, True])
def test_further_arguments_of_energon_reach_the_batcher(texts, grouped) -> None:
    def make(batcher: Any, **settings: Any) -> Any:
        if grouped:
            return GroupBatchDataset(source(texts), 4, lambda _: (0, None), batcher, **settings)
        return BatchDataset(source(texts), 4, batcher, **settings)

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=7)
    dataset = make(
        plain_batch, batcher_stateless=True, batcher_config={"pad": 0}, failure_tolerance=2,
        worker_config=config,
    )  # fmt: skip
    assert list(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert dataset.can_restore_sample()
    assert dataset.config()["batcher_config"] == {"pad": 0}
    assert (dataset.function.failure_tolerance, dataset.function.seed) == (2, 7)
    assert dataset.worker_config is config
    assert not make(plain_batch).can_restore_sample()
    assert not make(numbers, batcher_stateless=False).can_restore_sample()


def test_state_does_not_grow_with_the_groups_that_were_seen(tmp_path) -> None:
    many = source(text_set(tmp_path / "many", 240))
    dataset = GroupBatchDataset(many, None, lambda sample: (number_of(sample), 1), numbers)
    run = StreamRun(dataset, Stream(0, 1))
    sizes = [len(json.dumps(run.snapshot().to_json())) for _ in run]
    assert len(sizes) == 240
    assert max(sizes) < 2000
    again = StreamRun(dataset, Stream(0, 1))
    again.restore(run.snapshot())
    assert list(again) == []
