from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from energon_lite.extras.samplers import TokenBudgetBatchSampler

from .shared import Steps, steps_of, text_lengths


def ranks(world_size: int, *args: Any, **settings: Any) -> list[TokenBudgetBatchSampler]:
    return [
        TokenBudgetBatchSampler(*args, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def alone(*args: Any, **settings: Any) -> TokenBudgetBatchSampler:
    return ranks(1, *args, **settings)[0]


def test_order_of_an_epoch_is_the_same_in_every_version() -> None:
    # To change it would break the resuming of runs that are under way.
    assert steps_of(ranks(2, [6, 5, 4, 3, 2, 5, 5, 1], max_tokens=10, window=3)) == GOLDEN


GOLDEN: Steps = [[[1, 5], [7, 4, 3]], [[0], [6, 2]]]


def test_little_is_padded() -> None:
    sampler = alone(text_lengths(50_000), max_tokens=16_384)
    assert sampler.padding() < 0.02
    assert sampler.efficiency() > 0.95


def test_without_shuffling_windows_go_from_long_to_short_and_back() -> None:
    sampler = alone([1, 3, 2, 4, 6, 5, 8, 7, 9], batch_size=1, window=3, shuffle=False)
    assert [sampler.lengths[i] for [i] in sampler] == [3, 2, 1, 4, 5, 6, 9, 8, 7]


def test_ranks_of_a_step_have_batches_of_similar_length() -> None:
    lengths = text_lengths(20_000)
    samplers = ranks(8, lengths, batch_size=16, window=10_000)
    assert samplers[0].efficiency() > 0.93
    assert ranks(8, lengths, batch_size=16, window=16)[0].efficiency() < 0.4
    steps = steps_of(samplers)
    longest = [max(lengths[i] for i in step[0]) for step in steps]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.2


def test_batch_size_fn_is_called_once_for_each_length() -> None:
    calls: list[int] = []

    def size(length: int) -> int:
        calls.append(length)
        return 100 // length

    sampler = alone([5, 7, 5, 8, 5], batch_size_fn=size, align=4)
    assert sorted(calls) == [8]
    assert len(sampler) == 1
    assert calls == [8]


def test_steps_stay_together_on_another_number_of_ranks() -> None:
    lengths = text_lengths(5000)
    settings: dict[str, Any] = {"lengths": lengths, "batch_size": 4, "window": 2500}
    first = ranks(8, **settings)[0]
    resumed = ranks(4, **settings)[0]
    resumed.load_state_dict(first.state_dict(batches_given=5))
    assert resumed.efficiency() > 0.9
    assert resumed.state_dict()["num_ranks"] == 8
    resumed.set_epoch(1)
    assert resumed.state_dict()["num_ranks"] == 4


# Faults of infinibatch's bucketed read-ahead, each reproduced there.


def test_regression_windows_are_not_flushed() -> None:
    # Infinibatch's ends each window with a smaller batch: 40 % of these.
    lengths = text_lengths(20_000)
    batches = list(alone(lengths, batch_size=32, window=75))
    assert [len(batch) for batch in batches].count(32) == len(batches) == 625
    wasted = alone(text_lengths(20_000), max_tokens=16_384, window=1000)
    areas = [len(batch) * max(lengths[i] for i in batch) for batch in wasted]
    assert np.mean(areas) > 0.93 * 16_384


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lengths": [6, 7], "max_tokens": 5, "overlong": "drop"},
            "drops all 2. Sample 0: its",
        ),
        ({"lengths": [1, 2], "batch_size": 3, "drop_last": True}, "Use drop_last=False"),
        (
            {"lengths": [1, 2], "batch_size": 2, "end": "drop", "world_size": 2},
            "a step takes 2",
        ),
    ],
)
def test_epochs_without_any_batch_are_a_clear_error(settings: Any, message: str) -> None:
    sampler = ranks(settings.pop("world_size", 1), **settings)[0]
    with pytest.raises(ValueError, match=message):
        len(sampler)
