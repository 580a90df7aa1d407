from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from energon_lite import BatchDataset, GroupBatchDataset, WorkerConfig, stateless
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.batching import BatchLists
from energon_lite.stages.epochs import EpochizeDataset, LimitDataset

from ..helpers import number_of, text_set

NUM_TEXTS = 10
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def source(texts: Path, **settings: Any) -> Any:
    factory = load_factory(texts, split_part="train", training=False, worker_config=CONFIG)
    return factory.build(**settings)


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
    assert next(run) == [2, 3]
    assert next(run) == [6, 7]
    assert run.key == ("batch", 3, ("texts/train", 0, 6, 5), ("texts/train", 0, 7, 7))


def test_groups_are_emitted_when_full_and_at_the_end_in_the_order_they_began(texts) -> None:
    dataset = GroupBatchDataset(source(texts), 3, parity, numbers)
    assert list(dataset) == [[0, 2, 4], [1, 3, 5], [6, 8], [7, 9]]
    dropped = GroupBatchDataset(source(texts), 3, parity, numbers, drop_last=True)
    assert list(dropped) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("size", [0, -1])
def test_senseless_sizes_are_refused(texts, size) -> None:
    with pytest.raises(ValueError, match=f"batch_size={size} must be at least 1"):
        BatchDataset(source(texts), size, numbers)
    with pytest.raises(ValueError, match=f"length={size} must be at least 1"):
        LimitDataset(source(texts), size)


def test_senseless_size_of_a_group_is_refused(texts) -> None:
    dataset = GroupBatchDataset(source(texts), None, lambda sample: (0, 0), numbers)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        list(dataset)


def test_generator_cannot_batch_groups(texts) -> None:
    def batch(samples: Any) -> Any:
        yield samples

    with pytest.raises(ValueError, match="is a generator; with groups `batch` must not"):
        GroupBatchDataset(source(texts), 2, parity, batch)


def test_key_of_another_stage_is_refused(texts) -> None:
    with pytest.raises(ValueError, match="is not the restore key of a batch"):
        BatchLists(source(texts), 2).restore_sample(("texts/train", 0, 1, 1))


def test_two_ends_of_a_pass_are_refused(texts) -> None:
    limited = LimitDataset(source(texts), 3)
    for kind in (LimitDataset, EpochizeDataset):
        with pytest.raises(ValueError, match="give one virtual epoch or limit"):
            kind(limited, 2)


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


def plain_group(sample: Any) -> tuple[int, None]:
    return 0, None


@pytest.mark.parametrize("grouped", [False, True])
def test_further_arguments_of_energon_reach_the_batcher(texts, grouped) -> None:
    def make(batcher: Any, **settings: Any) -> Any:
        if grouped:
            return GroupBatchDataset(source(texts), 4, plain_group, batcher, **settings)
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
    with pytest.raises(TypeError, match=r"^batcher_config=.* JSON-serialisable"):
        make(plain_batch, batcher_config={"pad": object()})


def test_state_does_not_grow_with_the_groups_that_were_seen(tmp_path) -> None:
    many = source(text_set(tmp_path / "many", 240))
    dataset = GroupBatchDataset(many, None, lambda sample: (number_of(sample), 1), numbers)
    run = StreamRun(dataset, Stream(0, 1))
    sizes = []
    for _ in range(240):
        next(run)
        sizes.append(len(json.dumps(run.snapshot().to_json())))
    assert max(sizes) < 2000
    again = StreamRun(dataset, Stream(0, 1))
    again.restore(run.snapshot())
    assert list(again) == []
