"""Weights and schedules: what must hold for any of them, then examples and error texts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from energon_lite.order.schedules import Schedule, Weight, Weights

values = st.floats(0, 100, allow_nan=False, allow_subnormal=False).map(lambda y: round(y, 3))


@st.composite
def schedules(draw: st.DrawFn, least: float = 0.0) -> Schedule:
    xs = sorted(draw(st.sets(st.integers(0, 30_000), min_size=1, max_size=6)))
    points = tuple((float(x), draw(values) + least) for x in xs)
    return Schedule(draw(st.sampled_from(["linear", "step", "cosine"])), points)


@st.composite
def weights(draw: st.DrawFn, depth: int = 2) -> Weights:
    """Any tree whose weights are above 0."""
    leaf = st.one_of(st.floats(0.01, 50), schedules(least=0.01))
    entries: list[Weight | tuple[Weight, Weights]] = []
    for _ in range(draw(st.integers(1, 4))):
        weight = draw(leaf)
        is_nested = depth > 0 and draw(st.booleans())
        entries.append((weight, draw(weights(depth=depth - 1))) if is_nested else weight)
    return Weights(entries)


@given(schedules(), st.lists(st.integers(0, 40_000), min_size=1, max_size=20))
def test_schedule_stays_within_its_values_and_meets_its_points(schedule, draws) -> None:
    x, y = map(np.array, zip(*schedule.points, strict=True))
    assert schedule.at(x).tolist() == y.tolist()
    found = schedule.at(np.array(draws))
    assert (found >= y.min() * (1 - 1e-12)).all()
    assert (found <= y.max() * (1 + 1e-12)).all()
    for draw, value in zip(draws, found.tolist(), strict=True):
        if draw <= x[0]:
            assert value == y[0]
        elif draw >= x[-1]:
            assert value == y[-1]
        else:
            left = int(np.searchsorted(x, draw, side="right")) - 1
            f = (draw - x[left]) / (x[left + 1] - x[left])
            f = {"linear": f, "step": 0.0, "cosine": (1 - math.cos(math.pi * f)) / 2}[schedule.kind]
            assert value == pytest.approx(y[left] * (1 - f) + y[left + 1] * f, rel=1e-12, abs=1e-12)


@given(schedules(), st.integers(1, 64), st.lists(st.integers(0, 40_000), min_size=1))
def test_scaled_schedule_is_the_same_at_scaled_draws(schedule, factor, draws) -> None:
    scaled = schedule.scaled(factor)
    assert np.allclose(scaled.at(np.array(draws) * factor), schedule.at(np.array(draws)))
    loaded = json.loads(json.dumps(scaled.config()))
    assert Schedule(loaded["kind"], tuple(map(tuple, loaded["points"]))) == scaled


@given(weights(), st.lists(st.integers(0, 40_000), min_size=1, max_size=20))
def test_rows_of_shares_add_up_to_one_and_do_not_depend_on_their_neighbours(tree, draws) -> None:
    shares = tree.at(np.array(draws))
    assert shares.shape == (len(draws), tree.num_leaves)
    assert np.allclose(shares.sum(axis=1), 1)
    assert (shares >= 0).all()
    for row, draw in enumerate(draws):
        assert np.array_equal(tree.at(np.array([draw]))[0], shares[row])


@given(st.lists(st.one_of(values, schedules()), min_size=1, max_size=6), st.integers(0, 40_000))
def test_shares_of_one_level_are_weights_over_their_sum(level, draw) -> None:
    values = [w.at(np.array([draw]))[0] if isinstance(w, Schedule) else w for w in level]
    own = np.array(values)
    assume(own.sum() > 0)
    found = Weights(level).at(np.array([draw]))[0]
    assert np.allclose(found, own / own.sum())


@given(weights(), weights(), st.floats(0.01, 10), st.floats(0.01, 10), st.integers(0, 40_000))
def test_share_of_a_leaf_is_the_product_over_the_levels(left, right, a, b, draw) -> None:
    draws = np.array([draw])
    found = Weights([(a, left), (b, right)]).at(draws)[0]
    expected = [a / (a + b) * left.at(draws)[0], b / (a + b) * right.at(draws)[0]]
    assert np.allclose(found, np.concatenate(expected))


@given(weights(), st.lists(st.integers(0, 50_000), min_size=2, max_size=6))
def test_expected_counts_add_up_from_call_to_call(tree, draws) -> None:
    for num_draws in draws:  # also back, as a run does that is restored
        exact = tree.at(np.arange(num_draws)).sum(axis=0)
        assert np.allclose(tree.expected(num_draws), exact, rtol=1e-6, atol=1e-9)


def test_expected_counts_are_exact_where_shares_bend_at_the_ends_of_an_interval() -> None:
    """An integral and half of each end were 1.3e-6 off."""
    level = Weights([1.0, Schedule("linear", ((0, 1.0), (50_000, 1000.0)))])
    tree = Weights([(1.0, level), (1.0, Weights([1.0, 2.0]))])
    exact = tree.at(np.arange(50_001)).sum(axis=0)
    assert np.allclose(tree.expected(50_001), exact, rtol=1e-7)


@pytest.mark.soak
def test_expected_counts_of_ten_million_scheduled_draws_are_exact() -> None:
    tree = Weights(
        [
            Schedule("linear", ((0, 0.0), (1e7, 1.0))),
            Schedule("cosine", ((1234.5, 1e-6), (9e6, 1.0))),
            Schedule("step", ((0, 0.3), (3_333_333, 1.0), (8e6, 0.0))),
            (0.5, Weights([1.0, 3.0])),
        ]
    )
    found = tree.expected(10**7)
    expected = np.zeros(5)
    for first in range(0, 10**7, 10**6):
        expected += tree.at(np.arange(first, first + 10**6)).sum(axis=0)
    assert np.abs(found / expected - 1).max() < 1e-6
    beyond = tree.expected(10**12)  # one by one they would take days
    after = (10**12 - 10**7) * tree.at(np.array([10**8]))[0]
    assert np.allclose(beyond, found + after, rtol=1e-9)


def test_examples_of_the_three_kinds() -> None:
    draws = np.array([0, 10, 15, 20, 99])
    points = ((10, 1.0), (20, 3.0))
    assert Schedule("linear", points).at(draws).tolist() == [1, 1, 2, 3, 3]
    assert Schedule("step", points).at(draws).tolist() == [1, 1, 1, 3, 3]
    assert Schedule("cosine", points).at(draws) == pytest.approx([1, 1, 2, 3, 3])
    assert Schedule("cosine", ((0, 0.0), (4, 1.0))).at(np.array([1])) == pytest.approx(
        (1 - math.cos(math.pi / 4)) / 2
    )


def test_constants_and_schedules_that_never_change_are_constant() -> None:
    tree = Weights([1.0, Schedule("linear", ((5, 2.0), (9, 2.0))), (1.0, Weights([0.0, 4.0]))])
    assert tree.is_constant
    assert tree.constant().tolist() == [0.25, 0.5, 0, 0.25]
    assert tree.expected(400).tolist() == [100, 200, 0, 100]
    with pytest.raises(ValueError, match="follow a schedule"):
        Weights([1.0, Schedule("step", ((0, 1.0), (5, 2.0)))]).constant()


def test_level_of_zeros_passes_its_share_on_to_its_siblings() -> None:
    off = Schedule("step", ((0, 1.0), (10, 0.0)))
    tree = Weights([1.0, (3.0, Weights([off, off]))])
    assert tree.at(np.array([9, 10])).tolist() == [[0.25, 0.375, 0.375], [1, 0, 0]]


def test_draw_without_any_share_is_named() -> None:
    off = Schedule("step", ((0, 1.0), (10, 0.0)))
    tree = Weights([(3.0, Weights([off])), 0.0])
    assert tree.at(np.array([9])).tolist() == [[1, 0]]
    with pytest.raises(ValueError, match=r"all weights of the blend are 0 at draw 12; let the"):
        tree.at(np.array([3, 12, 13]))
    with pytest.raises(ValueError, match="at draw 10;"):
        tree.expected(100)


@pytest.mark.parametrize(
    ("kind", "points", "text"),
    [
        ("cubic", ((0, 1),), "schedule kind 'cubic' is not one of linear, step, cosine"),
        ("step", (), "step schedule has no points; give at least one [x, value]"),
        ("step", ((-1, 1),), "step schedule, point 0: x=-1 must be finite and at least 0"),
        ("linear", ((5, 1), (5, 2)), "point 1: x=5 must lie behind x=5 of the point before"),
        ("cosine", ((0, 1), (5, -2)), "cosine schedule, point 1: value -2 must be finite and"),
        ("cosine", ((0, math.nan),), "point 0: value nan must be finite and at least 0"),
    ],
)
def test_schedule_refuses_what_it_cannot_follow(kind, points, text) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Schedule(kind, points)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], "a blend has no entries; give at least one weight"),
        ([1.0, -2.0], "weight -2.0 of entry 1 of a blend must be finite and at least 0"),
        ([math.inf], "weight inf of entry 0 of a blend must be finite and at least 0"),
        ([0.0, 0], "all 2 weights of a blend are 0; give one of them a share"),
    ],
)
def test_weights_refuse_what_has_no_shares(entries, text) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Weights(entries)
    assert text in str(caught.value)


@given(st.data(), st.integers(0, 120))
def test_nothing_is_drawn_before_the_next_draw_of_some_leaves(data, draw) -> None:
    points = st.dictionaries(st.integers(0, 99), st.sampled_from([0, 0, 1, 3]), min_size=1)
    kinds = st.sampled_from(["linear", "step", "cosine"])
    entries = [
        Schedule(data.draw(kinds), tuple(sorted(data.draw(points).items()))) for _ in range(3)
    ]
    own = Weights([1.0, *entries])
    leaves = np.array([False, *data.draw(st.lists(st.booleans(), min_size=3, max_size=3))])
    # After the last point nothing changes.
    draws = np.arange(draw, 130)
    has_share = own.at(draws)[:, leaves].any(axis=1)
    found = own.next_draw(draw, leaves)
    if found is None:
        assert not has_share.any()
    else:
        assert not has_share[: found - draw].any()
        # All draws up to the next point have a share, or none lies between the two.
        later = own.breaks[own.breaks > found]
        is_at_once = has_share[found - draw :][:2].any()
        assert is_at_once or (len(later) > 0 and later[0] - found <= 1)
