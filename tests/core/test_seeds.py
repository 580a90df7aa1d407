from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.seeds import key_of, random_words

names = st.recursive(
    st.one_of(st.text(max_size=5), st.integers()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(st.tuples(names, names), st.tuples(names, names))
def test_different_names_have_different_keys(left, right) -> None:
    assert (key_of(*left) == key_of(*right)) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"), [(("a", "b"), ("ab",)), ((1, 2), (12,)), (("1",), (1,)), (((1,),), (1,))]
)
def test_similar_names_have_different_keys(left, right) -> None:
    assert key_of(*left) != key_of(*right)


def test_keys_and_words_are_the_same_in_every_process_and_version() -> None:
    """Raw Philox output: a change here changes the order of every run."""
    assert key_of("slices", 0, "demo/train") == 0x75C0682BA147B4CFD89E2847B14247A3
    assert random_words(key_of("a"), 1, 2, size=3).tolist() == [
        3470083357748912351,
        9807294577358423174,
        2906665775182197194,
    ]


def test_counters_make_other_words_and_longer_runs_begin_equally() -> None:
    words = random_words(key_of("a"), 3, size=8)
    assert words.dtype == np.uint64
    assert random_words(key_of("a"), 3, size=100)[:8].tolist() == words.tolist()
    for other in (random_words(key_of("b"), 3, size=8), random_words(key_of("a"), 4, size=8)):
        assert not set(other.tolist()) & set(words.tolist())


def test_what_is_no_name_is_refused() -> None:
    for wrong in (1.0, None, b"x", [1]):
        with pytest.raises(TypeError, match="a seed is made of str, int and tuples"):
            key_of(wrong)
