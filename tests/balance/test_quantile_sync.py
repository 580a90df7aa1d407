from __future__ import annotations

from typing import Any

import numpy as np

from energon_lite.balance import imbalance, quantile_sync


def drawn_costs(num: int, rank: int) -> Any:
    return np.random.Generator(np.random.Philox(rank)).lognormal(0, 1, num)


def test_dear_packs_of_all_ranks_meet() -> None:
    ranks = [drawn_costs(64, rank) for rank in range(8)]
    ordered = [costs[quantile_sync(costs, 64, 0, 0)] for costs in ranks]
    assert imbalance(np.stack(ordered, axis=1)) < 0.4 * imbalance(np.stack(ranks, axis=1))


def test_each_window_has_its_order() -> None:
    costs = range(50)
    orders = {tuple(quantile_sync(costs, 50, 0, number)) for number in range(5)}
    orders |= {tuple(quantile_sync(costs, 50, seed, 0)) for seed in range(1, 5)}
    assert len(orders) == 9


def test_an_order_never_changes() -> None:
    # What was saved by one version goes on in the next.
    assert quantile_sync(range(12), 12, 7, 3).tolist() == [7, 10, 4, 2, 8, 1, 3, 5, 9, 0, 11, 6]


def test_windows_that_are_not_equally_full_keep_about_the_same_rhythm() -> None:
    ranks = [drawn_costs(num, num) for num in (180, 200, 220, 256)]
    ordered = [costs[quantile_sync(costs, 256, 0, 0)] for costs in ranks]
    unsorted = imbalance(np.stack([costs[:180] for costs in ranks], axis=1))
    assert imbalance(np.stack([costs[:180] for costs in ordered], axis=1)) < 0.4 * unsorted
