"""Packs, groups and orders, chosen without data."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import ModalitySplit, Packing
from energon_lite.balance import CostModel
from energon_lite.batching.balance_orders import BalancedOrder
from energon_lite.batching.collector import Collector, Samples
from energon_lite.batching.modality_steps import ModalitySteps
from energon_lite.batching.one_by_one import GroupCollector, SelectedPacks, ShuffleCollector
from energon_lite.batching.shared_packs import SharedPacks
from energon_lite.batching.stream_packs import StreamPacks
from energon_lite.batching.window_packs import WindowPacks

from .collecting import Make, Run, check_resume

RNG = np.random.default_rng(1)
LENGTHS = RNG.integers(1, 30, 300).tolist()
GROUPS = RNG.choice(3, 300).tolist()
COST = CostModel(token=1, token_squared=0.1)


def packing(**settings: Any) -> Packing:
    return Packing(**{"capacity": 64, "buffer_size": 20, **settings})


def pairs(numbers: list[int], is_last: bool) -> tuple[list[list[int]], list[int]]:
    """Packs of two; the last of an odd number waits, or is alone at the end."""
    packs = [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=False)]
    rest = numbers[2 * len(packs) :]
    return ([*packs, rest], []) if is_last and rest else (packs, rest)


def shared(index: int = 0, num_streams: int = 1, **settings: Any) -> Make:
    rules = packing(lengths="x", balance="global_window", cost=COST, balance_window=4, **settings)
    return lambda: SharedPacks(rules, 90, index, num_streams, key=3, packs_per_batch=2)


def part(num_streams: int = 1, index: int | None = 0, **settings: Any) -> Make:
    rules = packing(lengths="x", balance="global_window", cost=COST, balance_window=4, **settings)
    return lambda: SharedPacks(rules, 30 * num_streams, index, num_streams, key=3, is_part=True)


def steps(index: int = 0, num_streams: int = 1, **settings: Any) -> Make:
    split = ModalitySplit("source", lengths="x", window=4, **settings)
    return lambda: ModalitySteps(split, 3, 60, index, num_streams, key=3)


MAKES: dict[str, Make] = {
    "stream": lambda: StreamPacks(packing()),
    "stream at prices": lambda: StreamPacks(packing(capacity=40, buffer_size=32)),
    "stream, dropped": lambda: StreamPacks(packing(end_of_data="drop")),
    "stream, last dropped": lambda: StreamPacks(packing(drop_last=True, max_samples=3)),
    "window": lambda: WindowPacks(packing(algorithm="best"), 70),
    "window that grows": lambda: WindowPacks(packing(algorithm="first_fit"), 3, grows=True),
    "window, last dropped": lambda: WindowPacks(
        packing(algorithm="sequential", drop_last=True), 50
    ),
    "shared": shared(),
    "shared, dropped": shared(end_of_data="drop"),
    "shared by a part": part(capacity=50),
    "steps": steps(),
    "steps, dropped": steps(end="drop"),
    "groups": lambda: GroupCollector(),
    "groups, dropped": lambda: GroupCollector(drops_last=True),
    "shuffle": lambda: ShuffleCollector(17, key=5),
    "selected": lambda: SelectedPacks(15, pairs),
    "selected, dropped": lambda: SelectedPacks(15, pairs, drops_last=True),
    "balanced": lambda: BalancedOrder(8, seed=4),
}


def lengths_for(name: str) -> list[int]:
    """Lengths as the collector takes them: sizes of groups, or the bits of costs."""
    if name.startswith("groups"):
        return [group + 2 for group in GROUPS]
    if name == "balanced":
        return np.array(LENGTHS, np.float64).view(np.int64).tolist()
    return LENGTHS


@pytest.mark.parametrize("name", MAKES)
def test_each_sample_is_in_one_list_and_a_resume_changes_nothing(name: str) -> None:
    run = check_resume(MAKES[name], GROUPS, lengths_for(name))
    assert bool(run.dropped) == ("dropped" in name)
    if name.startswith("selected"):  # never more than a full buffer
        given = [0, *np.cumsum([len(own) for own in run.lists]).tolist()]
        assert max(read - num for read, num in zip(run.reads, given, strict=False)) == 15
    if not name.startswith(("shuffle", "selected", "balanced")):
        assert all(len({GROUPS[n] for n in own}) == 1 for own in run.lists)
    if name.startswith(("stream", "window", "shared")):
        assert max(sum(LENGTHS[n] for n in own) for own in run.lists) <= 64


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), max_size=60),
    st.sampled_from(["stream", "window", "window that grows", "shared", "steps", "shuffle"]),
)
def test_any_samples_are_in_one_list_each(samples: list[tuple[int, int]], name: str) -> None:
    groups, lengths = [g for g, _ in samples], [n for _, n in samples]
    check_resume(MAKES[name], groups, lengths)


@pytest.mark.parametrize("name", ["stream", "window"])
def test_a_sample_longer_than_a_pack_is_alone(name: str) -> None:
    lengths = [200 if n % 40 == 7 else length for n, length in enumerate(LENGTHS)]
    rules = packing(overlong="alone", algorithm="streaming" if name == "stream" else "best")
    make = (lambda: StreamPacks(rules)) if name == "stream" else (lambda: WindowPacks(rules, 70))
    run = check_resume(make, [0] * 300, lengths)
    assert [own for own in run.lists if any(n % 40 == 7 for n in own)] == [
        [n] for n in range(7, 300, 40)
    ]


def test_a_buffer_that_is_full_for_several_packs_resumes_between_them() -> None:
    # Long samples after short ones: the buffer may be smaller than it is.
    check_resume(MAKES["stream"], [0] * 500, [1] * 300 + [60] * 200)


@pytest.mark.parametrize("make", [shared, steps])
def test_streams_that_share_a_plan_have_all_of_it(make: Any) -> None:
    runs = [Run(make(index, 3), GROUPS, LENGTHS) for index in range(3)]
    for run in runs:  # what is of other streams is never returned to this one
        while (found := next_list(run)) is not None:
            run.lists.append(found)
    counts = [len(run.lists) for run in runs]
    assert counts == runs[0].collector.num_lists.tolist()  # type: ignore[attr-defined]
    members = Counter(n for run in runs for own in run.lists for n in own if n >= 0)
    assert set(members.values()) == {1}
    assert len(members) > 270


@pytest.mark.parametrize("name", ["window", "window that grows", "shared", "steps"])
def test_a_window_of_no_samples_has_no_lists(name: str) -> None:
    collector = MAKES[name]()
    empty = np.empty(0, np.int64)
    collector.add(Samples(empty, empty, np.empty((0, 1), np.int64)))
    assert collector.next(0, has_ended=True) is None
    assert list(collector.leftover()) == []


def test_windows_of_equal_samples_have_their_steps_in_different_orders() -> None:
    lengths = [n % 60 for n in range(180)]
    run = Run(steps(), [0] * 180, lengths)
    while run.step():
        pass
    of_lists = [max(lengths[n] for n in own) for own in run.lists]
    assert sorted(of_lists[:20]) == sorted(of_lists[20:40])
    assert of_lists[:20] != of_lists[20:40]


def test_streams_have_whole_batches_of_one_group_at_the_same_step() -> None:
    whole = Run(MAKES["shared"], GROUPS, LENGTHS)
    collectors: list[Any] = [shared(index, 3)() for index in range(3)]
    for start in (0, 90, 180):
        for collector in collectors:
            collector.add(whole.samples(range(start, start + 90)))
        windows = [collector.next_window(False).tolist() for collector in collectors]
        steps = list(zip(*windows, strict=True))
        assert steps
        for first, second in zip(steps[::2], steps[1::2], strict=True):
            assert len({GROUPS[n] for own in first + second for n in own}) == 1


def test_parts_of_the_streams_have_steps_of_similar_cost_at_once() -> None:
    """Though they are of other samples and sizes, and read other numbers of windows."""

    def costs(num_streams: int, seed: int) -> list[float]:
        drawn = np.random.default_rng(seed).exponential(9, 900 * num_streams).clip(1, 64)
        lengths = drawn.astype(np.int64).tolist()
        run, found = Run(part(num_streams, None), [0] * len(lengths), lengths), list[float]()
        while not run.has_ended and (own := next_list(run)) is not None:
            found.append(sum(COST.combine(lengths[n], lengths[n] ** 2) for n in own))
        return np.reshape(found[: 120 * num_streams], (120, num_streams)).sum(axis=1).tolist()

    assert np.corrcoef(costs(3, 0), costs(5, 1))[0, 1] > 0.5
    assert abs(np.corrcoef(costs(3, 0)[1:], costs(5, 1)[:-1])[0, 1]) < 0.3


def test_a_part_drops_no_more_than_a_step_at_the_end() -> None:
    run = Run(part(3, None, drop_last=True), [0] * 280, LENGTHS[:280]).all()
    assert 0 < len(run.dropped) < 30
    assert len(run.lists) % 3 == 0


def test_a_step_that_some_streams_of_a_part_lack_comes_last() -> None:
    costs = []
    for index in range(3):
        run = Run(part(3, index), [0] * 280, LENGTHS[:280])
        costs.append(list[int]())
        while (own := next_list(run)) is not None:
            costs[-1].append(sum(LENGTHS[n] for n in own))
    assert [*map(len, costs)] == [22, 23, 23]
    assert min(own[-1] for own in costs) == min(map(min, costs))


def next_list(run: Run) -> list[int] | None:
    collector: Collector = run.collector
    while (found := collector.next(len(run.lists), run.has_ended)) is None:
        if run.has_ended:
            return None
        stop = min(run.num_read + collector.num_wanted, len(run.groups))
        run.has_ended = run.num_read + collector.num_wanted > len(run.groups)
        if stop > run.num_read:
            collector.add(run.samples(range(run.num_read, stop)))
        run.num_read = stop
    return list(found)


def test_packs_in_balance_have_the_same_rhythm_in_all_streams() -> None:
    def costs(seed: int) -> list[float]:
        lengths = np.random.default_rng(seed).exponential(100, 512)
        run = Run(lambda: BalancedOrder(64, seed=9), [0] * 512, lengths.view(np.int64).tolist())
        return [float(lengths[own[0]]) for own in run.all().lists]

    assert np.corrcoef(costs(0), costs(1))[0, 1] > 0.9


def test_packs_of_a_window_come_in_the_order_of_their_oldest_samples() -> None:
    run = Run(lambda: WindowPacks(packing(algorithm="best"), 300), [0] * 300, LENGTHS)
    for _ in range(40):
        run.step()
    firsts = [min(own) for own in run.lists]
    assert all(a < b for a, b in pairwise(firsts))


@pytest.mark.parametrize("name", MAKES)
def test_counts_of_another_collector_are_refused_or_lead_nowhere_new(name: str) -> None:
    run = Run(MAKES[name], GROUPS, lengths_for(name))
    for _ in range(5):
        run.step()
    state = run.collector.state()
    counts, rows = state.counts, state.rows(sorted(run.buffered))
    for field in counts:
        other = MAKES[name]()
        with pytest.raises((ValueError, TypeError, KeyError)):
            other.restore({**counts, field: "many"}, run.samples(rows[:, 0]), rows[:, 1:])
