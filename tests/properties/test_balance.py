"""Orders lose no pack and add none unsaid, are the same on all ranks, and resume anywhere."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from energon_lite.balance import (
    CostModel,
    fit_cost_model,
    global_window,
    idle_share,
    imbalance,
    quantile_sync,
)
from energon_lite.batching.lists import Lists

REMAINDERS = ["pad", "drop", "ragged"]

cost_lists = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1e6), st.integers(0, 1000)), max_size=60
)
seeds = st.integers(-(2**70), 2**70)
weights = st.sampled_from([0.0, 0.5, 1.0, 3.0])


@st.composite
def packed(draw: st.DrawFn) -> tuple[Lists, Any]:
    """Lists and lengths, of one resource or two; some samples are in no pack."""
    num = draw(st.integers(1, 12))
    one, two = st.integers(0, 5000), st.tuples(st.integers(0, 5000), st.integers(0, 9))
    lengths = np.array(
        draw(st.lists(draw(st.sampled_from([one, two])), min_size=num, max_size=num))
    )
    indices = np.array(draw(st.permutations(range(num))), np.int64)[: draw(st.integers(0, num))]
    cuts = draw(st.lists(st.integers(0, len(indices)), max_size=5))
    offsets = np.array(sorted([0, *cuts, len(indices)]), np.int64)
    return Lists(indices, offsets), lengths


@given(packed(), weights, weights, weights)
def test_cost_of_a_pack_is_the_sum_over_its_samples(
    case: tuple[Lists, Any], token: float, token_squared: float, tile: float
) -> None:
    packs, lengths = case
    assume(tile == 0 or lengths.ndim == 2)
    model = CostModel(token, token_squared, tile)
    rows = [row if lengths.ndim == 2 else [row, 0] for row in lengths.tolist()]
    wanted = [
        sum(token * rows[i][0] + token_squared * rows[i][0] ** 2 + tile * rows[i][1] for i in pack)
        for pack in packs.tolist()
    ]
    assert model.costs(packs, lengths).tolist() == wanted  # whole and half numbers: exact


@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.integers(1, 10**8), st.integers(0, 50)), min_size=3
    ),
    st.tuples(*[st.floats(0, 1)] * 3).filter(lambda c: sum(c) > 0.01),
)
def test_fitted_model_is_the_one_that_made_the_times(points: Any, wanted: Any) -> None:
    measured = [(p, sum(c * x for c, x in zip(wanted, p, strict=True))) for p in points]
    try:
        model = fit_cost_model(measured)
    except ValueError:  # points too much alike, or too few
        return
    for point, seconds in measured:
        assert float(model.combine(*point)) == pytest.approx(seconds, rel=1e-6)


@given(
    st.lists(
        st.tuples(
            st.tuples(st.integers(0, 5000), st.integers(0, 10**7), st.integers(0, 50)),
            st.floats(0.01, 10),
        ),
        min_size=2,
        max_size=6,
    ),
    st.tuples(*[st.sampled_from([-0.1, 0.0, 0.1])] * 3),
)
def test_no_other_model_explains_the_times_better(points: Any, shift: Any) -> None:
    def error(coefficients: Any) -> Fraction:
        return sum(
            (1 - sum(Fraction(c) * x for c, x in zip(coefficients, p, strict=True)) / Fraction(s))
            ** 2
            for p, s in points
        )

    try:
        model = fit_cost_model(points)
    except ValueError:
        return
    found = (model.token, model.token_squared, model.tile)
    other = [max(c * (1 + s) + s * 1e-6, 0) for c, s in zip(found, shift, strict=True)]
    assert error(found) <= error(other) * Fraction(1_000_001, 1_000_000)


@given(cost_lists, st.integers(0, 20), seeds, st.integers(0, 1000))
def test_quantile_sync_yields_every_pack_of_the_window_once(
    costs: list[float], room: int, seed: int, window_number: int
) -> None:
    window = max(len(costs) + room, 1)
    order = quantile_sync(costs, window, seed, window_number)
    assert sorted(order.tolist()) == list(range(len(costs)))


@given(st.integers(1, 40), st.data(), seeds, st.integers(0, 100))
def test_ranks_meet_with_packs_of_the_same_rank_in_cost(
    window: int, data: st.DataObject, seed: int, window_number: int
) -> None:
    row = st.lists(st.integers(0, 9), min_size=window, max_size=window)
    met = []
    for costs in (data.draw(row), data.draw(row)):
        order = quantile_sync(costs, window, seed, window_number)
        place_of = np.argsort(np.argsort(costs, kind="stable"))
        met.append(place_of[order].tolist())
    assert met[0] == met[1]


@pytest.mark.parametrize("remainder", REMAINDERS)
@given(
    costs=cost_lists,
    num_ranks=st.integers(1, 9),
    window_steps=st.integers(1, 9),
    seed=seeds,
    epoch=st.integers(0, 5),
)
@example(costs=[1.0] * 23, num_ranks=4, window_steps=3, seed=0, epoch=0)  # 24 would be 2 windows
def test_every_pack_is_in_the_plan_once_or_accounted_for(
    remainder: Any, costs: list[float], num_ranks: int, window_steps: int, seed: int, epoch: int
) -> None:
    plan = global_window(costs, num_ranks, window_steps, seed, epoch=epoch, remainder=remainder)
    num, rest = len(costs), len(costs) % num_ranks
    assert plan.steps.shape[1] == num_ranks
    present = plan.steps[plan.steps >= 0].tolist()
    assert sorted([*present, *plan.omitted.tolist()]) == sorted(
        [*range(num), *plan.repeated.tolist()]
    )
    assert len(plan.omitted) == (rest if remainder == "drop" else 0)
    assert len(plan.repeated) == (-num % num_ranks if remainder == "pad" else 0)
    assert (plan.steps < 0).sum() == (-num % num_ranks if remainder == "ragged" else 0)
    assert (plan.steps[:-1] >= 0).all()  # only the last step may be ragged
    again = global_window(costs, num_ranks, window_steps, seed, epoch=epoch, remainder=remainder)
    assert again == plan
    assert plan.costs(costs).sum() == pytest.approx(
        np.append(costs, 0.0)[np.array(present, int)].sum()
    )


@given(cost_lists, st.integers(1, 6), st.integers(1, 6), seeds)
def test_windows_keep_their_packs_and_their_steps_are_neighbours_in_cost(
    costs: list[float], num_ranks: int, window_steps: int, seed: int
) -> None:
    plan = global_window(costs, num_ranks, window_steps, seed, remainder="drop")
    num_used = len(plan) * num_ranks
    for start in range(0, len(plan), window_steps):
        steps = plan.steps[start : start + window_steps]
        first = start * num_ranks
        last = min(first + window_steps * num_ranks, num_used)
        assert sorted(steps.ravel().tolist()) == list(range(first, last))
        by_cost = sorted(range(first, last), key=lambda i: (costs[i], i))
        neighbours = [set(by_cost[i : i + num_ranks]) for i in range(0, len(by_cost), num_ranks)]
        assert sorted(map(sorted, steps.tolist())) == sorted(map(sorted, neighbours))


@given(cost_lists, st.integers(1, 4), st.integers(1, 4), seeds, st.integers(0, 60))
def test_a_window_depends_on_its_own_packs_only(
    costs: list[float], num_ranks: int, window_steps: int, seed: int, num_kept: int
) -> None:
    size = num_ranks * window_steps
    num_kept = num_kept // size * size
    whole = global_window(costs, num_ranks, window_steps, seed)
    part = global_window(costs[:num_kept], num_ranks, window_steps, seed)
    assert np.array_equal(whole.steps[: len(part)], part.steps)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), seeds)
def test_each_rank_has_each_place_of_a_step_equally_often(
    num_ranks: int, turns: int, num_windows: int, seed: int
) -> None:
    size = num_ranks * turns * num_ranks
    plan = global_window(np.arange(num_windows * size), num_ranks, turns * num_ranks, seed)
    places = np.argsort(np.argsort(plan.steps, axis=1), axis=1)
    for window in places.reshape(num_windows, -1, num_ranks):
        for place in range(num_ranks):
            assert ((window == place).sum(axis=0) == turns).all()


@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), max_size=10),
    st.floats(0.1, 10),
)
def test_shares_are_between_0_and_1_and_have_no_unit(rows: list[list[int]], unit: float) -> None:
    costs = np.array(rows).reshape(-1, 3)
    for share in (imbalance, idle_share):
        assert -1e-9 <= share(costs) <= 2 / 3 + 1e-9
        assert share(costs * unit) == pytest.approx(share(costs), abs=1e-9)
        assert share(np.repeat(costs[:, :1], 3, axis=1)) == pytest.approx(0, abs=1e-9)
