"""Restore keys as integers: as rows of a buffer, and as columns, in a tenth of the bytes of JSON.

Texts are places in one table. Tuples of one shape have a column for each place; a shape has a 0 for
an integer, a 1 for a text, and a list for a tuple.
"""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array

_INTEGER, _TEXT = 0, 1
# The keys of sources.
_LEAF = (_TEXT, _INTEGER, _INTEGER, _INTEGER)
_LARGEST = 1 << 63
# More values than the keys of any buffer have.
_MAX_VALUES = 1 << 25


def as_columns(keys: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """Returns a table of restore keys and rows of integers as a JSON value.

    Args:
        keys: N of them.
        rows: N rows of equally many integers, of which the first one rises.

    Raises:
        TypeError: A value is neither an integer nor a text nor a tuple of those.
        OverflowError: An integer does not fit 64 bits.
    """
    texts: dict[str, int] = {}
    tables: dict[Any, list[list[int]]] = {}
    shapes = []
    for pair in zip(map(tuple, rows), keys, strict=True):
        numbers: list[int] = []
        shapes.append(_shape_of(pair, texts, numbers))
        tables.setdefault(shapes[-1], []).append(numbers)
    places = {shape: place for place, shape in enumerate(tables)}
    columns = chain.from_iterable(np.array(table, np.int64).T for table in tables.values())
    which = np.array([places[shape] for shape in shapes], np.int64)
    return {
        "texts": [*texts],
        "shapes": [*tables],
        "columns": [_text_of(column) for column in (which, *columns)],
    }


def _shape_of(value: Any, texts: dict[str, int], numbers: list[int]) -> Any:
    """Returns the shape of a value; appends its integers, and the places of its texts."""
    kind = type(value)
    if kind is int:
        numbers.append(value)
        return _INTEGER
    if kind is str:
        numbers.append(texts.setdefault(value, len(texts)))
        return _TEXT
    if kind is not tuple or not value:
        raise TypeError(f"{value!r:.80} cannot be kept in columns")
    return tuple([_shape_of(part, texts, numbers) for part in value])


class KeyTable:
    """Restore keys as rows of integers: their shape, and what the shape has places for.

    A key that has something else than integers and texts is an entry of the table as a whole.
    """

    def __init__(self) -> None:
        self._texts: dict[Any, int] = {}
        self._shapes: dict[Any, int] = {_LEAF: 0}
        self._words: tuple[int, bytes] = 0, b""

    def rows(self, keys: Sequence[Any]) -> Int64Array:
        """Returns the row of each key; shape (N, W), of which W grows with the longest."""
        if {*map(len, keys)} == {len(_LEAF)}:
            values = [*chain.from_iterable(keys)]
            names, texts = values[::4], self._texts
            if {*map(type, names)} == {str}:
                values[::4] = [texts.setdefault(name, len(texts)) for name in names]
                if {*map(type, values)} == {int} and max(map(abs, values)) < _LARGEST:
                    found = np.zeros((len(keys), 1 + len(_LEAF)), np.int64)
                    found[:, 1:] = np.array(values).reshape(-1, len(_LEAF))
                    return found
        rows = [*map(self._row, keys)]
        found = np.zeros((len(rows), max(map(len, rows), default=1)), np.int64)
        for row, own in zip(found, rows, strict=True):
            row[: len(own)] = own
        return found

    def _row(self, key: Any) -> list[int]:
        numbers: list[int] = []
        try:
            shape = _shape_of(key, self._texts, numbers)
        except TypeError:
            shape = None
        if shape is None or any(abs(number) >= _LARGEST for number in numbers):
            shape = _TEXT
            numbers = [self._texts.setdefault((_TEXT, repr(key), key), len(self._texts))]
        return [self._shapes.setdefault(shape, len(self._shapes)), *numbers]

    def __len__(self) -> int:
        """Counts its entries, which stay when the rows are gone."""
        return len(self._texts) + len(self._shapes)

    def words(self) -> bytes:
        """Returns what `keys_of_rows` needs besides the rows."""
        size = len(self)
        if size != self._words[0]:
            texts = [text if type(text) is str else text[2] for text in self._texts]
            self._words = size, pickle.dumps((texts, [*self._shapes]))
        return self._words[1]


def keys_of_rows(words: bytes, rows: Int64Array) -> list[Any]:
    """Returns the keys of rows of a `KeyTable`, shape (N, W), whose words these are."""
    texts, shapes = pickle.loads(words)
    keys: list[Any] = [None] * len(rows)
    for number in np.unique(rows[:, 0]).tolist():
        places = np.flatnonzero(rows[:, 0] == number)
        own = _values_of(shapes[number], iter(rows[places, 1:].T), texts)
        for place, key in zip(places.tolist(), own, strict=True):
            keys[place] = key
    return keys


def from_columns(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the keys and the rows of which `as_columns` returned the value.

    Raises:
        TypeError, ValueError, LookupError, AttributeError, zlib.error: It is corrupt.
    """
    if sum(entry[1] for entry in value["columns"]) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES:,} numbers")
    columns = map(_column_of, value["columns"])
    try:
        which = next(columns).tolist()
        values = [_values_of(shape, columns, value["texts"]) for shape in value["shapes"]]
        parts = [*map(iter, values)]
        pairs = sorted([next(parts[place]) for place in which])
    except StopIteration:
        raise ValueError("too few columns, or values in one") from None
    if len(pairs) < sum(map(len, values)):
        raise ValueError("too many values in a column")
    return tuple([key for _, key in pairs]), tuple([row for row, _ in pairs])


def _values_of(shape: Any, columns: Iterator[Int64Array], texts: list[str]) -> list[Any]:
    """Returns the values of a shape, of the next columns."""
    if isinstance(shape, (list, tuple)):
        return list(zip(*[_values_of(own, columns, texts) for own in shape], strict=True))
    numbers: list[int] = next(columns).tolist()
    return [*map(texts.__getitem__, numbers)] if shape == _TEXT else numbers


def _text_of(column: Int64Array) -> list[Any]:
    """Returns the shortest of: a column, its steps, its ranks."""
    steps = np.diff(column, prepend=0)
    found: list[list[Any]] = [["values", *_planes(column)], ["steps", *_planes(steps)]]
    if min(map(len, found)) > 3:
        # Indexes of a buffer lie close together in a large set, though in any order.
        order = np.argsort(column, kind="stable")
        rising = np.diff(column[order], prepend=0)
        found.append(["ranks", _planes(rising), _planes(np.argsort(order))])
    form, *planes = min(found, key=lambda entry: len(str(entry)))
    return [form, len(column), *planes]


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


def _column_of(entry: list[Any]) -> Int64Array:
    form, size, *planes = entry
    if form == "ranks":
        rising = _column_of(["steps", size, *planes[0]])
        return rising[_column_of(["values", size, *planes[1]])]
    words = np.zeros((size, 8), np.uint8)
    for place, text in enumerate(planes):
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
        words[:, place] = np.frombuffer(raw, np.uint8)
    whole = words.reshape(-1).view("<u8")
    numbers = (whole >> np.uint64(1)).astype(np.int64) ^ -(whole & np.uint64(1)).astype(np.int64)
    return np.cumsum(numbers) if form == "steps" else numbers
