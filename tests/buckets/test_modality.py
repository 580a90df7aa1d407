"""Which group comes when, and the settings of batches of one group."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from energon_lite import ModalitySplit
from energon_lite.batching.modality import GroupSchedule

BOTH = {"images": 15, "text": 1}
shares_of_groups = st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(
    lambda shares: sum(share > 0.01 for share in shares) > 0
)


@given(shares_of_groups, st.integers(0, 2**31), st.integers(0, 3))
def test_every_prefix_is_within_five_of_the_shares(
    shares: list[float], seed: int, pass_index: int
) -> None:
    schedule = GroupSchedule(shares, seed, pass_index)
    counts = [0] * len(shares)
    for cycle in range(600):
        counts[schedule.group(cycle)] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - (cycle + 1) * share / sum(shares)) < 5
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0)


def test_group_of_a_cycle_does_not_depend_on_earlier_queries() -> None:
    forth = GroupSchedule([3, 1, 1], seed=7)
    in_order = [forth.group(cycle) for cycle in range(1_000)]
    again = GroupSchedule([3, 1, 1], seed=7)
    assert [again.group(cycle) for cycle in reversed(range(1_000))] == in_order[::-1]
    assert GroupSchedule([3, 1, 1], seed=7).group(10**12) in (0, 1, 2)


def test_seed_and_pass_determine_the_order() -> None:
    def order(**place: int) -> list[int]:
        schedule = GroupSchedule([1, 1], **{"seed": 0, **place})
        return [schedule.group(cycle) for cycle in range(100)]

    assert order() == order()
    assert order() != order(seed=1)
    assert order() != order(pass_index=1)


def test_groups_follow_each_other_in_all_ways() -> None:
    schedule = GroupSchedule([1, 1, 1], seed=3)
    order = [schedule.group(cycle) for cycle in range(500)]
    assert len(set(itertools.pairwise(order))) == 9


def test_windows_of_rarer_groups_are_as_much_shorter() -> None:
    split = ModalitySplit("modality", shares=BOTH, window=64)
    assert split.windows([15, 1]) == [64, 4]
    assert split.windows([1, 0.001, 0]) == [64, 1, 1]


def test_limits_leave_room_for_what_reading_ahead_brings() -> None:
    split = ModalitySplit("modality", shares=BOTH, window=64)
    images, text = split.surplus_limits([15, 1], batch_size=16)
    assert images > 2 * 64 * 16
    assert text > 2 * 4 * 16
    # One batch of a group of 1 in 1,000 is only found among 1,000 of the other.
    assert split.surplus_limits([999, 1], batch_size=1)[0] > 999


def test_config_is_json_and_has_what_decides_the_content() -> None:
    mapping = ModalitySplit({"b": ("x", 1), "a": None})
    for split in (mapping, ModalitySplit("source"), ModalitySplit(len, shares={1: 1})):
        assert json.loads(json.dumps(split.config())) == split.config()
    assert mapping.config()["group_by"] == [["a", None], ["b", ["x", 1]]]
    # What may change between a checkpoint and its resume.
    assert ModalitySplit("source", max_surplus=1).config() == ModalitySplit("source").config()
    assert ModalitySplit("source", end="pad").config() != ModalitySplit("source").config()
