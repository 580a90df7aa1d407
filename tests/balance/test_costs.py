from __future__ import annotations

import doctest
import importlib

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
