from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.errors import StateError
from energon_lite.core.key_columns import Keys, KeyTable, as_columns, from_columns
from energon_lite.core.state import Snapshot

from ..conftest import examples

NUMBERS = st.integers(-(1 << 62), 1 << 62) | st.integers(0, 300)
LEAVES = st.tuples(st.sampled_from(["a/train", "b", ""]), NUMBERS, NUMBERS, NUMBERS)
KEYS = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.tuples(st.just("piece"), NUMBERS, NUMBERS, below),
        st.tuples(st.just("hook"), NUMBERS, below),
        st.tuples(st.just("pack"), NUMBERS, below, below),
    ),
    max_leaves=3,
)


@examples(200)
@given(
    keys=st.lists(KEYS, min_size=1, max_size=40),
    width=st.integers(0, 3),
    data=st.data(),
)
def test_keys_and_rows_come_back_from_json_in_their_order(keys: list[Any], width: int, data: Any):
    own = st.tuples(*[NUMBERS] * width)
    firsts = sorted(data.draw(st.sets(NUMBERS, min_size=len(keys), max_size=len(keys))))
    rows = [(first, *data.draw(own)) for first in firsts]
    value = json.loads(json.dumps(as_columns(keys, rows)))
    assert from_columns(value) == (tuple(keys), tuple(rows))


def snapshot(num: int, key: Any = None) -> Snapshot:
    keys = tuple(("a", 0, 7 * i % num, i) for i in range(num))
    rows = tuple((i, 0, 3 + i % 5) for i in range(num))
    return Snapshot("stage", {"keys": (*keys[1:], key or keys[0]), "rows": rows, "read": num})


@pytest.mark.parametrize("num", [2, 63, 64, 1000])
def test_a_snapshot_with_many_keys_is_small_and_restores_all_fields(num: int) -> None:
    text = json.dumps(snapshot(num).to_json())
    assert Snapshot.from_json(json.loads(text)).fields == snapshot(num).fields
    assert len(text) < 6 * num + 2000


def buffered(num_samples: int) -> Snapshot:
    """Returns the state of a window of 4,000 samples of a set, read in slices of 100."""
    rng = np.random.default_rng(0)
    starts = rng.choice(num_samples // 100, 40, replace=False) * 100
    indexes = rng.permutation((starts[:, None] + np.arange(100)).reshape(-1)).tolist()
    keys = tuple(("a", 0, index, i) for i, index in enumerate(indexes))
    return Snapshot("stage", {"keys": keys, "rows": tuple((i, i % 7) for i in range(4000))})


def test_keys_of_a_large_set_are_about_as_small_as_those_of_a_small_one() -> None:
    states = [json.dumps(buffered(num).to_json()) for num in (1 << 34, 1 << 14)]
    assert len(states[0]) < 1.15 * len(states[1])
    assert Snapshot.from_json(json.loads(states[0])).fields == buffered(1 << 34).fields


@pytest.mark.parametrize(
    "edit",
    [
        lambda planes: planes.pop(), lambda planes: planes[1].append(planes[1][0]),
        lambda planes: planes.__setitem__(1, None), lambda planes: planes.__setitem__(0, [3]),
    ],
)  # fmt: skip
def test_corrupt_ranks_are_refused(edit: Any) -> None:
    value: Any = json.loads(json.dumps(buffered(1 << 34).to_json()))
    (ranks,) = (own for own in value["columns of samples"]["columns"] if own[0] == "ranks")
    planes = ranks[2:]
    edit(planes)
    ranks[2:] = planes
    with pytest.raises(StateError, match="'columns of samples' of stage 'stage' are corrupt"):
        Snapshot.from_json(value)


def test_keys_with_values_that_are_no_integers_or_texts_stay_as_they_are() -> None:
    own = snapshot(100, key=("a", 0.5, None))
    value = json.loads(json.dumps(own.to_json()))
    assert len(value["keys"]) == 100
    assert Snapshot.from_json(value).fields == own.fields


@pytest.mark.parametrize(
    "edit",
    [
        lambda columns: columns.pop(), lambda columns: columns[0].__setitem__(1, 99),
        lambda columns: columns[0].__setitem__(1, 1 << 40),
        lambda columns: columns[0].__setitem__(1, "many"),
        lambda columns: columns[0].append("no base64!"),
        lambda columns: columns[1].__setitem__(2, "AAAA"),
        lambda columns: columns.__setitem__(0, None), lambda columns: columns[1].__setitem__(1, -1),
    ],
)  # fmt: skip
def test_corrupt_columns_are_refused(edit: Any) -> None:
    value: Any = json.loads(json.dumps(snapshot(100).to_json()))
    edit(value["columns of samples"]["columns"])
    with pytest.raises(StateError, match="'columns of samples' of stage 'stage' are corrupt"):
        Snapshot.from_json(value)


@pytest.mark.parametrize(
    "shapes", [None, 3, "float", {}, [], [[]], [[0]], [0], [[[0, 0, 0], [1, 0, 0, 0, 0]]]]
)
def test_corrupt_shapes_are_refused(shapes: Any) -> None:
    value: Any = json.loads(json.dumps(snapshot(100).to_json()))
    value["columns of samples"]["shapes"] = shapes
    with pytest.raises(StateError, match="'columns of samples' of stage 'stage' are corrupt"):
        Snapshot.from_json(value)


@examples(200)
@given(keys=st.lists(st.lists(KEYS, min_size=1, max_size=9), min_size=1, max_size=5))
def test_keys_come_back_from_rows_of_a_table(keys: list[list[Any]]) -> None:
    table = KeyTable()
    rows = [table.rows(own) for own in keys]
    for own, of_keys in zip(rows, keys, strict=True):
        assert [*Keys(table.words(), own)] == of_keys


ODD: list[Any] = [
    ("a", 0.5, 1, 2), ("a", True, 1, 2), ("a", 1, 1, 2), (0, "a"), ("a", None, (1, 1 << 70)),
    ("a", 1.0, 1, 2), ("a", 1 << 63, 1, 2), ("a", -(1 << 63), 1, 2), (), ("a", 1, 2, (1 << 64,)),
]  # fmt: skip


@pytest.mark.parametrize("keys", [ODD, *([key] for key in ODD)])
def test_a_table_has_keys_with_other_values_as_a_whole(keys: list[Any]) -> None:
    table = KeyTable()
    rows = table.rows(keys)
    found = [*Keys(table.words(), rows)]
    assert list(map(repr, found)) == list(map(repr, keys))
