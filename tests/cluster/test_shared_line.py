"""What is computed once and taken by several, at random; needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.cluster.shared_line import SharedLine


def line_of(sizes: list[int], max_bytes: int, computed: list[int]) -> Any:
    """A line of objects of so many deliveries, with as many bytes; counts what it computes."""

    def objects() -> Iterator[tuple[list[int], int, Any]]:
        first = 0
        for number, size in enumerate(sizes):
            computed.append(size)
            yield [*range(first, first + size)], size, number
            first += size

    return SharedLine(0, objects(), max_bytes)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 20),
    st.data(),
)  # fmt: skip
def test_consumers_in_any_order_get_all_objects_or_know_that_they_lack_one(
    sizes: list[int], num_consumers: int, max_bytes: int, data: st.DataObject
) -> None:
    computed: list[int] = []
    line = line_of(sizes, max_bytes, computed)
    slots = dict.fromkeys(range(num_consumers), 0)
    expected = dict.fromkeys(range(num_consumers), 0)
    while slots:
        consumer = data.draw(st.sampled_from([*slots]))
        number = expected[consumer]
        try:
            kept = line.object_with(slots[consumer])
        except LookupError:
            assert sum(sizes[number : len(computed)]) > max_bytes
            del slots[consumer]
            continue
        assert (kept is None) == (number == len(sizes))
        if kept is None:
            del slots[consumer]
            continue
        assert kept.value == number
        expected[consumer] += 1
        slots[consumer] = kept.slots[-1] + 1
        line.forget(min(slots.values()))
        assert line._num_bytes <= max(max_bytes, max(sizes))
    assert computed == sizes[: len(computed)]  # each once


def test_what_all_have_passed_is_dropped_and_is_no_place_to_begin() -> None:
    line = line_of([2, 2, 2], 100, [])
    assert line.has(0)
    assert line.object_with(1).slots == [0, 1]
    line.forget(2)
    assert not line.has(1)
    assert line.has(2)
    with pytest.raises(LookupError):
        line.object_with(0)
    assert line.object_with(2).slots == [2, 3]
    assert line.object_with(5).slots == [4, 5]
    assert line.object_with(6) is None


def test_what_was_released_takes_no_bytes_and_is_no_place_to_begin() -> None:
    line = line_of([1] * 9, 3, [])
    for slot in (1, 2, 0):
        line.release(line.object_with(slot))
    assert [line.has(slot) for slot in range(4)] == [False, False, False, True]
    assert line._num_bytes == 0
    assert line.object_with(5).slots == [5]
    assert line.has(3)
    assert line.object_with(6).slots == [6]
    assert not line.has(3)
    with pytest.raises(LookupError):
        line.object_with(3)
