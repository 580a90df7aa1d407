"""Packers lose nothing and overfill nothing, and do what their definitions say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.lists import Lists
from energon_lite.extras.samplers.best import lower_bound, pack_best

from ..conftest import examples

Pack = Callable[..., Lists]

PACKERS: list[Pack] = [first_fit_decreasing, first_fit, sequential, pack_best]

limits = st.one_of(st.none(), st.integers(1, 5))


@st.composite
def one_resource(draw: st.DrawFn) -> tuple[Any, int]:
    """Lengths and a capacity; some capacities are far above the number of samples."""
    capacity = draw(st.sampled_from([1, 2, 7, 10, 33, 64, 65, 1000, 70_000, 10_000_000]))
    length = st.one_of(
        st.integers(1, capacity),
        st.sampled_from([1, (capacity + 1) // 2, capacity // 2 + 1, (capacity + 2) // 3, capacity]),
    )
    return np.array(draw(st.lists(length, max_size=40)), np.int64), capacity


@st.composite
def several_resources(draw: st.DrawFn) -> tuple[Any, Any]:
    capacity = np.array(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    row = st.tuples(*(st.integers(0, c) for c in capacity.tolist())).filter(any)
    rows = draw(st.lists(row, max_size=40))
    return np.array(rows, np.int64).reshape(len(rows), len(capacity)), capacity


def fit_one_by_one(
    lengths: Any, capacity: Any, order: Iterable[int], max_samples: int | None
) -> list[list[int]]:
    """First fit by its definition."""
    packs: list[list[int]] = []
    rooms: list[Any] = []
    for index in order:
        for p, pack in enumerate(packs):
            if np.all(lengths[index] <= rooms[p]) and len(pack) != max_samples:
                break
        else:
            p = len(packs)
            packs.append([])
            rooms.append(np.array(capacity))
        packs[p].append(index)
        rooms[p] = rooms[p] - lengths[index]
    return packs


def longest_first(lengths: Any, capacity: Any) -> list[int]:
    shares = lengths / capacity
    keys = shares if shares.ndim == 1 else shares.max(axis=1)
    return sorted(range(len(lengths)), key=lambda i: (-keys[i], i))


def check_packs(packs: Lists, lengths: Any, capacity: Any, max_samples: int | None) -> None:
    assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
    assert (packs.sizes(lengths) <= capacity).all()
    counts = np.diff(packs.offsets)
    assert (counts >= 1).all()
    assert max_samples is None or (counts <= max_samples).all()


@pytest.mark.parametrize("pack", PACKERS)
@given(case=one_resource() | several_resources(), max_samples=limits)
def test_every_sample_is_in_one_pack_and_no_pack_is_too_full(
    pack: Pack, case: tuple[Any, Any], max_samples: int | None
) -> None:
    lengths, capacity = case
    packs = pack(lengths, capacity, max_samples=max_samples)
    check_packs(packs, lengths, capacity, max_samples)
    assert len(packs) >= lower_bound(lengths, capacity, max_samples=max_samples)


@given(one_resource(), limits)
@example((np.array([2, 2, 2, 2, 2, 2, 1]), 7), None)
@examples(100)
def test_first_fit_decreasing_is_first_fit_in_descending_order(
    case: tuple[Any, int], max_samples: int | None
) -> None:
    lengths, capacity = case
    wanted = fit_one_by_one(lengths, capacity, longest_first(lengths, capacity), max_samples)
    assert first_fit_decreasing(lengths, capacity, max_samples=max_samples).tolist() == wanted


@given(several_resources(), limits)
def test_with_several_resources_the_largest_share_goes_first(
    case: tuple[Any, Any], max_samples: int | None
) -> None:
    lengths, capacity = case
    if len(capacity) == 1:
        capacity, lengths = np.append(capacity, 1), np.pad(lengths, ((0, 0), (0, 1)))
    wanted = fit_one_by_one(lengths, capacity, longest_first(lengths, capacity), max_samples)
    assert first_fit_decreasing(lengths, capacity, max_samples=max_samples).tolist() == wanted


@given(several_resources(), limits)
def test_first_fit_keeps_the_order(case: tuple[Any, Any], max_samples: int | None) -> None:
    lengths, capacity = case
    wanted = fit_one_by_one(lengths, capacity, range(len(lengths)), max_samples)
    assert first_fit(lengths, capacity, max_samples=max_samples).tolist() == wanted


@given(several_resources(), limits)
def test_sequential_keeps_the_order_and_opens_a_pack_only_when_it_must(
    case: tuple[Any, Any], max_samples: int | None
) -> None:
    lengths, capacity = case
    packs = sequential(lengths, capacity, max_samples=max_samples).tolist()
    assert [i for pack in packs for i in pack] == list(range(len(lengths)))
    for pack, following in pairwise(packs):
        is_over = (lengths[[*pack, following[0]]].sum(axis=0) > capacity).any()
        assert is_over or len(pack) == max_samples


def fewest(lengths: list[int], capacity: int, max_samples: int | None) -> int:
    """The optimum, by trying everything."""
    best = len(lengths)

    def place(index: int, packs: list[tuple[int, int]]) -> None:
        nonlocal best
        if index == len(lengths):
            best = min(best, len(packs))
        elif len(packs) < best:
            for p in {pack: p for p, pack in enumerate(packs)}.values():
                used, count = packs[p]
                if used + lengths[index] <= capacity and count != max_samples:
                    grown = (used + lengths[index], count + 1)
                    place(index + 1, [*packs[:p], grown, *packs[p + 1 :]])
            place(index + 1, [*packs, (lengths[index], 1)])

    place(0, [])
    return best


@given(
    st.integers(3, 40).flatmap(
        lambda c: st.tuples(st.lists(st.integers(1, c), max_size=8), st.just(c))
    ),
    limits,
)
@example(([6, 6, 6], 10), None)
@example(([34, 34, 34, 34, 34], 100), None)
@examples(100)
def test_bound_is_below_and_best_is_above_the_optimum(
    case: tuple[list[int], int], max_samples: int | None
) -> None:
    lengths, capacity = case
    optimum = fewest(sorted(lengths, reverse=True), capacity, max_samples)
    assert lower_bound(lengths, capacity, max_samples=max_samples) <= optimum
    best = len(pack_best(lengths, capacity, max_samples=max_samples))
    assert optimum <= best <= len(first_fit_decreasing(lengths, capacity, max_samples=max_samples))


@given(one_resource(), st.integers(1, 9))
def test_alignment_is_rounding_up_before_packing(case: tuple[Any, int], align: int) -> None:
    lengths, capacity = case
    rounded = (lengths + align - 1) // align * align
    lengths = lengths[rounded <= capacity]
    rounded = rounded[rounded <= capacity]
    for pack in PACKERS:
        assert pack(lengths, capacity, align=align) == pack(rounded, capacity)
    assert lower_bound(lengths, capacity, align=align) == lower_bound(rounded, capacity)


@given(several_resources(), limits)
def test_max_samples_is_one_more_resource(case: tuple[Any, Any], max_samples: int | None) -> None:
    lengths, capacity = case
    ones = np.ones((len(lengths), 1), np.int64)
    with_ones = np.hstack([lengths, ones])
    for pack in (first_fit, sequential):
        assert pack(lengths, capacity, max_samples=max_samples) == pack(
            with_ones, [*capacity, max_samples or len(lengths) or 1]
        )
