from __future__ import annotations

import doctest
import importlib
from typing import Any

import numpy as np
import pytest

from energon_lite.balance import CostModel, fit_cost_model
from energon_lite.batching.lists import Lists

PACKS = Lists(np.array([0, 2, 1]), np.array([0, 2, 3]))


@pytest.mark.parametrize("name", ["costs", "balance_orders"])
def test_examples_of_docstrings_are_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"energon_lite.batching.{name}"))
    assert found.attempted > 0
    assert found.failed == 0


def test_a_sum_above_53_bits_is_rounded_once() -> None:
    lengths = np.array([2**30 + 1, 7, 3])
    wanted = float((2**30 + 1) ** 2 + 9)
    costs = CostModel(token=0, token_squared=1).costs(PACKS, lengths)
    assert costs.tolist() == [wanted, 49.0]


def test_without_packs_there_are_no_costs() -> None:
    nothing = Lists(np.empty(0, np.int64), np.zeros(1, np.int64))
    assert CostModel().costs(nothing, []).shape == (0,)
    assert CostModel(tile=1).costs(nothing, np.empty((0, 2), np.int64)).shape == (0,)


def test_combine_takes_sums_that_are_known() -> None:
    lengths = np.array([[10, 1], [20, 2], [30, 3]])
    model = CostModel(1, 0.5, 7)
    assert float(model.combine(40, 10**2 + 30**2, 4)) == model.costs(PACKS, lengths)[0]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_impossible_coefficients_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"token_squared is .*; a cost must be a number"):
        CostModel(token_squared=value)


@pytest.mark.parametrize(
    ("model", "lengths", "message"),
    [
        (CostModel(), [1, 2], "sample 2, but there are only 2 lengths"),
        (CostModel(tile=1), [1, 2, 3], "without tiles"),
        (CostModel(), [1, -2, 3], "Sample 1 has length -2, which is negative"),
        (CostModel(), [[[1]]], r"must have shape \(N,\) or \(N, R\), not \(1, 1, 1\)"),
        (CostModel(token_squared=1), [2**32, 1, 1], r"Pack 0 has 4,294,967,297 tokens"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(model: Any, lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.costs(PACKS, lengths)


def test_lengths_must_be_integers() -> None:
    with pytest.raises(TypeError, match="integers, not float64"):
        CostModel().costs(PACKS, [1.5, 2.0, 3.0])


def test_more_points_are_weighed_by_their_relative_error() -> None:
    # 10 % too much and 10 % too little, for times a thousand apart.
    fitted = fit_cost_model([((100, 0, 0), 1.1), ((100_000, 0, 0), 900.0)])
    # Minimizes (1 - 100 c / 1.1)**2 + (1 - 100,000 c / 900)**2.
    a, b = 100 / 1.1, 100_000 / 900
    assert fitted.token == pytest.approx((a + b) / (a * a + b * b))


def test_a_coefficient_that_would_be_negative_is_0() -> None:
    # Long samples took less time: attention costs nothing, in these.
    fitted = fit_cost_model([((1000, 10**6, 0), 0.019), ((1000, 10**5, 0), 0.021)])
    assert fitted.token_squared == 0
    assert fitted.token == pytest.approx(2e-5, rel=0.01)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "0 points for 0 terms"),
        ([((1, 1, 0), 1.0)], r"1 points for 2 terms \(tokens and the sum of squares\)"),
        ([((1, 1, 1), 1.0), ((2, 1, 1), 2.0)], "2 points for 3 terms"),
        ([((0, 0, 0), 1.0)] * 2, "nothing costs time"),
        ([((1, 1, 0), 1.0)] * 3, "do not separate the tokens from the sum of squares"),
        ([((10, 5, 0), 1.0), ((1000, 501, 0), 99.0)], "nearly, in the same ratio"),
        ([((1, 1, 0), 0.0)], "Point 0: time is 0.0; it must be above 0"),
        ([((1, 1, -1), 1.0)], "Point 0: tiles is -1; it must be at least 0"),
        ([((1, 1, float("nan")), 1.0)], "Point 0: tiles is nan"),
        ([((1, 1), 1.0)], "Point 0 has 2 terms; give tokens, sum of squares, tiles"),
    ],
)
def test_points_that_determine_too_little_are_refused(points: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_cost_model(points)
