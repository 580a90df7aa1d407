from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.errors import StateError
from energon_lite.core.state import Snapshot, config_differences

values = st.recursive(
    st.one_of(st.integers(), st.text(max_size=5), st.none(), st.booleans()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)
names = st.text("abcde", min_size=1, max_size=3)
snapshots = st.recursive(
    st.builds(Snapshot, names, st.dictionaries(names, values, max_size=3)),
    lambda inner: st.builds(
        Snapshot, names, st.dictionaries(names, values, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=5,
)  # fmt: skip


@given(snapshots)
def test_snapshot_comes_back_from_json_and_from_pickle(snapshot) -> None:
    again = Snapshot.from_json(json.loads(json.dumps(snapshot.to_json())))
    assert again == snapshot
    assert again.fields == snapshot.fields
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


def test_numpy_values_become_plain_json() -> None:
    snapshot = Snapshot("s", {"counts": np.array([1, 2]), "n": np.int64(3), "keys": (("a", 1),)})
    assert snapshot.to_json() == {"stage": "s", "counts": [1, 2], "n": 3, "keys": [["a", 1]]}
    assert Snapshot.from_json(snapshot.to_json()).field("keys") == (("a", 1),)


@pytest.mark.parametrize(
    "garbage",
    [None, 3, "x", [], {}, {"stage": 3}, {"stage": "a", "inner": 5}, {"stage": "a", "inner": [3]}],
)
def test_garbage_is_no_snapshot(garbage) -> None:
    with pytest.raises(StateError):
        Snapshot.from_json(garbage)


def test_other_stage_is_refused_with_both_names() -> None:
    with pytest.raises(StateError, match=r"stage 'a' over 0 others .* has 'b' over 1"):
        Snapshot("a", {}).expect("b", 1)


@pytest.mark.parametrize("value", ["3", -1, 1.0, None, True, (1,)])
def test_what_is_no_count_is_refused_by_name(value) -> None:
    with pytest.raises(StateError, match="'a' has position="):
        Snapshot("a", {"position": value}).count("position")
    with pytest.raises(StateError, match="lacks 'position'"):
        Snapshot("a", {}).count("position")
    assert Snapshot("a", {"position": np.int64(4)}).count("position") == 4


def test_differences_are_listed_by_path_and_source() -> None:
    saved = {"size": 3, "gone": 1, "of": {"name": "coco", "shuffle": 1, "parts": [{"a": 1}, 2]}}
    here = {"size": 4, "new": 2, "of": {"name": "coco", "shuffle": 5, "parts": [{"a": 2}, 2]}}
    assert config_differences(saved, here) == [
        "Checkpoint has size=3 where this pipeline has 4",
        "Checkpoint has gone=1 where this pipeline has no such setting",
        "Checkpoint has shuffle=1 where this pipeline has 5 (source coco)",
        "Checkpoint has parts[0].a=1 where this pipeline has 2 (source coco)",
        "Checkpoint has new=no such setting where this pipeline has 2",
    ]


def test_lists_of_other_length_and_other_types_differ() -> None:
    assert config_differences([1], [1, 2]) == ["Checkpoint has =[1] where this pipeline has [1, 2]"]
    assert len(config_differences({"a": {"b": 1}}, {"a": 1})) == 1
