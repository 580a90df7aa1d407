"""Restore keys as rows: what comes back, and how large it is on its way."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.key_rows import KEY_COLUMNS, KeyTable, Window, compact

LEAF = st.tuples(
    st.text(max_size=3), st.integers(0, 9), st.integers(0, 1 << 40), st.integers(0, 1 << 61)
)
ODD = st.one_of(
    st.tuples(st.just("encode_sample"), st.integers(0, 3), LEAF),
    st.tuples(st.text(max_size=3), st.integers(-5, 5), st.integers(), st.booleans()),
    st.tuples(st.text(max_size=3), st.integers(-1, 1 << 63), LEAF),
    st.tuples(st.just("hook"), st.integers(0, 3), st.tuples(st.just("hook"), st.just(1), LEAF)),
    st.tuples(st.just("piece"), st.integers(0, 9), st.integers(0, 9), LEAF),
)


@given(st.lists(LEAF | ODD, max_size=12), st.data())
def test_any_keys_come_back_and_are_held_until_then(keys, data) -> None:
    table = KeyTable()
    rows = np.array([table.row(key) for key in keys], np.int64).reshape(-1, KEY_COLUMNS)
    frozen = pickle.loads(pickle.dumps(table.frozen()))
    assert frozen.keys(compact(rows)) == keys
    split = data.draw(st.integers(0, len(keys)))
    assert table.release(rows[:split]) == keys[:split]
    assert table.frozen().keys(rows[split:]) == keys[split:]
    table.release(rows[split:])
    assert not table.others
    assert frozen.keys(rows) == keys


@pytest.mark.parametrize(("top", "width"), [(0, 4), ((1 << 31) - 1, 4), (1 << 31, 8)])
def test_small_numbers_take_four_bytes_each(top, width) -> None:
    rows = np.array([[0, 0, top, 0]])
    assert compact(rows).itemsize == width
    assert (compact(rows) == rows).all()
    assert compact(rows[:0]).shape == (0, 4)


def test_carried_samples_come_first_and_bring_their_groups() -> None:
    window = Window()
    for i, group in enumerate(("a", "b", None, "b")):
        window.add((0, 0, i, i, 0), 10 + i, group, f"sample {i}")
    assert window.groups == {"a": 0, "b": 1, None: 2}
    carried = window.carried(np.array([3, 2]))
    assert carried.samples == ["sample 3", "sample 2"]
    assert carried.groups == {"b": 0, None: 1}
    assert carried.rows().tolist() == [[0, 0, 3, 3, 0, 13, 0], [0, 0, 2, 2, 0, 12, 1]]
    carried.add((0, 0, 9, 9, 0), 1, "a", "sample 9")
    assert len(carried) == 3
    assert len(window) == 4


@pytest.mark.parametrize("is_expanded", [False, True])
def test_ten_thousand_keys_are_quick_to_send(is_expanded) -> None:
    table, window = KeyTable(), Window()
    for i in range(10_000):
        key = ("source", 0, 7 * i, 8 * i)
        row = table.row(("encode_sample", i % 9, key) if is_expanded else key)
        window.add(row, 1 + i % 50, None, None)
    assert len(pickle.dumps((table.frozen(), compact(window.rows())))) < 29 * 10_000
