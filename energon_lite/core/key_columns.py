"""Restore keys as integers: as rows of a buffer, and as columns, in a tenth of the bytes of JSON.

Texts are places in one table. Tuples of one shape have a column for each place; a shape has a 0 for
an integer, a 1 for a text, and a list for a tuple.
"""

from __future__ import annotations

import base64
import copy
import pickle
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array

_INTEGER, _TEXT = 0, 1
# The keys of sources: with epoch and index, or with PLACE and a place.
_LEAF, _PLACED = (_TEXT, _INTEGER, _INTEGER, _INTEGER), (_TEXT, _TEXT, _INTEGER, _INTEGER)
PLACE = "place"
_LARGEST = 1 << 63
# The form of a column is chosen by about this number of its values.
_SAMPLED = 1 << 12
# More values than the keys of any buffer have.
_MAX_VALUES = 1 << 25


def as_columns(keys: Sequence[Any] | Keys, rows: Any) -> Any:
    """Returns a table of restore keys and rows of integers as a JSON value.

    Args:
        keys: N of them.
        rows: shape (N, C), integers, of which the first one of each row rises.

    Raises:
        TypeError: A value is neither an integer nor a text nor a tuple of those.
        OverflowError: An integer does not fit 64 bits.
    """
    keys = keys if isinstance(keys, Keys) else Keys.of(keys)
    rows, texts, all_texts = np.array(rows, np.int64), list[str](), keys.texts
    if not all(type(text) is str for text in all_texts):
        raise TypeError("a key has something else than integers and texts")
    used, which = _distinct(keys.rows[:, 0])
    first = np.arange(len(rows))
    columns = [_text_of(which, first), _text_of(rows[:, 0], first)]
    columns += [_text_of(column, rows[:, 0]) for column in rows.T[1:]]
    for place, number in enumerate(used):
        own = np.flatnonzero(which == place)
        along, kinds = rows[own, 0], _kinds(keys.shapes[number])
        for column, kind in zip(keys.rows[own, 1:].T.copy(), kinds, strict=False):
            if kind == _TEXT:
                names, column = _distinct(column)
                column += len(texts)
                texts += [all_texts[name] for name in names]
            columns.append(_text_of(column, along))
    shapes = [keys.shapes[number] for number in used]
    return {"texts": texts, "shapes": shapes, "width": rows.shape[1], "columns": columns}


