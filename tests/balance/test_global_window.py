from __future__ import annotations

from typing import Any

import numpy as np

from energon_lite.balance import StepPlan, global_window, imbalance


def drawn_costs(num: int) -> Any:
    return np.random.Generator(np.random.Philox(3)).lognormal(0, 1, num)


def test_wider_windows_are_more_even() -> None:
    costs = drawn_costs(4096)
    found = [imbalance(global_window(costs, 8, steps, 0).costs(costs)) for steps in (1, 16, 64)]
    assert found[0] > 5 * found[1] > 10 * found[2]


def test_an_order_never_changes() -> None:
    plan = global_window([5, 3, 8, 1, 9, 2, 7], 2, 2, seed=7, epoch=3)
    assert plan.steps.tolist() == [[0, 2], [1, 3], [4, 6], [5, 0]]


def test_seeds_and_epochs_draw_from_scratch() -> None:
    costs = drawn_costs(200)
    plans = {global_window(costs, 4, 10, seed).steps.tobytes() for seed in range(3)}
    plans |= {global_window(costs, 4, 10, 0, epoch=epoch).steps.tobytes() for epoch in range(3)}
    assert len(plans) == 5


def test_padding_takes_the_first_packs_again_as_often_as_needed() -> None:
    plan = global_window([4, 2], num_ranks=5, window_steps=3, seed=0, remainder="pad")
    assert plan.repeated.tolist() == [0, 1, 0]
    assert sorted(plan.steps.ravel().tolist()) == [0, 0, 0, 1, 1]


def test_dropping_leaves_out_the_last_packs_whatever_they_cost() -> None:
    plan = global_window([4, 2, 9, 1, 7], num_ranks=2, window_steps=3, seed=0, remainder="drop")
    assert plan.omitted.tolist() == [4]


def test_the_ragged_step_comes_last_and_is_the_cheapest_of_its_window() -> None:
    costs = [5, 1, 9, 3, 8, 2, 7]
    for seed in range(10):
        plan = global_window(costs, 3, 4, seed, remainder="ragged")
        assert sorted(plan.steps[-1].tolist()) == [-1, -1, 1]


def test_no_rank_has_more_work_than_the_others_over_a_window() -> None:
    costs = drawn_costs(8 * 64)
    per_rank = global_window(costs, 8, 64, 0).costs(costs).sum(axis=0)
    by_place = np.sort(costs).reshape(64, 8).sum(axis=0)  # without turns
    assert per_rank.max() / per_rank.mean() < 1.05 < by_place.max() / by_place.mean()


def test_plans_compare_by_their_contents() -> None:
    plan = global_window([1, 2, 3], 2, 2, 0)
    assert plan == StepPlan(plan.steps.copy(), plan.repeated, plan.omitted)
    assert plan != global_window([3, 2, 1, 5], 2, 2, 0)
    assert plan != 3
    assert repr(plan) == "StepPlan(2 steps of 2 ranks, 1 packs repeated, 0 omitted)"
