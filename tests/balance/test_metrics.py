from __future__ import annotations

import numpy as np
import pytest

from energon_lite.balance import efficiency, idle_share, imbalance, pad_ratio
from energon_lite.batching.lists import Lists

STEPS = [[10, 10], [0, 4], [3, 3]]


@pytest.mark.parametrize(
    ("steps", "of_imbalance", "of_idle_share", "of_efficiency"),
    [
        ([[10, 10], [0, 4], [3, 3]], (0 + 0.5 + 0) / 3, 4 / 34, 30 / 60),  # long steps count more
        ([[0, 0], [0, 2]], 0.25, 2 / 4, 2 / 40),
        ([[0, 0]], 0, 0, 0),
        ([[3], [5]], 0, 0, 8 / 20),
        (np.empty((0, 4)), 0, 0, 1),
    ],
)
def test_metrics_of_steps(steps, of_imbalance, of_idle_share, of_efficiency) -> None:
    found = (imbalance(steps), idle_share(steps), efficiency(steps, 10))
    assert found == pytest.approx((of_imbalance, of_idle_share, of_efficiency))


def test_pad_ratio_is_the_mean_over_batches() -> None:
    batches = Lists(np.array([0, 1, 2, 3, 4]), np.array([0, 3, 4, 5]))
    assert pad_ratio(batches, [4, 2, 0, 7, 0]) == pytest.approx((6 / 12 + 0 + 0) / 3)
    assert pad_ratio(Lists(np.empty(0, np.int64), np.zeros(1, np.int64)), [1]) == 0
