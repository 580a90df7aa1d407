"""Long lists of tuples of integers and texts as columns: a tenth of the bytes of their JSON.

A shape describes how the values of a list are made of columns of integers:

- `"int"`: one column, the values themselves.
- a list of texts: one column, places in the list.
- `{"tuple": shapes}`: tuples of one length; the columns of each place.
- `{"mixed": shapes}`: one column that has the shape of each value, and the columns of each shape.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array

Columns = list[Int64Array]

_MAX_SHAPES = 32
# More values than the keys of any buffer have.
_MAX_VALUES = 1 << 25


def columns_of(values: Sequence[Any]) -> tuple[Any, Columns]:
    """Returns shape and columns of values.

    Raises:
        TypeError: A value is neither an integer nor a text nor a tuple of those.
        OverflowError: An integer does not fit 64 bits.
    """
    kinds = {(kind, 0) for kind in set(map(type, values))}
    if (tuple, 0) in kinds:
        kinds = {(type(v), len(v) if type(v) is tuple else 0) for v in values}
    if len(kinds) > 1:
        return _mixed(values, sorted(kinds, key=str))
    ((kind, size),) = kinds or {(int, 0)}
    if kind is int:
        return "int", [np.array(values, np.int64)]
    if kind is str:
        places = {text: place for place, text in enumerate(dict.fromkeys(values))}
        return [*places], [np.array([*map(places.__getitem__, values)])]
    if kind is not tuple or not size:
        raise TypeError(f"{values[0]!r:.80} cannot be kept in columns")
    parts = [columns_of(part) for part in zip(*values, strict=True)]
    return {"tuple": [shape for shape, _ in parts]}, [c for _, own in parts for c in own]


def _mixed(values: Sequence[Any], kinds: list[tuple[type, int]]) -> tuple[Any, Columns]:
    if len(kinds) > _MAX_SHAPES:
        raise TypeError(f"values of {len(kinds)} lengths cannot be kept in columns")
    numbers = {kind: number for number, kind in enumerate(kinds)}
    which = [numbers[type(v), len(v) if type(v) is tuple else 0] for v in values]
    parts = [
        columns_of([v for v, own in zip(values, which, strict=True) if own == number])
        for number in range(len(kinds))
    ]
    columns = [np.array(which), *(column for _, own in parts for column in own)]
    return {"mixed": [shape for shape, _ in parts]}, columns


def values_of(shape: Any, columns: Iterator[Int64Array]) -> list[Any]:
    """Returns the values of which `columns_of` returned shape and columns.

    Raises:
        TypeError, ValueError, LookupError, StopIteration: They do not fit together.
    """
    if shape == "int":
        numbers: list[int] = next(columns).tolist()
        return numbers
    if isinstance(shape, list):
        return [*map(shape.__getitem__, next(columns).tolist())]
    ((kind, shapes),) = shape.items()
    if kind == "tuple":
        return list(zip(*[values_of(own, columns) for own in shapes], strict=True))
    which = next(columns).tolist()
    parts = [iter(values_of(own, columns)) for own in shapes]
    return [next(parts[number]) for number in which]


def as_columns(keys: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """Returns a table of restore keys and rows of integers as a JSON value.

    Args:
        keys: N of them.
        rows: N rows of equally many integers, of which the first one rises.

    Raises:
        TypeError, ValueError, OverflowError: The values cannot be kept in columns.
    """
    # In the order of their lists, most columns of samples are nearly constant; in that of their
    # numbers, the numbers are.
    table = np.array(rows, np.int64)
    orders = [np.arange(len(rows)), np.lexsort(table[:, -1:-3:-1].T)]
    pairs = [(tuple(row), key) for row, key in zip(rows, keys, strict=True)]
    found = []
    for order in orders:
        shape, columns = columns_of([pairs[place] for place in order.tolist()])
        texts = [_text_of(column, columns[0]) for column in columns]
        found.append({"shape": shape, "columns": texts})
    return min(found, key=lambda value: len(str(value)))


def from_columns(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the keys and the rows of which `as_columns` returned the value.

    Raises:
        TypeError, ValueError, LookupError, AttributeError, zlib.error: It is corrupt.
    """
    columns: Columns = []
    if sum(entry[1] for entry in value["columns"]) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES:,} numbers")
    for entry in value["columns"]:
        columns.append(_column_of(entry, columns[0] if columns else None))
    try:
        pairs = sorted(values_of(value["shape"], iter(columns)))
    except StopIteration:
        raise ValueError("too few columns") from None
    return tuple([key for _, key in pairs]), tuple([row for row, _ in pairs])


def _text_of(column: Int64Array, first: Int64Array) -> list[Any]:
    """Returns the shortest of: a column, its steps, what it is above the first one, its ranks."""
    size = len(column)
    forms = {"values": column, "steps": np.diff(column, prepend=0)}
    if size == len(first) and column is not first:
        forms["above"] = column - first
    found: list[list[Any]] = [[form, size, *_planes(own)] for form, own in forms.items()]
    if min(map(len, found)) > 4:
        # Indexes of a buffer lie close together in a large set, though in any order.
        order = np.argsort(column, kind="stable")
        steps = np.diff(column[order], prepend=0)
        found.append(["ranks", size, _planes(steps), _planes(np.argsort(order))])
    return min(found, key=lambda entry: len(str(entry)))


def _planes(numbers: Int64Array) -> list[str]:
    """Compresses the lowest bytes of all numbers, the next ones, and so on; signs in a last bit."""
    words = ((numbers << 1) ^ (numbers >> 63)).astype("<u8")
    num_planes = -(-int(words.max(initial=0)).bit_length() // 8)
    planes = words.view(np.uint8).reshape(-1, 8).T[:num_planes]
    return [base64.b64encode(_compressed(plane.tobytes())).decode() for plane in planes]


def _compressed(raw: bytes) -> bytes:
    # Nothing but single bytes and runs of them repeats: a tenth of the time of a whole search.
    writer = zlib.compressobj(6, strategy=zlib.Z_RLE)
    return writer.compress(raw) + writer.flush()


def _column_of(entry: list[Any], first: Int64Array | None) -> Int64Array:
    form, size, *planes = entry
    if form == "ranks":
        rising = _column_of(["steps", size, *planes[0]], None)
        return rising[_column_of(["values", size, *planes[1]], None)]
    words = np.zeros((size, 8), np.uint8)
    for place, text in enumerate(planes):
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
        words[:, place] = np.frombuffer(raw, np.uint8)
    whole = words.reshape(-1).view("<u8")
    numbers = (whole >> np.uint64(1)).astype(np.int64) ^ -(whole & np.uint64(1)).astype(np.int64)
    if form == "steps":
        return np.cumsum(numbers)
    return numbers + first if form == "above" and first is not None else numbers
