"""Ranks get equally many batches, every sample once, and accelerate drops none of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler

from energon_lite.extras.samplers import (
    MultipackBatchSampler,
    SplitModalityBatchSampler,
    TokenBudgetBatchSampler,
)

from .laws import indices_of
from .shared import distributed, steps_of, text_lengths

# What accelerate 1.15 does with a batch sampler, as far as it matters here.
ACCELERATE = """
class BatchSamplerShard:
    def __init__(self, batch_sampler, num_processes, process_index, split_batches=False):
        self.batch_sampler, self.split_batches = batch_sampler, split_batches
        self.num_processes, self.process_index = num_processes, process_index
        self.batch_size = batch_sampler.batch_size
        self.drop_last = batch_sampler.drop_last

    def __len__(self):
        return len(self.batch_sampler) // (1 if self.split_batches else self.num_processes)

    def __iter__(self):
        number, index = self.num_processes, self.process_index
        for place, batch in enumerate(self.batch_sampler):
            if self.split_batches:
                yield batch[index * len(batch) // number : (index + 1) * len(batch) // number]
                continue
            if place % number == index:
                kept = batch
            if place % number == number - 1 and self.batch_size in (None, len(batch)):
                yield kept
"""


@pytest.fixture(autouse=True)
def shard() -> Iterator[Any]:
    """A stand-in for accelerate's class, so that these tests need no accelerate."""
    module = ModuleType("accelerate.data_loader")
    exec(ACCELERATE, module.__dict__)
    before = sys.modules.get("accelerate.data_loader")
    sys.modules["accelerate.data_loader"] = module
    yield module.BatchSamplerShard
    del sys.modules["accelerate.data_loader"]
    if before is not None:
        sys.modules["accelerate.data_loader"] = before


def made(kind: str, lengths: Any, **place: int) -> Any:
    if kind == "modality":
        pairs = [(index % 3 > 0, int(length)) for index, length in enumerate(lengths)]
        return SplitModalityBatchSampler(pairs, 12, **place)
    if kind == "tokens":
        return TokenBudgetBatchSampler(lengths, max_tokens=300, window=40, **place)
    if kind == "of_five":
        return TokenBudgetBatchSampler(lengths, batch_size=5, window=40, **place)
    return MultipackBatchSampler(lengths, 100, 3, drop_last=kind == "multipack_full", **place)


KINDS = ("multipack", "multipack_full", "modality", "tokens", "of_five")
LENGTHS = text_lengths(150, 1980) // 20 + 1


def check_once(batches: Any, num: int) -> None:
    assert sorted(indices_of(batches)) == list(range(num))


# Batches are cut so that each rank gets as many.


def test_too_few_samples_to_cut_are_repeated_or_dropped_and_counted() -> None:
    lengths = [10] * 13
    sampler = MultipackBatchSampler(lengths, 10, 2, rank=0, world_size=4)
    assert sampler.num_repeated == 3
    sampler = MultipackBatchSampler(lengths, 10, 2, rank=0, world_size=4, drop_last=True)
    assert sampler.num_dropped == 5


# Where accelerate shards the batches.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accelerate_passes_each_process_what_its_rank_has_without(
    kind: str, world_size: int, shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, alone = [], []
    for rank in range(world_size):
        distributed(monkeypatch, rank=rank, world_size=world_size)
        shards.append(shard(made(kind, LENGTHS), world_size, rank))
        alone.append(made(kind, LENGTHS))
        for epoch in range(2):
            shards[-1].batch_sampler.sampler.set_epoch(epoch)
            alone[-1].set_epoch(epoch)
            assert len(shards[-1]) == len(alone[-1])
            assert list(shards[-1]) == list(alone[-1])
    assert set(indices_of(steps_of(shards))) == set(range(150))


def test_sampler_made_before_the_processes_know_each_other_learns_of_them(shard: Any) -> None:
    samplers = [MultipackBatchSampler(LENGTHS, 100, 3) for _ in range(2)]
    assert {len(sampler) for sampler in samplers} == {len(list(samplers[0]))}
    check_once([list(shard(sampler, 2, rank)) for rank, sampler in enumerate(samplers)], 150)
    assert [(sampler.rank, sampler.world_size) for sampler in samplers] == [(0, 2), (1, 2)]


def test_state_under_accelerate_counts_the_batches_of_a_process(shard: Any) -> None:
    sampler = MultipackBatchSampler(LENGTHS, 100, 3)
    sharded = shard(sampler, 2, 1)
    whole = list(sharded)
    iterator = iter(sharded)
    for _ in range(4):
        next(iterator)
    assert sampler.state_dict() == sampler.state_dict(batches_given=4)
    again = MultipackBatchSampler(LENGTHS, 100, 3)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    resumed = shard(again, 2, 1)
    assert len(resumed) == len(whole) - 4
    assert list(resumed) == whole[4:]


def test_split_batches_cuts_batches_of_all_processes(shard: Any) -> None:
    samplers: list[Callable[[], Any]] = [
        lambda: MultipackBatchSampler(LENGTHS, 100, 4),
        lambda: SplitModalityBatchSampler(
            [(i % 3 > 0, int(n)) for i, n in enumerate(LENGTHS)], 10, rank=0, num_replicas=1
        ),
    ]
    for make in samplers:
        shards = [shard(make(), 2, rank, split_batches=True) for rank in range(2)]
        steps = steps_of(shards)
        assert sorted(indices_of(steps)) == list(range(150))
        assert len({len(batch) for step in steps for batch in step}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_rank_and_world_size_are_refused_where_accelerate_shards_again(
    kind: str, shard: Any
) -> None:
    place = {"rank": 1, "world_size": 2}
    sharded = shard(made(kind, LENGTHS, **place), 2, 1)
    with pytest.raises(ValueError, match=r"accelerate shards .* to 2 processes.*Omit rank"):
        next(iter(sharded))
    with pytest.raises(ValueError, match="accelerate shards"):
        len(sharded)


def test_modalities_of_batches_for_another_number_of_processes_are_refused(shard: Any) -> None:
    with pytest.raises(ValueError, match=r"made for 1, with 12 samples in a batch\. Make it after"):
        list(shard(made("modality", LENGTHS), 2, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_sees_no_batch_size_as_it_would_count_samples_by_it(
    kind: str, shard: Any
) -> None:
    sampler = made(kind, LENGTHS)
    assert shard(sampler, 2, 0).batch_size is None
    assert sampler.batch_size == {"modality": 12, "tokens": None, "of_five": None}.get(kind, 3)
    assert shard(sampler, 2, 0, split_batches=True).batch_size == sampler.batch_size


# The order of a sampler, which must be the same on all ranks.


def order_settings(sampler: Any, **settings: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(
        sampler=sampler, lengths=LENGTHS, batch_max_len=100, batch_size=2, **settings
    )


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(150)), SubsetRandomSampler(range(150))], ids=["all", "some"]
)
def test_order_that_each_rank_would_draw_differently_is_refused(
    sampler: Any, shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "Each of 2 processes would draw another order.*generator=torch.Generator"
    with pytest.raises(ValueError, match=message):
        order_settings(sampler, rank=0, world_size=2)
    with pytest.raises(ValueError, match=message):
        list(shard(order_settings(sampler), 2, 0))
    unprepared = order_settings(sampler)
    distributed(monkeypatch, rank=1, world_size=2)
    with pytest.raises(ValueError, match=message):
        list(unprepared)


def test_generator_that_accelerate_puts_in_does_not_make_an_order_equal(shard: Any) -> None:
    order = RandomSampler(range(150))
    sampler = order_settings(order)
    order.generator = torch.Generator()  # as accelerate does, with a seed of this process
    with pytest.raises(ValueError, match="would draw another order"):
        list(shard(sampler, 2, 0))


def test_seeded_random_sampler_yields_every_sample_once_and_another_order_each_epoch(
    shard: Any,
) -> None:
    shards = [
        shard(
            order_settings(
                RandomSampler(range(150), generator=torch.Generator().manual_seed(3))
            ), 2, rank,
        )
        for rank in range(2)
    ]  # fmt: skip
    epochs = []
    for epoch in range(2):
        for sharded in shards:
            sharded.batch_sampler.sampler.set_epoch(epoch)
        epochs.append(steps_of(shards))
        check_once(epochs[-1], 150)
    assert epochs[0] != epochs[1]


class Seedable:
    """As accelerate's sampler of this kind: it has an epoch, and increments it itself."""

    def __init__(self) -> None:
        self.epoch, self.initial_seed, self.generator = 0, 5, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(150).tolist()
        self.epoch += 1


def test_sampler_that_accelerate_puts_in_is_followed_through_its_epochs(shard: Any) -> None:
    sampler = order_settings(RandomSampler(range(150)))
    seedable = Seedable()
    sampler.sampler = seedable
    sharded = shard(sampler, 2, 0)
    found = []
    for epoch in (0, 0, 1):
        seedable.set_epoch(epoch)
        found.append((len(sharded), list(sharded)))
    assert found[0] == found[1] != found[2]
    assert sampler.epoch == seedable.epoch == 1


def test_distributed_sampler_shards_twice_and_is_refused() -> None:
    with pytest.raises(TypeError, match="yields other samples on each of 2 ranks"):
        order_settings(DistributedSampler(range(150), num_replicas=2, rank=0))


@pytest.mark.parametrize("kind", ["multipack", "modality", "tokens"])
def test_sampler_that_lightning_puts_in_is_refused_with_the_remedy(kind: str) -> None:
    order: Any = DistributedSampler(range(150), num_replicas=2, rank=0)
    made_of: Any
    made_of, settings, lengths = {
        "modality": (SplitModalityBatchSampler, {"global_batch_size": 12}, [(True, 5)] * 150),
        "tokens": (TokenBudgetBatchSampler, {"batch_size": 5}, LENGTHS),
        "multipack": (MultipackBatchSampler, {"capacity": 100}, LENGTHS),
    }[kind]
    with pytest.raises(TypeError, match=r"Trainer\(use_distributed_sampler=False\)"):
        made_of(lengths, sampler=order, **settings)
    if not issubclass(made_of, MultipackBatchSampler):
        with pytest.raises(TypeError, match="orders samples itself"):
            made_of(lengths, sampler=RandomSampler(range(150)), **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_meet_after_the_sampler_was_made_get_their_parts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers = [made(kind, LENGTHS) for _ in range(2)]
    lengths, batches = [], []
    for rank, sampler in enumerate(samplers):
        distributed(monkeypatch, rank=rank, world_size=2)
        lengths.append(len(sampler))
        batches.append(list(sampler))
        assert batches[-1] == list(made(kind, LENGTHS))
    assert lengths == [len(rows) for rows in batches] == [lengths[0]] * 2
    assert set(indices_of(batches)) == set(range(150))


def test_place_that_only_the_environment_has_in_part_is_refused_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Lightning starts further processes so, and makes their process group in fit().
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    sampler = MultipackBatchSampler(LENGTHS, 100, 3)
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        list(sampler)
    distributed(monkeypatch, rank=1, world_size=2)
    assert len(list(sampler)) == len(sampler)
    assert (sampler.rank, sampler.world_size) == (1, 2)


def test_all_batches_on_every_process_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    distributed(monkeypatch, rank=1, world_size=2)
    sampler = order_settings(range(150))
    assert len(sampler) > 1
    assert not caplog.records, "len() is asked before a loader is prepared"
    list(sampler)
    assert "each of 2 processes gets all batches" in caplog.text
