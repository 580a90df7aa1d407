"""Blends: examples, the random mode, and children that are the same in every process."""

from __future__ import annotations

import numpy as np
import pytest

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Schedule, Weights


def scheduled() -> Weights:
    rising = Schedule("cosine", ((0, 0.0), (60, 2.0)))
    return Weights([rising, 1.0, (Schedule("linear", ((0, 1.0), (90, 0.5))), Weights([1.0, 3.0]))])


# A change of these is a change for every user: ITERATION ORDER in CHANGELOG.md.
GOLDEN = {
    "exact": "121200011000102010100120110002",
    "random": "010210011012002010211111010101",
    "schedule": "111323101233010301011003003110",
    "many, late": "10 102 1 219 0 2 3 4 249 0 19 20",
}


def first_children() -> dict[str, str]:
    key, stream = key_of("golden"), Stream(1, 3)
    constant = Weights([3.0, 2.0, 1.0])
    orders = {
        "exact": BlendOrder(constant, "exact", key, stream),
        "random": BlendOrder(constant, "random", key, stream),
        "schedule": BlendOrder(scheduled(), "exact", key, stream),
    }
    many = BlendOrder(Weights([1.0 / (i + 1) for i in range(300)]), "exact", 7, Stream(2, 5))
    return {
        **{name: "".join(map(str, order.block(0, 30))) for name, order in orders.items()},
        "many, late": " ".join(map(str, many.block(10**9, 12))),
    }


def test_children_are_those_written_down() -> None:
    assert first_children() == GOLDEN


def test_only_child_takes_every_draw() -> None:
    for weights in (Weights([2.0]), Weights([0.0, 5.0, 0.0])):
        for mode in ("exact", "random"):
            children = BlendOrder(weights, mode, 0, Stream(0, 2)).block(5, 1000)
            assert set(children.tolist()) == {weights.num_leaves // 2}


def test_draw_of_all_streams_together_takes_each_child_by_its_share() -> None:
    """64 streams, 4 sources: each cycle has about 16, 16, 16, 16 of them."""
    streams = [BlendOrder(Weights([1.0] * 4), "exact", 3, Stream(s, 64)) for s in range(64)]
    cycles = np.stack([stream.block(0, 2000) for stream in streams], axis=1)
    counts = np.stack([np.bincount(cycle, minlength=4) for cycle in cycles])
    assert np.abs(counts - 16).max() <= 4


def test_seeds_streams_and_passes_have_different_orders() -> None:
    weights = Weights([1.0] * 8)
    for mode in ("exact", "random"):
        orders = [
            BlendOrder(weights, mode, key, stream).block(0, 400)
            for key, stream in (
                (0, Stream(0, 4)), (1, Stream(0, 4)), (0, Stream(1, 4)), (0, Stream(0, 4, 1)),
            )
        ]  # fmt: skip
        for i, left in enumerate(orders):
            for right in orders[i + 1 :]:
                assert np.mean(left == right) < 0.3


@pytest.mark.parametrize("num_streams", [1, 3])
def test_random_draws_are_independent(num_streams) -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    for index in range(num_streams):
        order = BlendOrder(Weights(shares.tolist()), "random", 11, Stream(index, num_streams))
        children = order.block(0, 200_000)
        # Chi-square: 3 degrees of freedom, 16.3 has probability 0.001; 15 of them, 37.7.
        counts = np.bincount(children, minlength=4)
        assert ((counts - 200_000 * shares) ** 2 / (200_000 * shares)).sum() < 25
        pairs = np.bincount(4 * children[::2] + children[1::2], minlength=16)
        expected = 100_000 * np.outer(shares, shares).ravel()
        assert ((pairs - expected) ** 2 / expected).sum() < 55


def test_source_comes_and_goes_with_the_draw_of_the_run_that_its_schedule_names() -> None:
    tree = Weights([1.0, Schedule("step", ((0, 0.0), (1000, 9.0), (3000, 0.0)))])
    for mode in ("exact", "random"):
        for index in range(7):
            children = BlendOrder(tree, mode, 4, Stream(index, 7)).block(0, 600)
            draws = np.flatnonzero(children) * 7 + index
            assert 1000 <= draws.min() < 1000 + 7 * 10
            assert 3000 - 7 * 10 <= draws.max() < 3000
            assert len(draws) == pytest.approx(0.9 * 2000 / 7, abs=40 if mode == "random" else 5)


def test_draw_without_any_share_is_refused_by_its_number() -> None:
    tree = Weights([Schedule("step", ((0, 1.0), (100, 0.0)))])
    order = BlendOrder(tree, "exact", 0, Stream(0, 1))
    assert order.block(0, 96).tolist() == [0] * 96
    with pytest.raises(ValueError, match="all weights of the blend are 0 at draw 100;"):
        order.block(96, 6)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="blend mode 'fair' is not one of exact, random"):
        BlendOrder(Weights([1.0]), "fair", 0, Stream(0, 1))
