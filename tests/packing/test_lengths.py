from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.sizes import check_sizes
from energon_lite.extras.samplers.best import lower_bound, pack_best

PACKERS = [first_fit_decreasing, first_fit, sequential, pack_best]


@pytest.mark.parametrize("pack", [*PACKERS, lower_bound])
def test_too_long_sample_is_named_with_what_to_do(pack: Callable[..., Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^Sample 2 has length 3000, above the capacity of 2048\. Truncate, split or drop",
    ):
        pack([5, 2048, 3000, 4000], 2048)


@pytest.mark.parametrize("pack", [*PACKERS, lower_bound])
@pytest.mark.parametrize("value", [0, -1])
def test_empty_or_negative_sample_is_named(pack: Callable[..., Any], value: int) -> None:
    with pytest.raises(ValueError, match=f"^Sample 1 has length {value}, below 1"):
        pack([5, value, 9], 8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 1], [9, 1]], r"Sample 1 has length \[9, 1\], above the capacity of \[8, 2\]"),
        ([[1, 1], [0, 0]], r"Sample 1 has length \[0, 0\], below 1"),
        ([[1, 1], [3, -1]], r"Sample 1 has length \[3, -1\], negative"),
    ],
)
def test_sample_out_of_range_in_one_resource_is_named(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first_fit_decreasing(rows, [8, 2])


@pytest.mark.parametrize(
    "lengths",
    [[1.0, 2.0], [float("nan")], np.array([True]), np.array(["a"]), [1, None], [1 << 70]],
)
def test_what_is_not_integers_is_refused(lengths: Any) -> None:
    with pytest.raises(TypeError, match="lengths must be integers"):
        first_fit_decreasing(lengths, 8)


def test_floats_are_refused_with_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"\.astype\(np\.int64\)"):
        first_fit_decreasing([1.5], 8)
    with pytest.raises(TypeError, match="capacity must be integers"):
        first_fit_decreasing([1], 8.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [([[1, 2]], 8), ([1, 2], [8, 9]), ([[1, 2]], [8]), (5, 8), ([[[1]]], [8]), ([1], [[8]])],
)
def test_shapes_that_do_not_fit_are_refused(lengths: Any, capacity: Any) -> None:
    with pytest.raises(ValueError, match="shape"):
        first_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 1 << 40}, "capacity is 1099511627776"),
        ({"capacity": 8, "max_samples": 0}, "max_samples=0"),
        ({"capacity": 8, "align": 0}, "align is 0"),
        ({"capacity": 8, "align": [1, 2]}, "align has 2 values for 1 resources"),
    ],
)
def test_impossible_limits_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first_fit_decreasing([1], **arguments)


def test_sample_that_alignment_makes_too_long_is_named() -> None:
    with pytest.raises(
        ValueError,
        match="Sample 1 of length 97 is 112 when aligned to 16, above the capacity of 100",
    ):
        first_fit_decreasing([96, 97], 100, align=16)


def test_alignment_may_differ_by_resource() -> None:
    sizes = check_sizes([[5, 5], [8, 0]], [8, 6], align=[4, 3])
    assert sizes.lengths.tolist() == [[8, 6], [8, 0]]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("lengths", [[], np.empty(0), np.empty(0, np.int32)])
def test_no_samples_make_no_packs(pack: Callable[..., Any], lengths: Any) -> None:
    packs = pack(lengths, 8, max_samples=2)
    assert len(packs) == 0
    assert packs.tolist() == []
    assert lower_bound(lengths, 8) == 0


@pytest.mark.parametrize("pack", [first_fit_decreasing, first_fit, sequential, pack_best])
@pytest.mark.parametrize("lengths", [[], np.empty((0, 2), np.int64)])
def test_no_samples_of_several_resources_make_no_packs(
    pack: Callable[..., Any], lengths: Any
) -> None:
    assert len(pack(lengths, [8, 2])) == 0


@pytest.mark.parametrize("pack", PACKERS)
def test_any_integer_type_makes_equal_packs(pack: Callable[..., Any]) -> None:
    lengths = [100, 3, 70, 30, 97, 50, 50]
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4"):
        assert pack(np.array(lengths, dtype), 120) == pack(lengths, 120), dtype


@pytest.mark.parametrize("pack", PACKERS)
def test_read_only_and_strided_lengths_are_taken_and_left_alone(pack: Callable[..., Any]) -> None:
    lengths = np.array([4, 0, 3, 0, 3, 0, 2, 0])[::2]
    wanted = pack(lengths.tolist(), 6)
    lengths.flags.writeable = False
    assert pack(lengths, 6) == wanted
    assert pack(np.frombuffer(lengths.tobytes(), np.int64), 6) == wanted
    assert lengths.tolist() == [4, 3, 3, 2]


def test_unsigned_above_63_bits_is_too_long_and_not_negative() -> None:
    with pytest.raises(ValueError, match=f"Sample 1 has length {2**63 + 5}, above"):
        first_fit_decreasing(np.array([1, 2**63 + 5], np.uint64), 8)
