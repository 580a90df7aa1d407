"""JSON whose similar parts are written once: one shape, and a column for each value that differs.

A run of 300 sources has 300 configurations, and 300 positions in each stream, that differ in a few
values each. The result is JSON, too.

Example:
    >>> folded([{"name": "a", "size": 3, "end": 1}, {"name": "b", "size": 3, "end": 2}])
    {"~list": {"name": {"~0": 0}, "size": 3, "end": {"~0": 1}}, "columns": [["a", "b"], [1, 2]]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from energon_lite.core.errors import StateError

# Kinds of tables, and values that stay as they are. A dict {"~0": 3} is a hole in the shape of a
# table, which column 3 fills; holes of a table inside such a shape are {"~1": ...}, and so on.
_LIST, _DICT, _PLAIN = "~list", "~dict", "~plain"
# More values than any state has.
_MAX_VALUES = 10**7


def folded(value: Any) -> Any:
    """Returns a table for each list of dicts and each dict of dicts in a JSON value."""
    if '"~' in json.dumps(value):  # a name of the user's could be taken for a table
        return {_PLAIN: value}
    return _folded(value, 0)


def unfolded(value: Any) -> Any:
    """Returns the value that `folded` was called with; a value without tables as it is.

    Raises:
        StateError: A table is invalid.
    """
    try:
        return value[_PLAIN] if _is_a(value, _PLAIN) else _Unfolding().read(value, 0)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise StateError(f"a table of the state is corrupt: {error}") from error


def _folded(value: Any, level: int) -> Any:
    if isinstance(value, (list, tuple)):
        return _folded_rows(_LIST, value, level) or [_folded(entry, level) for entry in value]
    if not isinstance(value, dict):
        return value
    pairs = [[key, entry] for key, entry in value.items()]
    found = _folded_rows(_DICT, pairs, level)
    return found or {key: _folded(entry, level) for key, entry in pairs}


def _folded_rows(kind: str, rows: Sequence[Any], level: int) -> dict[str, Any] | None:
    """Returns a table of at least two dicts without holes, or of pairs of a key and such a dict."""
    entries = rows if kind == _LIST else [entry for _, entry in rows]
    if len(rows) < 2 or not all(
        isinstance(entry, dict) and entry and not any(key[:1] == "~" for key in entry)
        for entry in entries
    ):
        return None
    columns: dict[str, list[Any]] = {}
    shape = _shape(rows, columns, f"~{level}")
    if not columns:
        return None
    return {
        kind: _folded(shape, level + 1),
        "columns": [[_folded(value, level) for value in column] for column in columns.values()],
    }


def _shape(rows: Sequence[Any], columns: dict[str, list[Any]], hole: str) -> Any:
    """Returns the shape of similar values; adds to `columns`, by their text, what differs."""
    first, kinds = rows[0], set(map(type, rows))
    if kinds == {dict} and any(rows):
        keys = dict.fromkeys(key for row in rows for key in row)
        return {k: _shape([row.get(k, {hole: None}) for row in rows], columns, hole) for k in keys}
    if kinds == {list} and first and len(set(map(len, rows))) == 1:
        return [_shape(entries, columns, hole) for entries in zip(*rows, strict=True)]
    if len(kinds) == 1 and all(row == first for row in rows):
        return first
    text = json.dumps(rows)
    columns.setdefault(text, list(rows))
    return {hole: list(columns).index(text)}


def _is_a(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and kind in value


class _Unfolding:
    def __init__(self) -> None:
        self._num_values = 0

    def read(self, value: Any, level: int) -> Any:
        """Returns a value with rows instead of tables."""
        if isinstance(value, list):
            return [self.read(entry, level) for entry in value]
        if not isinstance(value, dict):
            return value
        for kind in (_LIST, _DICT):
            if kind in value:
                shape = self.read(value[kind], level + 1)
                columns = [[self.read(v, level) for v in column] for column in value["columns"]]
                rows = [
                    self._row(shape, entries, f"~{level}") for entries in zip(*columns, strict=True)
                ]
                return rows if kind == _LIST else dict(rows)
        return {key: self.read(entry, level) for key, entry in value.items()}

    def _row(self, shape: Any, entries: Sequence[Any], hole: str) -> Any:
        self._count(1)
        if isinstance(shape, list):
            return [self._row(part, entries, hole) for part in shape]
        if not isinstance(shape, dict):
            return shape
        if len(shape) == 1 and type(number := shape.get(hole)) is int:
            self._count_parts(entries[number])
            return entries[number]
        row = {key: self._row(part, entries, hole) for key, part in shape.items()}
        return {key: part for key, part in row.items() if part != {hole: None}}

    def _count(self, number: int) -> None:
        self._num_values += number
        if self._num_values > _MAX_VALUES:
            raise ValueError(f"it stands for more than {_MAX_VALUES:,} values")

    def _count_parts(self, value: Any) -> None:
        if isinstance(value, (dict, list)):
            self._count(len(value))
            for part in value.values() if isinstance(value, dict) else value:
                self._count_parts(part)
