from __future__ import annotations

import numpy as np
import pytest

from energon_lite.batching.lists import Lists


def packs_of(*rows: list[int]) -> Lists:
    offsets = np.cumsum([0, *map(len, rows)])
    return Lists(np.array([i for row in rows for i in row], np.int64), offsets)


def test_packs_are_rows_of_indices() -> None:
    packs = packs_of([0, 3], [1], [2, 4, 5])
    assert len(packs) == 3
    assert [pack.tolist() for pack in packs] == packs.tolist() == [[0, 3], [1], [2, 4, 5]]
    assert packs[-1].tolist() == [2, 4, 5]
    assert repr(packs) == "Lists(3 packs of 6 samples)"


def test_a_pack_is_a_view() -> None:
    packs = packs_of([0, 3], [1])
    assert np.shares_memory(packs[0], packs.indices)
    assert all(np.shares_memory(pack, packs.indices) for pack in packs)


@pytest.mark.parametrize("index", [2, -3])
def test_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"pack {index} of 2 packs"):
        packs_of([0, 3], [1])[index]


def test_sizes_add_up_each_pack() -> None:
    packs = packs_of([0, 3], [], [1, 2])
    assert packs.sizes([5, 1, 2, 4]).tolist() == [9, 0, 3]
    assert packs.sizes(np.array([[5, 1], [1, 1], [2, 0], [4, 1]])).tolist() == [
        [9, 2], [0, 0], [3, 1]
    ]  # fmt: skip


def test_sizes_of_small_integer_types_do_not_overflow() -> None:
    packs = packs_of([0, 1, 2], [3])
    assert packs.sizes(np.full(4, 200, np.uint8)).tolist() == [600, 200]
    assert packs.efficiency(np.full(4, 200, np.uint8), 800) == 0.5


def test_efficiency_is_the_filled_share() -> None:
    packs = packs_of([0, 1], [2])
    assert packs.efficiency([3, 1, 2], 4) == pytest.approx(6 / 8)
    shares = packs.efficiency([[3, 1], [1, 1], [2, 0]], [4, 2])
    assert np.asarray(shares).tolist() == pytest.approx([6 / 8, 2 / 4])
    assert packs_of().efficiency([], 4) == 1.0


def test_equality_is_of_contents() -> None:
    assert packs_of([0, 1], [2]) == packs_of([0, 1], [2])
    assert packs_of([0, 1], [2]) != packs_of([0], [1, 2])
    assert packs_of([0, 1]) != packs_of([1, 0])
    assert packs_of([0]) != [[0]]
