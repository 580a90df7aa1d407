from __future__ import annotations

import pytest

from energon_lite.extras.samplers.best import lower_bound


@pytest.mark.parametrize(
    ("lengths", "capacity", "bound"),
    [
        ([3, 3, 4], 5, 2 + 1),  # 3 + 3 do not fit
        ([5, 5, 5, 5], 10, 2),
        ([6, 6, 6, 4, 4, 4], 10, 3),
        ([6, 6, 6, 5, 5], 10, 4),  # L2: 5 fits beside no 6
        ([34] * 6, 100, 3),  # two in a pack, where the sum says 2.04
        ([26] * 8, 100, 3),
        ([1] * 10, 10, 1),
    ],
)
def test_bound_sees_what_does_not_fit_together(
    lengths: list[int], capacity: int, bound: int
) -> None:
    assert lower_bound(lengths, capacity) == bound


def test_bound_counts_samples_where_they_are_limited() -> None:
    assert lower_bound([1] * 10, 100, max_samples=3) == 4


def test_bound_is_the_largest_over_resources() -> None:
    assert lower_bound([[1, 2], [1, 2], [8, 0]], [10, 2]) == 2
    assert lower_bound([[9, 1], [9, 1], [9, 0]], [10, 2]) == 3


def test_bound_does_not_overflow() -> None:
    capacity = 1 << 36
    assert lower_bound([capacity] * 5000, capacity) == 5000
