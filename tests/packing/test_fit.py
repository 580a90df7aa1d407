"""First fit, sequential and best packs, and the bound: types, sizes and known values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.sizes import check_sizes
from energon_lite.extras.samplers.best import lower_bound, pack_best

from .test_streaming import text_lengths

EACH_PACKER = pytest.mark.parametrize(
    "pack", [first_fit_decreasing, first_fit, sequential, pack_best]
)
Pack = Callable[..., Any]


@pytest.mark.parametrize(
    ("lengths", "capacity", "max_samples", "bound"),
    [
        ([3, 3, 4], 5, None, 2 + 1),  # 3 + 3 do not fit
        ([5, 5, 5, 5], 10, None, 2),
        ([6, 6, 6, 4, 4, 4], 10, None, 3),
        ([6, 6, 6, 5, 5], 10, None, 4),  # L2: 5 fits beside no 6
        ([34] * 6, 100, None, 3),  # two in a pack, where the sum says 2.04
        ([26] * 8, 100, None, 3),
        ([1] * 10, 10, None, 1),
        ([1] * 10, 100, 3, 4),
        ([[1, 2], [1, 2], [8, 0]], [10, 2], None, 2),
        ([[9, 1], [9, 1], [9, 0]], [10, 2], None, 3),
        ([1 << 36] * 5000, 1 << 36, None, 5000),  # does not overflow
        ([], 8, None, 0),
    ],
)
def test_bound_sees_what_does_not_fit_together(lengths, capacity, max_samples, bound) -> None:
    assert lower_bound(lengths, capacity, max_samples=max_samples) == bound


@EACH_PACKER
def test_more_packs_than_axolotl_has_groups_of(pack: Pack) -> None:
    # No groups here: an item may go back to the first of 100,000 packs.
    lengths = [9] * 100_000 + [1] * 100_000
    assert len(pack(lengths, 10)) == (110_000 if pack is sequential else 100_000)


@EACH_PACKER
def test_bytes_as_lengths_need_no_memory_for_each(pack: Pack) -> None:
    capacity = 1 << 36
    lengths = text_lengths(500, capacity, median=capacity // 5)
    packs = pack(lengths, capacity)
    assert packs.sizes(lengths).max() <= capacity
    assert len(packs) >= lower_bound(lengths, capacity)


def test_text_lengths_are_packed_to_the_bound() -> None:
    lengths = text_lengths(100_000, 2048)
    bound = lower_bound(lengths, 2048)
    assert len(first_fit_decreasing(lengths, 2048)) <= 1.0005 * bound
    assert len(first_fit(lengths, 2048)) <= 1.01 * bound


def test_alignment_may_differ_by_resource() -> None:
    sizes = check_sizes([[5, 5], [8, 0]], [8, 6], align=[4, 3])
    assert sizes.lengths.tolist() == [[8, 6], [8, 0]]


@EACH_PACKER
@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [([], 8), (np.empty(0), 8), ([], [8, 2]), (np.empty((0, 2), np.int64), [8, 2])],
)
def test_no_samples_make_no_packs(pack: Pack, lengths: Any, capacity: Any) -> None:
    assert pack(lengths, capacity, max_samples=2).tolist() == []


@EACH_PACKER
def test_any_integer_type_makes_equal_packs(pack: Pack) -> None:
    lengths = [100, 3, 70, 30, 97, 50, 50]
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"):
        assert pack(np.array(lengths, dtype), 120) == pack(lengths, 120), dtype


@EACH_PACKER
def test_read_only_and_strided_lengths_are_taken_and_left_alone(pack: Pack) -> None:
    lengths = np.array([4, 0, 3, 0, 3, 0, 2, 0])[::2]
    wanted = pack(lengths.tolist(), 6)
    lengths.flags.writeable = False
    assert pack(lengths, 6) == wanted
    assert pack(np.frombuffer(lengths.tobytes(), np.int64), 6) == wanted
    assert lengths.tolist() == [4, 3, 3, 2]
