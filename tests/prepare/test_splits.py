from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from energon_lite.extras.prepare.choose_shards import (
    parse_ratio,
    patterns_of,
    split_by_patterns,
    split_by_ratio,
)

NAMES = [f"train/s-{i}.tar" for i in range(6)] + [f"val/s-{i}.tar" for i in range(2)]


def counts(num_shards, ratio):
    parts = split_by_ratio([str(i) for i in range(num_shards)], parse_ratio(ratio))
    return [len(part) for part in parts.values()]


def test_ten_shards_by_7_2_1_lose_no_shard():
    """Energon's weakness 10: its float cuts are 7, 2, 0 and one shard in no part."""
    assert counts(10, "7,2,1") == [7, 2, 1]
    assert counts(10, "0.7, 0.2, 0.1") == [7, 2, 1]
    assert counts(10, [0.7, 0.2, 0.1]) == [7, 2, 1]


def test_each_share_makes_a_part_that_is_empty_only_by_a_share_of_zero():
    assert counts(3, "1,0,0") == [3, 0, 0]
    assert counts(4, "2,0,2") == [2, 0, 2]
    assert list(split_by_ratio(["a", "b"], parse_ratio("1,1"))) == ["train", "val"]
    for ratio in ({"dev": 1, "train": 2}, [("dev", 1), ("train", 2.0)]):
        parts = split_by_ratio(["a", "b", "c"], parse_ratio(ratio))
        assert list(parts.items()) == [("dev", ["a"]), ("train", ["b", "c"])]
    assert counts(4, "8,1,1") == [3, 0, 1]
    assert split_by_ratio(["a"], parse_ratio("1,1")) == {"train": [], "val": ["a"]}


@given(st.integers(1, 200), st.lists(st.integers(0, 50), min_size=3, max_size=3))
def test_a_ratio_deals_every_shard_once_and_in_order(num_shards, shares):
    assume(sum(shares))
    names = [str(i) for i in range(num_shards)]
    parts = split_by_ratio(names, {str(i): Fraction(share) for i, share in enumerate(shares)})
    assert [name for part in parts.values() for name in part] == names
    for share, part in zip(shares, parts.values(), strict=True):
        assert abs(len(part) - num_shards * share / sum(shares)) < 1
        assert share or not part


@pytest.mark.parametrize("ratio", ["8", "8,1,1,1", "a,b,c", "0,0,0", "1,-1,1", "", "1/0,1,1"])
def test_a_wrong_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="give two or three numbers"):
        parse_ratio(ratio)


def test_patterns_are_expanded_and_matched_from_the_start():
    pairs = patterns_of({"train": "train/.*", "val": [r"val/s-{0,1}\.tar"]})
    parts = split_by_patterns(NAMES, pairs)
    assert parts == {"train": NAMES[:6], "val": NAMES[6:]}
    parts = split_by_patterns(NAMES, [("x", "val"), ("x", "train/s-{5..4}")])
    assert parts == {"x": [*NAMES[4:6], *NAMES[6:]]}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("train", "train/*.tar")], r"matches none of the 8 .* glob; try 'train/\.\*"),
        ([("train", "*.tar")], "no regular expression .* glob; try"),
        ([("train", "s-0")], "matches none .* matched from the start"),
        ([("train", ".*"), ("val", "val/")], "'val/s-0.tar' matches .* both 'train' and 'val'"),
        ([("train", "a{1")], "Unbalanced braces"),
    ],
)
def test_patterns_that_match_nothing_or_too_much_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        split_by_patterns(NAMES, pairs)
