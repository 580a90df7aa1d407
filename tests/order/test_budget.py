"""Blending by tokens: every prefix holds its shares within about one longest sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import pytest

from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BudgetOrder
from energon_lite.order.schedules import Schedule, Weight, Weights

from ..helpers import pairwise

ONLY = Stream(0, 1)
LAG = 16
# Distance from the shares in longest samples: 0.7 is the largest found; where lengths are known
# later, the first draws are made knowing nothing.
BOUND, BOUND_AT_FIRST = 1.0, 0.5 * LAG


def lengths(mean: float, name: object, count: int = 400, sigma: float = 0.5) -> list[int]:
    """Lognormal lengths, the same on every machine."""
    words = random_words(key_of("lengths", name), size=count).astype(np.float64) / 2.0**64
    normal = NormalDist(0.0, sigma)
    drawn = np.exp([normal.inv_cdf(min(max(u, 1e-9), 1 - 1e-9)) for u in words.tolist()])
    rounded: list[int] = np.maximum(1, drawn * mean / drawn.mean()).astype(int).tolist()
    return rounded


class Run:
    """One stream of a blend of given lengths, known after `lag` further draws."""

    def __init__(
        self,
        weights: Sequence[Weight],
        of: list[list[int]],
        *,
        lag: int = 0,
        stream: Stream = ONLY,
        first_means: Sequence[float] | None = None,
        omitted: Callable[[int, int], bool] = lambda child, number: False,
    ) -> None:
        means = np.array(first_means or [1.0] * len(of))
        self.order = BudgetOrder(Weights(list(weights)), key_of("budget"), stream, means)
        self.of = of
        self.lag = lag
        self.places = [stream.index * len(samples) // stream.num_streams for samples in of]
        self.pending: deque[tuple[int, int, int]] = deque()
        self.omitted = omitted

    def draw(self) -> tuple[int, int]:
        order = self.order
        if len(self.pending) > self.lag:
            child, draw, tokens = self.pending.popleft()
            order.pending[child] -= 1
            order.count(child, draw, tokens)
        child = order.choose()
        number = self.places[child]
        self.places[child] += 1
        tokens = 0 if self.omitted(child, number) else self.of[child][number % len(self.of[child])]
        if self.lag:
            order.pending[child] += 1
            self.pending.append((child, order.draw, tokens))
        else:
            order.count(child, order.draw, tokens)
        order.draw += 1
        return child, tokens


CASES: dict[str, tuple[list[float], list[float]]] = {
    "1:1 of 400 and 4,000": ([1, 1], [400, 4000]),
    "3:1 of 400 and 4,000": ([3, 1], [400, 4000]),
    "1:3 of 400 and 4,000": ([1, 3], [400, 4000]),
    "1:1 of equal ones": ([1, 1], [500, 500]),
    "100:1": ([100, 1], [400, 4000]),
    "1:100": ([1, 100], [400, 4000]),
    "ten of doubling lengths": ([1] * 10, [20 * 2**i for i in range(10)]),
    "ten of rising weights": (list(range(1, 11)), [500] * 10),
    "fifty": ([1] * 50, [300, 3000] * 25),
    "one": ([2], [300]),
}


@pytest.mark.parametrize(
    ("case", "lag", "stream"),
    pairwise(list(CASES), [0, LAG], [Stream(0, 1), Stream(1, 4), Stream(3, 4)]),
)
def test_every_prefix_of_a_stream_is_within_one_longest_sample(case, lag, stream) -> None:
    weights, means = CASES[case]
    of = [lengths(mean, i) for i, mean in enumerate(means)]
    run = Run(weights, of, lag=lag, stream=stream)
    shares = np.array(weights) / sum(weights)
    longest = max(map(max, of))
    given = np.zeros(len(of))
    errors = []
    for _ in range(1500):
        child, tokens = run.draw()
        given[child] += tokens
        errors.append(float(np.abs(given - shares * given.sum()).max()) / longest)
    assert max(errors) <= (BOUND_AT_FIRST if lag else BOUND)
    assert max(errors[300:]) <= BOUND


@pytest.mark.parametrize("num_streams", [1, 12])
@pytest.mark.parametrize("case", list(CASES))
def test_first_means_keep_all_streams_near_from_the_start(case, num_streams) -> None:
    weights, means = CASES[case]
    of = [lengths(mean, i) for i, mean in enumerate(means)]
    in_bytes = [5.0 * mean for mean in means]
    streams = [Stream(s, num_streams) for s in range(num_streams)]
    runs = [Run(weights, of, lag=LAG, stream=s, first_means=in_bytes) for s in streams]
    shares = np.array(weights) / sum(weights)
    given = np.zeros(len(of))
    for _ in range(60):
        for run in runs:
            child, tokens = run.draw()
            given[child] += tokens
            assert np.abs(given - shares * given.sum()).max() <= 3.5 * max(map(max, of))


@pytest.mark.parametrize("lag", [0, LAG])
def test_shares_follow_a_schedule(lag) -> None:
    fading = Schedule("linear", ((0, 1.0), (2000, 0.0)))
    of = [lengths(400, "a"), lengths(4000, "b")]
    run = Run([fading, 1.0], of, lag=lag)
    asked = given = np.zeros(2)
    for draw in range(3000):
        child, tokens = run.draw()
        weight = max(0.0, 1 - draw / 2000)
        asked = asked + np.array([weight, 1.0]) / (weight + 1) * tokens
        given = given + np.eye(2)[child] * tokens
        assert np.abs(asked - given).max() <= 1.5 * max(of[1])
        assert draw < 2000 or child == 1 or draw < 2000 + 3
    assert given.min() > 0


def test_source_whose_samples_are_skipped_gets_more_draws() -> None:
    of = [lengths(400, "a"), lengths(400, "b")]
    run = Run([1, 1], of, lag=LAG, omitted=lambda child, number: child == 0 and number % 3 > 0)
    given, draws = [0, 0], [0, 0]
    for _ in range(4000):
        child, tokens = run.draw()
        given[child] += tokens
        draws[child] += 1
    assert abs(given[0] - given[1]) <= 2 * max(map(max, of))
    assert draws[0] / draws[1] == pytest.approx(3, rel=0.02)


def test_source_of_which_nothing_comes_through_does_not_stop_the_others() -> None:
    of = [lengths(400, "a"), lengths(400, "b")]
    run = Run([1, 1], of, lag=LAG, omitted=lambda child, number: child == 0)
    found = [run.draw()[0] for _ in range(300)]
    assert found.count(1) >= 8


def test_child_that_has_ended_is_chosen_no_more() -> None:
    run = Run([1, 1, 0], [lengths(400, i) for i in range(3)])
    first = [run.draw()[0] for _ in range(20)]
    assert set(first) == {0, 1}
    run.order.leave_out(0)
    assert {run.draw()[0] for _ in range(20)} == {1}


def test_streams_do_not_draw_in_step() -> None:
    of = [lengths(400, "a"), lengths(4000, "b")]
    runs = [Run([1, 1], of, stream=Stream(s, 8)) for s in range(8)]
    found = [[run.draw()[0] for _ in range(60)] for run in runs]
    second = [children.index(1, children.index(1) + 1) for children in found]
    assert len(set(second)) >= 4  # the long ones come at different draws
    steps: list[int] = []
    total = np.zeros(2)
    for _ in range(60):
        for run in runs:
            child, tokens = run.draw()
            total[child] += tokens
        steps.append(int(total[1] - total[0]))
    assert max(map(abs, steps[3:])) < 8 * max(of[1])


def test_only_the_proportion_of_weights_matters() -> None:
    of = [lengths(400, "a"), lengths(4000, "b")]
    one, other = Run([1, 3], of), Run([10, 30], of)
    assert [one.draw() for _ in range(200)] == [other.draw() for _ in range(200)]


def test_golden_order() -> None:
    """The first draws are the same on every machine; change them only with ITERATION ORDER."""
    words = [random_words(key_of("golden", i), size=99) for i in range(3)]
    of = [(50 * i + w % np.uint64(500 * i)).tolist() for i, w in enumerate(words, 1)]
    run = Run([1, 1, 2], of, lag=LAG, stream=Stream(1, 4))
    found = "".join(str(run.draw()[0]) for _ in range(60))
    assert found == "212021202120212021110001000010200021021000000210012200210021"