def _distinct(column: Int64Array) -> tuple[list[int], Int64Array]:
    """Returns the values of a column as they first appear, and the number of each row's value."""
    values, firsts, inverse = np.unique(column, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return values[order].tolist(), np.argsort(order)[inverse]


def _kinds(shape: Any) -> Iterator[int]:
    """Yields what a shape has places for."""
    if type(shape) is int:
        yield shape
    else:
        for own in shape:
            yield from _kinds(own)


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
        self._texts: dict[Any, int] = {PLACE: 0}
        self._shapes: dict[Any, int] = {_LEAF: 0, _PLACED: 1}
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
        """Returns what `Keys` needs besides the rows."""
        size = len(self)
        if size != self._words[0]:
            self._words = size, pickle.dumps(([*self._texts], [*self._shapes]))
        return self._words[1]


class Keys:
    """Restore keys as rows of a `KeyTable`, made when somebody looks at them.

    Args:
        words: of the table.
        rows: shape (N, W).
    """

    def __init__(self, words: bytes, rows: Int64Array) -> None:
        self.texts, self.shapes = pickle.loads(words)
        self.rows = rows

    @classmethod
    def of(cls, keys: Sequence[Any]) -> Keys:
        """Returns keys as rows."""
        table = KeyTable()
        rows = table.rows(keys)
        return cls(table.words(), rows)

    def sources(self) -> Iterator[tuple[Any, Int64Array]]:
        """Yields each source that has a key here, and the places of its keys among all."""
        is_leaf = self.rows[:, 0] == 0
        for number in np.unique(self.rows[is_leaf, 1]).tolist():
            yield self.texts[number], np.flatnonzero(is_leaf & (self.rows[:, 1] == number))

    def placed(self, places_N: Int64Array) -> Keys:
        """Returns keys that have a place for epoch and index, where it is known and not -1."""
        own, found = (self.rows[:, 0] == 0) & (places_N >= 0), copy.copy(self)
        found.rows = self.rows.copy()
        found.rows[own, 0], found.rows[own, 2], found.rows[own, 3] = 1, 0, places_N[own]
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        """Yields the keys."""
        keys: list[Any] = [None] * len(self)
        for number in np.unique(self.rows[:, 0]).tolist():
            places = np.flatnonzero(self.rows[:, 0] == number)
            texts = [text if type(text) is str else text[2] for text in self.texts]
            own = _values_of(self.shapes[number], iter(self.rows[places, 1:].T), texts)
            for place, key in zip(places.tolist(), own, strict=True):
                keys[place] = key
        return iter(keys)


@dataclass(eq=False, repr=False)
class KeyedFields(Mapping[str, Any]):
    """The fields of a snapshot, of which `keys` and `rows` are made when somebody looks at them.

    Args:
        known: the other fields.
    """

    known: dict[str, Any]

    @abstractmethod
    def table(self) -> tuple[Keys, Int64Array]:
        """Returns N keys, and their rows, shape (N, C)."""

    def __getitem__(self, name: str) -> Any:
        """Returns a field."""
        if name == "keys":
            return tuple(self.table()[0])
        return tuple(map(tuple, self.table()[1].tolist())) if name == "rows" else self.known[name]

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""
        yield from (*self.known, "keys", "rows")

    def __len__(self) -> int:
        return len(self.known) + 2


def from_columns(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the keys and the rows of which `as_columns` returned the value.

    Raises:
        TypeError, ValueError, LookupError, AttributeError, zlib.error: It is corrupt.
    """
    entries, width, texts, shapes = map(value.get, ("columns", "width", "texts", "shapes"))
    if sum(entry[1] for entry in entries) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES:,} numbers")
    if len(entries) != 1 + width + sum(1 for _ in _kinds(shapes)) or width < 1:
        raise ValueError("too many columns, or too few")
    if not all(type(text) is str for text in texts):
        raise ValueError("a text is none")
    first = np.arange(entries[0][1])
    which, numbers = _column_of(entries[0], first), _column_of(entries[1], first)
    rows = [numbers, *(_column_of(entry, numbers) for entry in entries[2 : 1 + width])]
    keys: list[Any] = [None] * len(which)
    rest = iter(entries[1 + width :])
    for place, shape in enumerate(shapes):
        at = np.flatnonzero(which == place)
        along = numbers[at]
        own = (_column_of(entry, along) for entry in rest)
        for row, key in zip(at.tolist(), _values_of(shape, own, texts), strict=True):
            keys[row] = key
    if None in keys:
        raise ValueError("a key has no shape")
    return tuple(keys), tuple(zip(*(column.tolist() for column in rows), strict=True))


def _values_of(shape: Any, columns: Iterator[Int64Array], texts: list[Any]) -> list[Any]:
    """Returns the values of a shape, of the next columns."""
    if isinstance(shape, (list, tuple)):
        return list(zip(*[_values_of(own, columns, texts) for own in shape], strict=True))
    numbers: list[int] = next(columns).tolist()
    return [*map(texts.__getitem__, numbers)] if shape == _TEXT else numbers


def _text_of(column: Int64Array, along: Int64Array) -> list[Any]:
    """Returns the shortest of: a column, its steps, those beside a rising column, its ranks."""
    if not len(column):
        return ["values", 0]
    # Draws and places of samples rise with the numbers of samples, but where some are skipped.
    some = slice(None, None, 1 + len(column) // _SAMPLED)
    slope = int(np.median(np.diff(column)[some] // np.diff(along)[some])) if len(column) > 1 else 0
    forms = {
        "values": column,
        "steps": np.diff(column, prepend=0),
        "along": np.diff(column - slope * along, prepend=0),
    }
    bits = {form: np.log2(1.0 + np.abs(own[some])).mean() for form, own in forms.items()}
    form = min(bits, key=bits.__getitem__)
    if bits[form] > np.log2(len(column)):
        # Indexes of a buffer lie close together in a large set, though in any order.
        order = np.argsort(column, kind="stable")
        rising = np.diff(column[order], prepend=0)
        return ["ranks", len(column), planes_of(rising), planes_of(np.argsort(order))]
    return [form, len(column), *([slope] if form == "along" else []), *planes_of(forms[form])]


def planes_of(numbers: Int64Array) -> list[str]:
    """Compresses the lowest bytes of all numbers, the next ones, and so on; signs in a last bit."""
    words = ((numbers << 1) ^ (numbers >> 63)).astype("<u8")
    num_planes = -(-int(words.max(initial=0)).bit_length() // 8)
    planes = words.view(np.uint8).reshape(-1, 8).T[:num_planes]
    return [base64.b64encode(_compressed(plane.tobytes())).decode() for plane in planes]


def _compressed(raw: bytes) -> bytes:
    # Nothing but single bytes and runs of them repeats: a tenth of the time of a whole search.
    writer = zlib.compressobj(6, strategy=zlib.Z_RLE)
    return writer.compress(raw) + writer.flush()


def _column_of(entry: list[Any], along: Int64Array) -> Int64Array:
    form, size, *planes = entry
    if form == "ranks":
        rising = _column_of(["steps", size, *planes[0]], along)
        return rising[_column_of(["values", size, *planes[1]], along)]
    if form == "along":
        rest = _column_of(["steps", size, *planes[1:]], along)
        return rest + np.int64(planes[0]) * along[:size]
    numbers = from_planes(planes, size)
    return np.cumsum(numbers) if form == "steps" else numbers


def from_planes(planes: Sequence[str], size: int) -> Int64Array:
    """Returns the numbers, shape (size,), of which `planes_of` returned the texts.

    Raises:
        TypeError, ValueError, LookupError, zlib.error: They are corrupt.
    """
    words = np.zeros((size, 8), np.uint8)
    for place, text in enumerate(planes):
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
        words[:, place] = np.frombuffer(raw, np.uint8)
    whole = words.reshape(-1).view("<u8")
    found: Int64Array = (whole >> np.uint64(1)).astype(np.int64)
    return found ^ -(whole & np.uint64(1)).astype(np.int64)
