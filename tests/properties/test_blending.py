"""Which child a draw takes is arithmetic: what must hold for any weights, streams and cuts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Schedule, Weights

from ..conftest import examples

GOLDEN_RATIO = (5**0.5 - 1) / 2
MOST_OF_STREAM = 5
keys = st.integers(0, 2**128 - 1)
modes = st.sampled_from(["exact", "random"])


@st.composite
def constants(draw: st.DrawFn, most: int = 40) -> list[float]:
    """Weights of very different sizes, some of them 0."""
    one = st.one_of(st.just(0.0), st.just(1.0), st.floats(-6, 3).map(lambda x: 10.0**x))
    return [*draw(st.lists(one, max_size=most - 1)), 1.0]


@st.composite
def any_weights(draw: st.DrawFn) -> Weights:
    level: list[Any] = [*draw(constants(6))]
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["linear", "step", "cosine"]))
        xs = sorted(draw(st.sets(st.integers(0, 3000), min_size=1, max_size=4)))
        level.append(Schedule(kind, tuple((x, draw(st.floats(0, 3))) for x in xs)))
    if draw(st.booleans()):
        level.append((draw(st.floats(0, 3)), Weights(draw(constants(3)))))
    return Weights(level)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    num_streams = draw(st.integers(1, 64))
    return Stream(draw(st.integers(0, num_streams - 1)), num_streams, draw(st.integers(0, 2)))


def furthest(children: np.ndarray, shares: np.ndarray) -> float:
    """The largest |count - n * share| over all prefixes and children.

    It is reached just before or just after a draw of the child, or at the end.
    """
    order = np.argsort(children.astype(np.int16), kind="stable")
    child = children[order]
    count = np.arange(len(order)) - np.searchsorted(child, np.arange(len(shares)))[child]
    too_many = count + 1 - (order + 1) * shares[child]
    too_few = order * shares[child] - count
    at_end = np.bincount(children, minlength=len(shares)) - len(order) * shares
    return max(too_many.max(), too_few.max(), np.abs(at_end).max())


def check_run(weights: np.ndarray, num_streams: int, num_draws: int, key: int) -> None:
    """Holds each stream and the whole run to the bounds."""
    tree = Weights(weights.tolist())
    shares = tree.constant()
    run = []
    for index in range(num_streams):
        children = BlendOrder(tree, "exact", key, Stream(index, num_streams)).block(0, num_draws)
        assert children.shape == (num_draws,)
        assert furthest(children, shares) <= MOST_OF_STREAM
        run.append(children)
    in_slot_order = np.stack(run, axis=1).ravel()
    assert furthest(in_slot_order, shares) <= 2 * num_streams + MOST_OF_STREAM


@given(constants(400), keys, streams(), st.lists(st.integers(0, 30_000), max_size=4))
def test_counts_before_a_draw_are_those_of_the_draws(weights, key, stream, draws) -> None:
    order = BlendOrder(Weights(weights), "exact", key, stream)
    assert order.is_counted
    for draw in draws:
        children = BlendOrder(Weights(weights), "exact", key, stream).block(0, draw)
        assert np.array_equal(order.counts(draw), np.bincount(children, minlength=len(weights)))
    late = order.counts(10**12 + 5000) - order.counts(10**12)
    children = order.block(10**12, 5000)
    assert np.array_equal(late, np.bincount(children, minlength=len(weights)))


@given(any_weights(), modes, keys, streams(), st.integers(0, 10**6), st.data())
def test_children_do_not_depend_on_the_cut_into_blocks(
    weights, mode, key, stream, start, data
) -> None:
    total = 300
    order = BlendOrder(weights, mode, key, stream)
    expected = order.block(start, total)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=8))})
    found = np.full(total, -1)
    again = BlendOrder(weights, mode, key, stream)
    for low, high in data.draw(st.permutations(list(pairwise(cuts)))):  # and in any order
        found[low:high] = again.block(start + low, high - low)
    assert found.tolist() == expected.tolist()
    assert order.block(start, 0).tolist() == []


@pytest.mark.parametrize("num_children", [3, 200])
def test_blocks_across_chunks_of_periods_are_those_cut_there(num_children) -> None:
    weights = Weights([1.0 / (i + 1) for i in range(num_children)])
    order = BlendOrder(weights, "exact", 1, Stream(1, 3))
    whole = order.block(0, 60_000)
    for start in (0, 9_000, 9_048, 9_215, 9_216, 18_000, 31_234):
        part = BlendOrder(weights, "exact", 1, Stream(1, 3)).block(start, 20_000)
        assert np.array_equal(part, whole[start : start + 20_000])
    part[:] = -1  # a caller's array is its own
    assert np.array_equal(order.block(0, 60_000), whole)


@given(any_weights(), modes, keys, streams(), st.integers(0, 2000))
def test_children_of_share_zero_are_never_drawn(weights, mode, key, stream, start) -> None:
    children = BlendOrder(weights, mode, key, stream).block(start, 400)
    assert children.min() >= 0
    assert children.max() < weights.num_leaves
    draws = (start + np.arange(400)) * stream.num_streams + stream.index
    # A schedule may reach or leave 0 within a draw or two of a short block, not for longer.
    wide = np.concatenate([np.maximum(draws - 6 * stream.num_streams, 0), draws,
                           draws + 6 * stream.num_streams])  # fmt: skip
    shares = weights.at(wide).reshape(3, 400, -1).max(axis=0)
    assert (shares[np.arange(400), children] > 0).all()


@examples(60)
@given(constants(), keys, st.integers(1, 64), st.integers(1, 3000))
def test_every_prefix_of_streams_and_run_is_close_to_the_shares(
    weights, key, num_streams, num_draws
) -> None:
    check_run(np.array(weights), num_streams, -(-num_draws // num_streams) + 50, key)


@given(constants(), keys, streams(), st.integers(0, 10**12))
def test_any_stretch_far_out_is_as_close_to_the_shares(weights, key, stream, start) -> None:
    """Between two prefixes that are each within 5."""
    tree = Weights(weights)
    children = BlendOrder(tree, "exact", key, stream).block(start, 3000)
    assert furthest(children, tree.constant()) <= 2 * MOST_OF_STREAM


def equal(n: int) -> np.ndarray:
    return np.ones(n)


def zipf(n: int) -> np.ndarray:
    return 1 / np.arange(1, n + 1)


def lognormal(n: int) -> np.ndarray:
    return np.exp(np.random.default_rng(n).normal(0, 2, n))


def one_big(n: int, share: float = 0.999) -> np.ndarray:
    return np.array([share, *[(1 - share) / (n - 1)] * (n - 1)])


LONG: dict[str, np.ndarray] = {
    "2 equal": equal(2),
    "1000 equal": equal(1000),
    "10 Zipf": zipf(10),
    "1000 Zipf": zipf(1000),
    "100 lognormal": lognormal(100),
    "big and small": one_big(2),
    "small and big": one_big(2, 0.001),
    "one big of 1000": one_big(1000),
    "golden": np.array([GOLDEN_RATIO, 1 - GOLDEN_RATIO]),
    "powers of the golden ratio": GOLDEN_RATIO ** np.arange(40),
    # The heaviest error found: a tiny child whose turns are the error of the two halves.
    "halves and a tiny one": np.array([1.0, 1.0, 6e-5, 1e-9]),
    "halves and many tiny ones": np.array([1.0, 1.0, *[1e-6] * 200]),
    # Bad for the rotation alone: 4.6 after two million draws, without the short blocks.
    "hard for a rotation": np.array([0.5436249914654229, 1 - 0.5436249914654229]),
}


# In the normal run one of each kind: many children, few, and those that are hard.
HARD = ("one big of 1000", "golden", "halves and a tiny one", "hard for a rotation")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in HARD else pytest.mark.soak) for n in LONG]
)
def test_two_million_draws_of_a_stream_stay_close_to_the_shares(name) -> None:
    check_run(LONG[name], 1, 2_000_000, key_of(name))


@pytest.mark.parametrize("num_streams", [2, 3, 5, 8, 13, 21, 34, 55, 64])
@pytest.mark.parametrize(
    "weights", [equal(2), equal(10), zipf(5), zipf(300), lognormal(30), one_big(2), one_big(50)],
    ids=["2 equal", "10 equal", "5 Zipf", "300 Zipf", "30 lognormal", "big", "big of 50"],
)  # fmt: skip
def test_run_of_many_streams_stays_close_to_the_shares(num_streams, weights) -> None:
    check_run(weights, num_streams, 60_000 // num_streams, key_of("run", num_streams))


def test_run_of_64_streams_and_two_million_draws_stays_close_to_the_shares() -> None:
    check_run(lognormal(20), 64, 2_000_000 // 64, key_of("long run"))


@given(keys, st.integers(1, 64))
@examples(20)
def test_all_ordered_neighbours_of_ten_equal_sources_occur(key, num_streams) -> None:
    children = BlendOrder(Weights([1.0] * 10), "exact", key, Stream(0, num_streams)).block(0, 8000)
    assert len(set(pairwise(children.tolist()))) == 100


# Schedules: the sum of the shares, draw by draw, instead of n times a share.


@pytest.mark.parametrize(
    ("kind", "most"),
    [("linear", 25), ("step", 12), ("cosine", 25)],
)
@pytest.mark.parametrize("num_streams", [1, 8])
def test_counts_follow_the_shares_of_a_schedule(kind, most, num_streams) -> None:
    """Draws independent of each other would be off by hundreds."""
    total = 300_000
    x = np.array([0.05, 0.3, 0.7]) * total * num_streams
    tree = Weights(
        [
            Schedule(kind, tuple(zip(x, (0.0, 1.0, 0.2), strict=True))),
            Schedule(kind, tuple(zip(x + 1234.5, (1.0, 0.0, 0.5), strict=True))),
            (0.7, Weights([0.2, 0.8])),
        ]
    )
    for index in {0, num_streams - 1}:
        stream = Stream(index, num_streams)
        children = BlendOrder(tree, "exact", key_of(kind), stream).block(0, total)
        hits = np.zeros((total, 4))
        hits[np.arange(total), children] = 1
        shares = tree.at(np.arange(total) * num_streams + index)
        assert np.abs(np.cumsum(hits - shares, axis=0)).max() < most
