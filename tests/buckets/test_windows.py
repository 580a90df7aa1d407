"""Windows sorted by length, and cut into batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.buckets import cut_window, sort_places


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0, 1, 5, 2**40, 2**61])), max_size=30)
)
def test_places_are_sorted_like_a_list_of_rows(rows: list[tuple[int, int]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 2).T
    expected = sorted(range(len(rows)), key=rows.__getitem__)
    assert sort_places(columns[0], columns[1]).tolist() == expected
    assert sort_places(columns[1]).tolist() == sorted(expected, key=lambda i: (rows[i][1], i))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=60),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_window_is_cut_into_batches_and_less_than_one_of_each_group(
    rows: list[tuple[int, int]], longest_first: bool, is_last: bool, has_groups: bool
) -> None:
    lengths, groups = np.array(rows, np.int64).reshape(-1, 2).T
    limits = 30 // lengths
    cut = cut_window(
        lengths, limits, groups if has_groups else None, longest_first=longest_first,
        is_last=is_last,
    )  # fmt: skip
    assert sorted([*cut.batches.indices, *cut.carried]) == list(range(len(rows)))
    assert not (is_last and len(cut.carried))
    for group in set(groups[cut.carried]) if has_groups else {0}:
        left = cut.carried[groups[cut.carried] == group] if has_groups else cut.carried
        if len(left):
            assert len(left) * lengths[left].max() <= 30
            assert len(left) < limits[left].min()
    in_order = [*cut.batches, cut.carried]
    for batch, following in pairwise(in_order):
        assert 1 <= len(batch) <= 30 // lengths[batch].max()
        if not has_groups and len(following):
            longest = lengths[[*batch, following[0]]].max()
            assert (len(batch) + 1) * longest > 30, "one more has no room"
