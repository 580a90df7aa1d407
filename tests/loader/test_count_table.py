"""Counts in a state: exact for any counts, and small where they are what others lead to expect."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.loader.count_table import COUNTED, WHOLE, CountTable, weights_in

from ..conftest import examples
from ..helpers import through_json

COUNTS = st.one_of(st.integers(-3, 40), st.integers(0, 10**12))
ROWS = st.lists(st.tuples(*[COUNTS] * len(WHOLE), st.floats(0, 1e7), st.floats(0, 9)), max_size=9)


@given(rows=ROWS, num_others=st.integers(0, 3), seconds=st.floats(0, 1e6))
@examples(60)
def test_counts_are_exact_after_json(rows, num_others, seconds) -> None:
    names = [f"s{i}" for i in range(len(rows))]
    weights = {name: float(i % 3) for i, name in enumerate(names[: len(rows) - num_others])}
    counts = np.zeros((len(COUNTED), len(rows)))
    for column, (*whole, _, loss_weight) in enumerate(rows):
        counts[: len(WHOLE), column] = whole
        counts[len(WHOLE), column] = loss_weight * whole[1]
        counts[len(WHOLE) + 1, column] = seconds * column
    target = np.array([row[-2] for row in rows], np.float64)
    saved = through_json(CountTable(names, target, counts).to_json(weights))
    found = CountTable.from_json(saved, weights)
    assert found.names == names
    assert (found.counts[: len(WHOLE)] == counts[: len(WHOLE)]).all()
    assert found.target == pytest.approx(target, rel=1e-9, abs=1e-6)
    # The mean per sample is rounded to 1e-12.
    error = np.abs(found.counts[len(WHOLE)] - counts[len(WHOLE)])
    assert (error <= 1e-12 * np.abs(counts[1])).all()
    total = counts[len(WHOLE) + 1].sum()
    assert found.counts[len(WHOLE) + 1].sum() == pytest.approx(total, abs=1e-5)
    near = pytest.approx(counts[len(WHOLE) + 1], abs=total / 256 + 1e-5)
    assert found.counts[len(WHOLE) + 1] == near
    again = CountTable.from_json(through_json(found.to_json(weights)), weights)
    assert (again.counts[: len(WHOLE)] == counts[: len(WHOLE)]).all()


def config_of(weights: list[Any]) -> dict[str, Any]:
    entries = [
        {"name": f"s{i}", "weight": weight, "of": {"stage": "source", "name": f"s{i}"}}
        for i, weight in enumerate(weights)
    ]
    return {"stage": "batch", "of": {"stage": "blend", "of": entries}}


def test_weights_are_those_of_the_configuration() -> None:
    schedule = {"kind": "linear", "points": [[0, 1.0], [9, 2.0]]}
    config = config_of([2.0, [[1, 5.0], 3.0], schedule, "x", None, [], [[]]])
    assert weights_in(config) == {
        "s0": 2.0, "s1": 15.0, "s2": 0.0, "s3": 0.0, "s4": 0.0, "s5": 1.0, "s6": 0.0
    }  # fmt: skip
    assert weights_in({"stage": "source", "name": "alone"}) == {"alone": 0.0}


def test_counts_of_ten_thousand_sources_are_small() -> None:
    rng = np.random.default_rng(0)
    weights = weights_in(config_of(rng.uniform(0.1, 9.0, 10_000).tolist()))
    shares = np.array([*weights.values()]) / sum(weights.values())
    counts = np.zeros((len(COUNTED), 10_000))
    counts[:3] = np.rint(1e6 * shares + rng.normal(0, 0.5, 10_000))
    counts[len(WHOLE)] = counts[1]
    counts[-1] = 0.01 * counts[0] * rng.uniform(0.8, 1.2, 10_000)
    saved = CountTable([*weights], 8e6 * shares, counts).to_json(weights)
    assert len(json.dumps(saved)) < 6_000
