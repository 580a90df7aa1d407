from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite.balance import efficiency, idle_share, imbalance, pad_ratio
from energon_lite.batching.lists import Lists

STEPS = [[10, 10], [0, 4], [3, 3]]


def test_imbalance_counts_every_step_the_same() -> None:
    assert imbalance(STEPS) == pytest.approx((0 + 0.5 + 0) / 3)


def test_idle_share_counts_long_steps_for_more() -> None:
    assert idle_share(STEPS) == pytest.approx(4 / 34)


def test_efficiency_is_the_share_of_the_room() -> None:
    assert efficiency(STEPS, 10) == pytest.approx(30 / 60)


def test_a_step_without_any_cost_is_balanced() -> None:
    assert imbalance([[0, 0], [0, 2]]) == 0.25
    assert imbalance([[0, 0]]) == idle_share([[0, 0]]) == 0


def test_one_rank_never_waits() -> None:
    assert imbalance([[3], [5]]) == idle_share([[3], [5]]) == 0


def test_without_steps_nothing_is_wasted() -> None:
    nothing = np.empty((0, 4))
    assert (imbalance(nothing), idle_share(nothing), efficiency(nothing, 5)) == (0, 0, 1)


def test_pad_ratio_is_the_mean_over_batches() -> None:
    batches = Lists(np.array([0, 1, 2, 3, 4]), np.array([0, 3, 4, 5]))
    assert pad_ratio(batches, [4, 2, 0, 7, 0]) == pytest.approx((6 / 12 + 0 + 0) / 3)
    assert pad_ratio(Lists(np.empty(0, np.int64), np.zeros(1, np.int64)), [1]) == 0


@pytest.mark.parametrize("metric", [imbalance, idle_share, lambda costs: efficiency(costs, 9)])
@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 2], r"must have shape \(step, rank\), not \(2,\)"),
        ([[1, 2], [3, -1]], "cost of step 1, rank 1 is -1; it must be at least 0"),
        ([[1, float("nan")]], "cost of step 0, rank 1 is nan"),
        (np.empty((3, 0)), "without a rank"),
    ],
)
def test_impossible_costs_are_refused(metric: Callable[..., Any], costs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(costs)


def test_costs_must_be_numbers() -> None:
    with pytest.raises(TypeError, match="must be numbers"):
        imbalance([["a", "b"]])


def test_efficiency_names_who_has_more_than_fits() -> None:
    with pytest.raises(ValueError, match=r"Rank 1 has 11 in step 1, above the capacity of 10"):
        efficiency([[1, 2], [3, 11]], 10)
    with pytest.raises(ValueError, match="capacity is 0"):
        efficiency([[1, 2]], 0)


def test_pad_ratio_refuses_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match="Batch 1 has no sample"):
        pad_ratio(Lists(np.array([0]), np.array([0, 1, 1])), [4])
    with pytest.raises(ValueError, match=r"must have shape \(N,\)"):
        pad_ratio(Lists(np.array([0]), np.array([0, 1])), [[4, 1]])
