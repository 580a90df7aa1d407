from __future__ import annotations

import numpy as np
import pytest

from energon_lite.balance import idle_share, imbalance


@pytest.mark.parametrize(
    ("steps", "of_imbalance", "of_idle_share"),
    [
        ([[10, 10], [0, 4], [3, 3]], (0 + 0.5 + 0) / 3, 4 / 34),  # long steps count more
        ([[0, 0], [0, 2]], 0.25, 2 / 4),
        ([[0, 0]], 0, 0),
        ([[3], [5]], 0, 0),
        (np.empty((0, 4)), 0, 0),
    ],
)
def test_metrics_of_steps(steps, of_imbalance, of_idle_share) -> None:
    assert (imbalance(steps), idle_share(steps)) == pytest.approx((of_imbalance, of_idle_share))
