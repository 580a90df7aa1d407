from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from energon_lite.balance import CostModel, imbalance
from energon_lite.extras.samplers import MultipackBatchSampler

from .shared import distributed, text_lengths


def ranks(world_size: int, *args: Any, **settings: Any) -> list[MultipackBatchSampler]:
    return [
        MultipackBatchSampler(*args, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def test_order_of_an_epoch_is_the_same_in_every_version() -> None:
    # To change it would break the resuming of runs that are under way.
    sampler = MultipackBatchSampler([6, 5, 4, 3, 2, 5, 5], 10, 2, algorithm="first_fit_decreasing")
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    assert found == [
        [[[0, 2], [5, 1]], [[6, 3, 4]]],
        [[[0, 2], [5, 6]], [[1, 3, 4]]],
    ]


def test_flatten_makes_one_list_of_indices_for_a_batch() -> None:
    nested, flat = (
        list(MultipackBatchSampler(text_lengths(50), 4096, 2, flatten=flatten))
        for flatten in (False, True)
    )
    assert flat == [[i for pack in batch for i in pack] for batch in nested]


def test_overlong_sample_alone_keeps_its_place_in_a_sequence() -> None:
    sampler = MultipackBatchSampler(
        [4, 4, 30, 5, 5], 10, algorithm="sequential", overlong="alone", shuffle=False
    )
    assert list(sampler) == [[[0, 1]], [[2]], [[3, 4]]]
    assert sampler.num_overlong == 1
    assert sampler.efficiency() == 48 / 50


@pytest.mark.parametrize(("capacity", "batch_size"), [(4096, 1), (8192, 3)])
def test_balanced_packs_cost_about_the_same_on_all_ranks(capacity: int, batch_size: int) -> None:
    lengths = text_lengths(20_000, capacity)
    cost = CostModel(token=1, token_squared=1 / 24_576)
    found = []
    for settings in ({}, {"balance": "global_window", "balance_window": 16, "cost": cost}):
        samplers = ranks(8, lengths, capacity, batch_size, **settings)
        costs = [
            [sum(cost.combine(lengths[p].sum(), (lengths[p] ** 2).sum()) for p in b) for b in s]
            for s in samplers
        ]
        found.append(imbalance(np.array(costs).T))
        assert samplers[0].num_repeated == samplers[0].num_dropped == 0
    assert found[1] < found[0] / 3


def test_resources_have_a_limit_each_in_any_order_of_the_columns() -> None:
    tokens, tiles = text_lengths(500), np.arange(500) % 7
    capacity = {"tiles": 9, "tokens": 4096}
    expected = list(MultipackBatchSampler({"tokens": tokens, "tiles": tiles}, capacity))
    assert list(MultipackBatchSampler(np.stack([tiles, tokens], axis=1), capacity)) == expected
    packs = [pack for batch in expected for pack in batch]
    assert max(tiles[pack].sum() for pack in packs) <= 9 < max(len(pack) for pack in packs)
    assert max(tokens[pack].sum() for pack in packs) <= 4096


def test_sample_above_one_of_several_limits_is_alone() -> None:
    lengths = {"tokens": [3, 3, 3], "tiles": [6, 0, 1]}
    sampler = MultipackBatchSampler(lengths, {"tokens": 10, "tiles": 4}, overlong="alone")
    assert sorted(sorted(pack) for batch in sampler for pack in batch) == [[0], [1, 2]]
    assert sampler.num_overlong == 1


# Axolotl's way to call it.


def test_defaults_with_a_sampler_are_axolotls() -> None:
    sampler = MultipackBatchSampler(
        sampler=SequentialSampler(range(999)), lengths=np.ones(999, int), batch_max_len=500
    )
    assert sampler.drop_last
    assert sampler.settings.algorithm == "best"
    assert max(len(pack) for batch in sampler for pack in batch) == 200


def test_random_sampler_is_drawn_once_for_each_epoch() -> None:
    lengths = text_lengths(500)
    sampler = MultipackBatchSampler(
        sampler=RandomSampler(range(500)), lengths=lengths, batch_max_len=4096
    )
    first = (len(sampler), list(sampler))
    assert first == (len(sampler), list(sampler))
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler))
    assert list(sampler) != first[1]


def test_samplers_own_epoch_is_set() -> None:
    order = DistributedSampler(range(40), num_replicas=1, rank=0)
    sampler = MultipackBatchSampler(sampler=order, lengths=[4] * 40, batch_max_len=10)
    first = list(sampler)
    sampler.set_epoch(3)
    assert order.epoch == 3
    assert list(sampler) != first


def test_with_a_sampler_every_rank_has_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=4)
    sampler = MultipackBatchSampler(sampler=range(8), lengths=[3] * 8, batch_max_len=6)
    assert (sampler.rank, sampler.world_size) == (0, 1)


# Faults of axolotl's and imoneoi's samplers, each reproduced there.


def test_regression_overlong_sample_does_not_silently_overfill_a_pack() -> None:
    with pytest.raises(ValueError, match=r"Sample 1: .*3000.*takes .*2048.*overlong='drop'"):
        MultipackBatchSampler(sampler=range(2), lengths=[100, 3000], batch_max_len=2048)
    with pytest.raises(ValueError, match=r"takes {'tokens': 64}"):
        MultipackBatchSampler([64, 65], 100, align=64)


@pytest.mark.parametrize("sequential", [False, True])
def test_regression_drop_last_with_few_packs_is_a_clear_error(sequential: bool) -> None:
    # Axolotl's raised IndexError.
    sampler = MultipackBatchSampler(
        sampler=range(3), lengths=[9] * 3, batch_size=5, batch_max_len=10, sequential=sequential
    )
    with pytest.raises(ValueError, match=r"make 3 packs, and a step takes 5 .*Use drop_last=False"):
        len(sampler)


def test_regression_length_is_that_of_the_new_epoch() -> None:
    # An order that packs badly first: 6 packs of long and short, then 8.
    class Orders:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([0, 1, 2, 3] if self.epoch == 0 else [0, 2, 1, 3])

    sampler = MultipackBatchSampler(
        sampler=Orders(), lengths=[6, 6, 4, 4], batch_max_len=10, sequential=True
    )
    found = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        found.append((len(sampler), len(list(sampler))))
    assert found == [(3, 3), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ([], ValueError, "yields no index"),
        ([0, 2], ValueError, "yields index 2, but there are 2 lengths"),
        ([-1], ValueError, "yields index -1"),
        ([[0], [1]], TypeError, "integer"),
    ],
)
def test_wrong_orders_are_refused(sampler: Any, error: type[Exception], message: str) -> None:
    multipack = MultipackBatchSampler([1, 1], 5, sampler=sampler)
    with pytest.raises(error, match=message):
        len(multipack)


def test_nothing_but_overlong_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"drops all 2\. Sample 0: .*6.*takes .*5"):
        len(MultipackBatchSampler([6, 7], 5, overlong="drop"))
