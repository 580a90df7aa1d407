"""The calls of axolotl's and prismatic's classes, and what their code reads of them."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import energon_lite
from energon_lite import SplitModalitySampler

from .shared import distributed, text_lengths

# Other arguments than those that are written down.
MultipackBatchSampler: Any = energon_lite.MultipackBatchSampler
SplitModalityBatchSampler: Any = energon_lite.SplitModalityBatchSampler

LENGTHS = text_lengths(300, 2048)
PAIRS = [(index % 4 > 0, int(length)) for index, length in enumerate(LENGTHS)]


def ordered(seed: int = 1) -> Any:
    return RandomSampler(range(300), generator=torch.Generator().manual_seed(seed))


# Axolotl's.


def test_every_way_to_pass_axolotls_arguments_makes_the_same_sampler() -> None:
    made = [
        MultipackBatchSampler(ordered(), 4, 2048, LENGTHS, 1.0, True),
        MultipackBatchSampler(ordered(), 4, 2048, lengths=LENGTHS, drop_last=True),
        MultipackBatchSampler(ordered(), lengths=LENGTHS, batch_size=4, batch_max_len=2048),
        MultipackBatchSampler(sampler=ordered(), lengths=LENGTHS, batch_size=4, batch_max_len=2048),
        MultipackBatchSampler(
            ordered(), 4, 2048, LENGTHS, 1.0, True, 16, False, 100_000, 200, None, True, "fork"
        ),
    ]
    found = [list(sampler) for sampler in made]
    assert all(batches == found[0] != [] for batches in found)
    assert all(sampler.drop_last for sampler in made)


def test_any_order_of_indices_may_come_first() -> None:
    for order in (range(300), list(range(300)), SequentialSampler(range(300))):
        sampler = MultipackBatchSampler(order, 4, 2048, LENGTHS, sequential=True, drop_last=False)
        assert [i for batch in sampler for pack in batch for i in pack] == list(range(300))


def test_own_call_is_as_before() -> None:
    sampler = MultipackBatchSampler(LENGTHS, 2048, 4)
    assert (sampler.batch_max_len, sampler.batch_size, sampler.drop_last) == (2048, 4, False)
    assert next(iter(inspect.signature(MultipackBatchSampler).parameters)) == "lengths"


@pytest.mark.parametrize(
    ("args", "settings", "message"),
    [
        ((range(3), 4), {"lengths": [1] * 3}, "capacity is missing"),
        ((range(3), 4, 9), {"lengths": [1] * 3, "batch_size": 4}, "multiple values"),
        ((SequentialSampler(range(3)), 4, 9), {}, "pass the arguments of axolotl's class"),
        ((range(3), 4, 9, [1] * 3), {"algin": 8}, "Did you mean 'align'"),
    ],
)
def test_calls_that_are_neither_are_refused(args: Any, settings: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MultipackBatchSampler(*args, **settings)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_attributes_that_axolotls_code_reads_are_those_of_the_yielded_packs(
    rank: int, drop_last: bool
) -> None:
    samplers = [
        MultipackBatchSampler(LENGTHS, 2048, 4, rank=r, world_size=3, drop_last=drop_last, end=end)
        for end in ("split", "drop")
        for r in range(3)
    ]
    for group in (samplers[:3], samplers[3:]):
        sampler = group[rank]
        packs = [pack for each in group for batch in each for pack in batch]
        assert sampler.total_tokens_used == sum(LENGTHS[pack].sum() for pack in packs)
        assert sampler.total_token_slots == len(packs) * 2048
        assert sampler.efficiency() == sampler.total_tokens_used / sampler.total_token_slots
        json.dumps([sampler.total_tokens_used, sampler.total_token_slots])


def test_arguments_without_effect_can_be_read() -> None:
    sampler = MultipackBatchSampler(
        ordered(), 4, 2048, LENGTHS, 0.9, bin_size=50, num_processes=3, sequential=True
    )
    assert (sampler.packing_efficiency_estimate, sampler.num_processes) == (0.9, 3)
    assert (sampler.group_size, sampler.safe_mode, sampler.mp_start_method) == (
        100_000, True, "fork",
    )  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'bins'"):
        _ = sampler.bins


# Prismatic's.


def test_every_way_to_pass_prismatics_arguments_makes_the_same_batches() -> None:
    dataset = range(300)
    made = [
        SplitModalityBatchSampler(PAIRS, 12, num_replicas=2, rank=1, seed=3),
        SplitModalityBatchSampler(dataset, PAIRS, 12, 2, 1, 3, False),
        SplitModalityBatchSampler(
            dataset, PAIRS, global_batch_size=12, num_replicas=2, rank=1, seed=3
        ),
        SplitModalityBatchSampler(
            dataset, modality_lengths=PAIRS, global_batch_size=12, num_replicas=2, rank=1, seed=3
        ),
    ]
    found = [list(sampler) for sampler in made]
    assert all(batches == found[0] != [] for batches in found)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=60),
    st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_indices_of_ranks_make_batches_of_one_group_and_every_sample_comes(
    pairs: list[tuple[bool, int]], world_size: int, per_rank: int, drop_last: bool, epoch: int
) -> None:
    global_batch_size = world_size * per_rank
    samplers = [
        SplitModalitySampler(pairs, pairs, global_batch_size, world_size, rank, drop_last=drop_last)
        for rank in range(world_size)
    ]
    if drop_last and not any(
        sum(group == value for group, _ in pairs) >= global_batch_size for value in (False, True)
    ):
        with pytest.raises(ValueError, match="yields no batch"):
            len(samplers[0])
        return
    for sampler in samplers:
        sampler.set_epoch(epoch)
    ranks = np.array([list(sampler) for sampler in samplers])
    assert {len(sampler) for sampler in samplers} == {ranks.shape[1]}
    assert ranks.size == samplers[0].total_size == samplers[0].num_samples * world_size
    steps = ranks.reshape(world_size, -1, per_rank)
    for step in range(steps.shape[1]):
        assert len({pairs[index][0] for index in steps[:, step].ravel()}) == 1
    if not drop_last:
        assert set(ranks.ravel().tolist()) == set(range(len(pairs)))
        longest = max(length for _, length in pairs)
        assert longest in [pairs[index][1] for index in steps[:, 0].ravel()]


def test_loader_with_indices_has_the_batches_of_the_batch_sampler() -> None:
    sampler = SplitModalitySampler(range(300), PAIRS, 12, num_replicas=2, rank=1)
    dataset: Any = list(range(300))
    loader: Any = DataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=list)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(loader) == len(list(loader))
        assert list(loader) == list(sampler.batches)
        assert all(len({PAIRS[index][0] for index in batch}) == 1 for batch in loader)
    assert (sampler.epoch, sampler.rank, sampler.num_replicas, sampler.seed) == (1, 1, 2, 0)
    state = json.loads(json.dumps(sampler.state_dict(batches_given=4)))
    again = SplitModalitySampler(range(300), PAIRS, 12, num_replicas=2, rank=1)
    again.load_state_dict(state)
    assert list(again) == list(sampler)[24:]


def test_place_of_indices_is_that_of_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=3)
    sampler = SplitModalitySampler(range(300), PAIRS, 12)
    assert (sampler.rank, sampler.num_replicas) == (1, 3)
    assert len(sampler) * 3 == sampler.total_size


def test_dataset_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset has 299 samples, but modality_lengths 300"):
        SplitModalitySampler(range(299), PAIRS, 12, num_replicas=1, rank=0)
