"""The settings of batches of like lengths: what they refuse, and the limits that they set."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from energon_lite import Buckets


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Buckets(max_tokens=8).window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "batch_size", "expected"),
    [
        ({}, 3, [3, 3, 3]),
        ({"max_tokens": 16}, None, [16, 3, 0]),
        ({"max_tokens": 16}, 2, [2, 2, 0]),
        ({"max_tokens": 16, "align": 8}, None, [2, 2, 0]),
        ({"batch_size_fn": lambda length: 20 // length}, None, [20, 4, 1]),
        ({"batch_size_fn": lambda length: 20 // length - 1, "align": 4}, 3, [3, 1, 0]),
    ],
)
def test_limits_follow_the_longest_sample(settings, batch_size, expected) -> None:
    buckets = Buckets(**settings)
    lengths = np.array([1, 5, 17])
    assert buckets.list_sizes(lengths, batch_size).tolist() == expected
    assert buckets.too_long(lengths[:, None]).tolist() == [n < 1 for n in expected]


def test_settings_without_a_size_of_batches_are_refused() -> None:
    assert not Buckets().has_budget
    with pytest.raises(TypeError, match="nothing limits the size of a batch"):
        Buckets().list_sizes(np.array([1]))


def test_tokens_that_are_dropped_are_not_kept() -> None:
    dropping = Buckets(max_tokens=10, align=4, overlong="drop")
    assert dropping.longest == 8
    assert [dropping.kept_tokens(n) for n in (8, 9)] == [8, 0]
    assert dropping.kept_tokens({"tokens": 9, "tiles": 1}) == 0
    assert Buckets(max_tokens=10, overlong="alone").kept_tokens(11) == 11
    by_function = Buckets(batch_size_fn=lambda length: 9 - length, overlong="drop")
    assert by_function.longest == 0  # each is looked at
    assert [by_function.kept_tokens(n) for n in (8, 9)] == [8, 0]
    assert Buckets().longest == sys.maxsize
