"""What is computed once and taken by several, at random; needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.cluster.shared_line import SharedLine


def line_of(sizes: list[int], num_consumers: int, max_bytes: int, computed: list[int]) -> Any:
    def objects() -> Iterator[tuple[list[int], int, Any]]:
        first = 0
        for number, size in enumerate(sizes):
            yield [*range(first, first + size)], size, number
            first += size

    return SharedLine(0, objects(), num_consumers, max_bytes, computed.append)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 20),
    st.data(),
)  # fmt: skip
def test_consumers_in_any_order_get_all_objects_or_know_that_they_lack_one(
    sizes: list[int], num_consumers: int, max_bytes: int, data: st.DataObject
) -> None:
    computed: list[int] = []
    line = line_of(sizes, num_consumers, max_bytes, computed)
    taken = dict.fromkeys(range(num_consumers), 0)
    while taken:
        consumer = data.draw(st.sampled_from([*taken]))
        number = taken[consumer]
        try:
            kept = line.take(str(consumer), number)
        except LookupError:
            assert sum(sizes[number : len(computed)]) > max_bytes
            del taken[consumer]
            continue
        assert (kept is None) == (number == len(sizes))
        if kept is None:
            del taken[consumer]
            continue
        assert kept.value == number
        taken[consumer] += 1
        assert line._num_bytes <= max(max_bytes, max(sizes))
    assert computed == sizes[: len(computed)]  # each once


def test_what_all_have_taken_is_dropped_and_is_no_place_to_begin() -> None:
    line = line_of([2, 2, 2], 2, 100, [])
    assert line.has(0)
    for consumer in "ab":
        line.take(consumer, 0)
    assert not line.has(1)
    assert line.has(2)
    assert line.place_of(3) == 1
    with pytest.raises(LookupError):
        line.take("c", 0)
    assert line.take("c", 1).slots == [2, 3]
