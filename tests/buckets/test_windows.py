"""Windows sorted by length, and cut into batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.buckets import cut_window


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
    own = groups if has_groups else np.zeros_like(groups)
    cut = cut_window(lengths, limits, own, longest_first=longest_first, is_last=is_last)
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
