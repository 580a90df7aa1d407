"""What `energon_lite.balance` refuses: the call, the error, its words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from energon_lite.balance import (
    CostModel,
    fit_cost_model,
    global_window,
    idle_share,
    imbalance,
    quantile_sync,
)
from energon_lite.batching.lists import Lists

PACKS = Lists(np.array([0, 2, 1]), np.array([0, 2, 3]))
NAN, INF = float("nan"), float("inf")


def costs(model: CostModel, lengths: Any) -> Callable[[], Any]:
    return partial(model.costs, PACKS, lengths)


def window(**change: Any) -> Callable[[], Any]:
    settings = {"costs_P": [1, 2], "num_ranks": 2, "window_steps": 2, "seed": 0, **change}
    return partial(global_window, **settings)


def of_four(remainder: Any) -> Any:
    return global_window([1, 2, 3], 2, 2, 0, remainder=remainder).costs([1, 2, 3, 4])


METRICS: list[Callable[[Any], float]] = [imbalance, idle_share]
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((partial(CostModel, token_squared=value), ValueError,
       "token_squared is .*; a cost must be a number") for value in (-1, NAN, INF)),
    (costs(CostModel(), [1, 2]), ValueError, "sample 2, but there are only 2 lengths"),
    (costs(CostModel(tile=1), [1, 2, 3]), ValueError, "without tiles"),
    (costs(CostModel(), [1, -2, 3]), ValueError, "Sample 1 has length -2, which is negative"),
    (costs(CostModel(), [[[1]]]), ValueError,
     r"must have shape \(N,\) or \(N, R\), not \(1, 1, 1\)"),
    (costs(CostModel(token_squared=1), [2**32, 1, 1]), ValueError,
     "Pack 0 has 4,294,967,297 tokens"),
    (costs(CostModel(), [1.5, 2.0, 3.0]), TypeError, "integers, not float64"),
    *((partial(fit_cost_model, points), ValueError, words) for points, words in (
        ([], "0 points for 0 terms"),
        ([((1, 1, 0), 1.0)], r"1 points for 2 terms \(tokens and the sum of squares\)"),
        ([((1, 1, 1), 1.0), ((2, 1, 1), 2.0)], "2 points for 3 terms"),
        ([((0, 0, 0), 1.0)] * 2, "nothing costs time"),
        ([((1, 1, 0), 1.0)] * 3, "do not separate the tokens from the sum of squares"),
        ([((10, 5, 0), 1.0), ((1000, 501, 0), 99.0)], "nearly, in the same ratio"),
        ([((1, 1, 0), 0.0)], "Point 0: time is 0.0; it must be above 0"),
        ([((1, 1, -1), 1.0)], "Point 0: tiles is -1; it must be at least 0"),
        ([((1, 1, NAN), 1.0)], "Point 0: tiles is nan"),
        ([((1, 1), 1.0)], "Point 0 has 2 terms; give tokens, sum of squares, tiles"),
    )),
    *((partial(of_four, remainder), ValueError, "4 costs for a plan of 3 packs")
      for remainder in ("pad", "drop", "ragged")),
    (window(num_ranks=0), ValueError, "num_ranks=0 must be at least"),
    (window(window_steps=0), ValueError, "window_steps=0 must be at least"),
    (window(epoch=-1), ValueError, "epoch=-1 must be at least"),
    (window(remainder="keep"), ValueError, "remainder='keep' is not one of pad, drop, ragged"),
    (window(costs_P=[1, -2]), ValueError, "cost of pack 1 is -2"),
    (window(costs_P=[[1, 2]]), ValueError, r"must have shape \(pack,\)"),
    *((partial(metric, steps), ValueError, words) for metric in METRICS for steps, words in (
        ([1, 2], r"must have shape \(step, rank\), not \(2,\)"),
        ([[1, 2], [3, -1]], "cost of step 1, rank 1 is -1; it must be at least 0"),
        ([[1, NAN]], "cost of step 0, rank 1 is nan"),
        (np.empty((3, 0)), "without a rank"),
    )),
    (partial(imbalance, [["a", "b"]]), TypeError, "must be numbers"),
    *((call, ValueError, words) for cost in (-1, NAN, INF) for call, words in (
        (partial(quantile_sync, [1, cost], 4, 0, 0), "cost of pack 1 is"),
    )),
    (partial(quantile_sync, [1], 1, 0, -1), ValueError, "window_number=-1 must be at least"),
    (partial(quantile_sync, [1, 2, 3], 2, 0, 0), ValueError, "3 packs are more than a window of 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused_with_a_reason(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()
