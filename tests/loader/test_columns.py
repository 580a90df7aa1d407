"""Tables for the similar parts of a state: they stand for the same value, and are small."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import StateError
from energon_lite.loader.columns import folded, unfolded

from ..helpers import through_json

ATOMS = st.sampled_from([None, True, 1, 1.0, 2, 0.5, "a", "b", "~", "~0"])
NAMES = st.sampled_from([*"abcd", "~0", "~list"])
VALUES = st.recursive(
    ATOMS,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(NAMES, part, max_size=4),
    max_leaves=40,
)


def text_of(value: Any) -> str:
    """The JSON of a value, which tells 1 from 1.0 and True."""
    return json.dumps(value, sort_keys=True)


@given(VALUES)
def test_tables_stand_for_the_value_that_they_were_made_of(value: Any) -> None:
    assert text_of(unfolded(through_json(folded(value)))) == text_of(value)


def test_what_is_equal_is_written_once_for_any_number_of_sources() -> None:
    def config(number: int) -> dict[str, Any]:
        name = f"s{number:03d}"
        settings = {f"setting_{i}": "a long value" for i in range(20)}
        return {"name": name, "of": {"stage": "source", "name": name, **settings}}

    sizes = [len(text_of(folded([config(i) for i in range(n)]))) for n in (100, 300)]
    assert sizes[1] - sizes[0] == 200 * len('"s000", ')


def test_value_without_tables_is_read_as_it_is() -> None:
    value = {"streams": [{"a": 1}, {"b": 2}]}
    assert unfolded(value) == value


@pytest.mark.parametrize(
    "table",
    [
        {"~list": {"a": {"~0": 0}}},
        {"~list": {"a": {"~0": 5}}, "columns": [[1, 2]]},
        {"~list": {"a": {"~0": 0}}, "columns": 5},
        {"~list": {"a": {"~0": 0}}, "columns": [[1, 2], [1]]},
        {"~dict": {"a": {"~0": 0}}, "columns": [[1, 2]]},
        {"~dict": [[1], {"~0": 0}], "columns": [[1, 2]]},
    ],
)
def test_corrupt_table_is_refused(table: Any) -> None:
    with pytest.raises(StateError, match="table of the state is corrupt"):
        unfolded({"of": table})


def test_small_text_that_stands_for_a_huge_value_is_refused() -> None:
    table: Any = 1
    for _ in range(30):
        table = {"~list": [{"~0": 0}] * 8, "columns": [[1, table]]}
    with pytest.raises(StateError, match="more than"):
        unfolded(table)
