"""Batches by length and by group, chosen without data."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import Buckets, ModalitySplit
from energon_lite.batching.buckets import BucketCollector
from energon_lite.batching.modality import Groups, GroupSchedule, ModalityCollector
from energon_lite.core.topology import Stream

from ..helpers import pairwise as pairwise_rows
from .collecting import Make, Run, check_resume

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 30, 400).tolist()
GROUPS = RNG.choice(2, 400, p=[0.75, 0.25]).tolist()
BOTH = Groups(("images", "text"), (3, 1))


def bucket_collector(
    drops_last: bool = False, batch_size: int | None = None, **settings: Any
) -> Make:
    buckets = Buckets(**{"max_tokens": 64, "window": 50, **settings})
    return lambda: BucketCollector(buckets, batch_size, drops_last, key=7)


def modality_collector(
    index: int = 0, is_endless: bool = False, batch_size: int = 4, **settings: Any
) -> Make:
    arguments = {"shares": {"images": 3, "text": 1}, "window": 5, "max_surplus": 1, **settings}
    split = ModalitySplit("modality", **arguments)
    stream = Stream(index, 2)
    return lambda: ModalityCollector(split, BOTH, batch_size, 3, stream, is_endless)


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("groups", [[0] * 400, GROUPS])
@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 3}, {"window": 1}, {"align": 8}, {"longest_first": True},
     {"max_tokens": None, "batch_size": 6}, {"batch_size": 3},
     {"max_tokens": None, "batch_size": 20, "window": 4}],
)  # fmt: skip
def test_buckets(settings: dict[str, Any], groups: list[int], drops_last: bool) -> None:
    run = check_resume(bucket_collector(drops_last, **settings), groups, LENGTHS)
    if "max_tokens" in settings:  # only the last batch of each group may be smaller
        short = sum(len(batch) < settings["batch_size"] for batch in run.lists)
        assert short <= (0 if drops_last else len(set(groups)))
    for batch in run.lists:
        assert len({groups[n] for n in batch}) == 1
        longest = -(-max(LENGTHS[n] for n in batch) // settings.get("align", 1))
        if settings.get("max_tokens", 64):
            assert longest * settings.get("align", 1) * len(batch) <= 64
    assert len(run.dropped) < 64 * len(set(groups)) if drops_last else not run.dropped


SPREAD = [1 + (37 * n) % 101 for n in range(1200)]


def areas_of(run: Run) -> Any:
    return np.array([len(batch) * max(SPREAD[n] for n in batch) for batch in run.all().lists])


def test_larger_windows_pad_less() -> None:
    shares = []
    for window in (8, 32, 256):
        make = bucket_collector(max_tokens=None, batch_size=4, window=window)
        shares.append(1 - sum(SPREAD) / areas_of(Run(make, [0] * 1200, SPREAD)).sum())
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.04


@pytest.mark.parametrize("longest_first", [False, True])
def test_each_window_has_another_order_and_only_the_first_may_begin_with_its_longest(
    longest_first: bool,
) -> None:
    make = bucket_collector(max_tokens=None, batch_size=4, window=60, longest_first=longest_first)
    areas = areas_of(Run(make, [0] * 1200, SPREAD)).reshape(20, 15)
    assert not longest_first or areas[0].argmax() == 0
    assert (areas.argmax(1) == 0).sum() < 8
    assert len({tuple(order) for order in areas.argsort(1).tolist()}) > 15


def test_the_next_window_is_read_at_the_pace_of_this_one() -> None:
    run = Run(bucket_collector(max_tokens=None, batch_size=5), [0] * 400, LENGTHS)
    reads = []
    while run.step():
        reads.append(run.num_read)
    assert reads[0] == 55
    assert {b - a for a, b in pairwise(reads[:-11])} == {5}


def test_a_sample_that_is_too_long_is_alone() -> None:
    lengths = [100 if n % 50 == 3 else length for n, length in enumerate(LENGTHS)]
    run = check_resume(bucket_collector(overlong="alone"), [0] * 400, lengths)
    assert [batch for batch in run.lists if 3 in batch] == [[3]]


@pytest.mark.parametrize(
    ("groups", "end", "settings"),
    pairwise_rows(
        [[0] * 400, [1] * 400, GROUPS, [1, 0, 0, 0] * 100, [0, 0, 1] * 133],
        ["keep", "drop", "pad"],
        [{}, {"window": 1}, {"longest_first": True}, {"window": 64}],
    ),
)
def test_modality(end: Any, groups: list[int], settings: dict[str, Any]) -> None:
    run = check_resume(modality_collector(end=end, **settings), groups, LENGTHS)
    schedule = GroupSchedule(BOTH.shares, 3)
    for cycle, batch in enumerate(run.lists):
        members = {groups[n if n >= 0 else ~n] for n in batch}
        assert len(members) == 1
        # Dropping ends the stream with the cycle of which there is no full batch.
        if (cycle < len(run.lists) // 2 or end == "drop") and len(set(groups)) == 2:
            assert members == {schedule.group(cycle)}
        assert len(batch) == 4 or end == "keep"
    assert bool(run.dropped) <= (end == "drop")


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=60),
    st.sampled_from(["keep", "drop", "pad", "buckets"]),
)
def test_any_samples_are_in_one_batch_each(samples: list[tuple[int, int]], end: Any) -> None:
    """Also none at all, none of a group, fewer than half a batch of it, and of no length."""
    groups, lengths = [group for group, _ in samples], [length for _, length in samples]
    if end == "buckets":
        check_resume(bucket_collector(window=10), groups, [max(1, length) for length in lengths])
        return
    run = check_resume(modality_collector(end=end), groups, lengths)
    assert end != "pad" or all(len(batch) == 4 for batch in run.lists)


def test_only_the_first_window_of_a_group_may_be_from_long_to_short() -> None:
    run = Run(modality_collector(longest_first=True, window=9), [0] * 400, LENGTHS).all()
    longest = [max(LENGTHS[n] for n in batch) for batch in run.lists]
    assert longest[:9] == sorted(longest[:9], reverse=True)
    assert all(longest[k : k + 9] != sorted(longest[k : k + 9])[::-1] for k in range(9, 90, 9))


def test_padding_repeats_samples_of_the_last_batch_of_the_group() -> None:
    run = Run(modality_collector(end="pad"), [0] * 15 + [1] * 2, LENGTHS).all()
    by_group = {group: [b for b in run.lists if (b[0] < 15) == (group == 0)] for group in (0, 1)}
    assert [~n for n in by_group[0][-1] if n < 0] == by_group[0][-2][:1]
    (only,) = by_group[1]
    assert [~n for n in only[2:]] == only[:2] == [15, 16]


def one_group(index: int) -> ModalityCollector:
    split = ModalitySplit("modality", shares={"images": 1, "text": 0}, window=16)
    return ModalityCollector(split, Groups(("images", "text"), (1, 0)), 4, 3, Stream(index, 2))


@pytest.mark.parametrize(
    "make", [one_group, lambda _: bucket_collector(max_tokens=None, batch_size=4, window=64)()]
)
def test_all_streams_have_batches_of_similar_length_at_the_same_step(make: Any) -> None:
    def means(index: int) -> list[float]:
        lengths = np.random.default_rng(index).integers(1, 1000, 4000)
        run = Run(lambda: make(index), [0] * 4000, lengths)
        for _ in range(500):
            run.step()
        return [float(np.mean(lengths[batch])) for batch in run.lists]

    assert np.corrcoef(means(0), means(1))[0, 1] > 0.9


def test_a_surplus_is_dropped_up_to_a_limit() -> None:
    groups = [0] + [1] * 3000
    run = Run(modality_collector(), groups, [1] * 3001)
    while not run.dropped:
        assert run.step() or run.dropped
    strict = Run(modality_collector(max_surplus=0.05), groups, [1] * 3001)
    with pytest.raises(
        ValueError, match=r"group 'text' that its share does not take.*max_surplus above 0\.05"
    ):
        strict.all()


def test_a_surplus_is_counted_over_resumes() -> None:
    def to_the_end(run: Run, resumes: bool) -> None:
        while run.step():
            if resumes:
                run.resume()

    runs = [Run(modality_collector(max_surplus=0.05), [0, 1] * 2000, [1] * 4000) for _ in range(2)]
    for run in runs:
        with pytest.raises(ValueError, match="that its share does not take"):
            to_the_end(run, resumes=run is runs[1])
    assert len(runs[0].lists) > 100
    assert runs[0].lists == runs[1].lists


@pytest.mark.parametrize("make", [bucket_collector(), modality_collector()])
def test_lists_of_a_removed_source_have_what_is_left(make: Make) -> None:
    run = Run(make, GROUPS, LENGTHS)
    for _ in range(9):
        run.step()
    run.resume(removed=lambda n: n % 3 == 0)
    num, left = len(run.lists), run.buffered
    assert left
    assert all(n % 3 for n in left)
    run.all()
    assert left <= {n for batch in run.lists[num:] for n in batch}
