from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.extras.samplers.best import lower_bound, pack_best

PACKERS = [first_fit_decreasing, first_fit, sequential, pack_best]


def text_lengths(num: int, capacity: int, median: int = 400) -> np.ndarray:
    drawn = np.random.Generator(np.random.Philox(0)).lognormal(np.log(median), 1.0, num)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


@pytest.mark.parametrize("pack", PACKERS)
def test_more_packs_than_axolotl_has_groups_of(pack: Callable[..., Any]) -> None:
    # No groups here: an item may go back to the first of 100,000 packs.
    lengths = [9] * 100_000 + [1] * 100_000
    assert len(pack(lengths, 10)) == (110_000 if pack is sequential else 100_000)


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
