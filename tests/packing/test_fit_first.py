from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite.batching.best import lower_bound, pack_best
from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential

PACKERS = [first_fit_decreasing, first_fit, sequential, pack_best]


def text_lengths(num: int, capacity: int, median: int = 400) -> np.ndarray:
    drawn = np.random.Generator(np.random.Philox(0)).lognormal(np.log(median), 1.0, num)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


def test_longest_first_into_the_first_pack_with_room() -> None:
    packs = first_fit_decreasing([4, 3, 3, 2], 6)
    assert packs.tolist() == [[0, 3], [1, 2]]


def test_equal_lengths_go_by_index() -> None:
    assert first_fit_decreasing([5] * 7, 15).tolist() == [[0, 1, 2], [3, 4, 5], [6]]


def test_first_fit_goes_back_to_an_earlier_pack() -> None:
    assert first_fit([4, 5, 2, 1], 6).tolist() == [[0, 2], [1, 3]]


def test_tile_limit_and_token_limit_hold_at_once() -> None:
    # (tokens, tiles): by tokens alone, two packs would do.
    rows = [[300, 5], [300, 5], [300, 1], [100, 0]]
    assert first_fit_decreasing(rows, [1000, 6]).tolist() == [[0, 2, 3], [1]]
    assert first_fit(rows, [1000, 12]).tolist() == [[0, 1, 2, 3]]


def test_a_pack_that_is_full_in_one_resource_takes_what_needs_none_of_it() -> None:
    assert first_fit([[10, 6], [10, 0]], [20, 6]).tolist() == [[0, 1]]
    assert first_fit([[10, 6], [10, 0]], [20, 6], max_samples=1).tolist() == [[0], [1]]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize(("length", "per_pack"), [(1, 64), (21, 3), (22, 2), (32, 2), (33, 1)])
def test_all_equal(pack: Callable[..., Any], length: int, per_pack: int) -> None:
    packs = pack([length] * 100, 64)
    assert len(packs) == -(-100 // per_pack)
    assert np.diff(packs.offsets)[:-1].tolist() == [per_pack] * (len(packs) - 1)


@pytest.mark.parametrize("pack", PACKERS)
def test_single_sample_and_capacity_one(pack: Callable[..., Any]) -> None:
    assert pack([7], 7).tolist() == [[0]]
    assert pack([1, 1, 1], 1).tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("pack", PACKERS)
def test_capacities_around_powers_of_two_are_not_special(pack: Callable[..., Any]) -> None:
    # trl#3887: a tree of 2**k + 1 leaves
    for capacity in {max(1, (1 << exponent) + d) for exponent in range(1, 13) for d in (-1, 0, 1)}:
        lengths = text_lengths(300, capacity, median=max(1, capacity // 4))
        packs = pack(lengths, capacity)
        assert sorted(packs.indices.tolist()) == list(range(300)), capacity
        assert packs.sizes(lengths).max() <= capacity
        assert pack([capacity] * 3, capacity).tolist() == [[0], [1], [2]], capacity


@pytest.mark.parametrize("pack", PACKERS)
def test_more_packs_than_axolotl_has_groups_of(pack: Callable[..., Any]) -> None:
    # No groups here: an item may go back to the first of 100,000 packs.
    lengths = [9] * 100_000 + [1] * 100_000
    assert len(pack(lengths, 10)) == (110_000 if pack is sequential else 100_000)


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("capacity", [32_768, 1 << 20, 1 << 24])
def test_large_capacities(pack: Callable[..., Any], capacity: int) -> None:
    lengths = text_lengths(2000, capacity, median=capacity // 5)
    packs = pack(lengths, capacity)
    assert sorted(packs.indices.tolist()) == list(range(2000))
    assert packs.sizes(lengths).max() <= capacity


@pytest.mark.parametrize("pack", [first_fit_decreasing, first_fit, sequential, pack_best])
def test_bytes_as_lengths_need_no_memory_for_each(pack: Callable[..., Any]) -> None:
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
