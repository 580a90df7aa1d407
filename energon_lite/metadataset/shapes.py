"""What a grammar of YAML maps is declared with: types of values, keys, and shapes of maps.

A declaration serves three readers: the parser, the error texts and the JSON Schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.storage.yaml import YamlMap

_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class Place:
    """A place in a file, for error texts.

    Attributes:
        file: the file's name.
        line: counted from 1; 0 where it is unknown.
        path: key path, as `splits.train.blend[2]`; "" for the whole file.
    """

    file: str
    line: int = 0
    path: str = ""

    def __str__(self) -> str:
        file = f"{self.file}:{self.line}" if self.line else self.file
        return f"{file}, {self.path}" if self.path else file

    def line_of(self, mapping: YamlMap, key: str) -> Place:
        """Returns the line of a key; the path stays that of the mapping."""
        return Place(self.file, mapping.lines.get(key, mapping.line), self.path)

    def key(self, mapping: YamlMap, key: str) -> Place:
        """Returns the place of a key of the mapping that is here."""
        path = f"{self.path}.{key}" if self.path else key
        return Place(self.file, mapping.lines.get(key, mapping.line), path)

    def item(self, index: int, value: Any) -> Place:
        """Returns the place of an item of the list that is here."""
        line = value.line if isinstance(value, YamlMap) else self.line
        return Place(self.file, line, f"{self.path}[{index}]")

    def error(self, message: str) -> DatasetFormatError:
        """Makes the exception that names this place."""
        return DatasetFormatError(f"{self}: {message}")

    def mismatch(self, expected: str, found: Any, hint: str = "") -> DatasetFormatError:
        """Makes the exception for a value of the wrong type."""
        return self.error(f"expected {expected}, not {shown(found)}.{hint}")

    def unknown(self, mapping: YamlMap, key: str, allowed: Iterable[str]) -> DatasetFormatError:
        """Makes the exception for a key that nobody reads."""
        names = list(allowed)
        hint = did_you_mean(key, names)
        close = hint if "Did you mean" in hint else ""
        return self.line_of(mapping, key).error(
            f"unknown key {key!r}.{close} Allowed here: {', '.join(names)}."
        )


def shown(value: Any) -> str:
    """Returns a value as error texts show it: on one line, and not too long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."


@dataclass(frozen=True)
class Value:
    """A type of value.

    Attributes:
        read: takes what the YAML has and its place; gives what it means, or raises
            `DatasetFormatError`.
        schema: the same in JSON Schema.
    """

    read: Callable[[Any, Place], Any]
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """A key of a map.

    Attributes:
        name: the key.
        value: what may stand there.
        about: one sentence for users.
        default: what its absence means; not the YAML's value but what `value.read` gives.
        required: whether it must be there.
    """

    name: str
    value: Value
    about: str
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Shape:
    """A map with fixed keys.

    Attributes:
        name: in the JSON Schema.
        about: one sentence for users.
        keys: all that may be there.
    """

    name: str
    about: str
    keys: tuple[Key, ...]

    def read(self, raw: Any, place: Place, also: tuple[Key, ...] = ()) -> dict[str, Any]:
        """Returns the value of each key, defaults included.

        Args:
            raw: what the YAML has.
            place: where.
            also: further keys.

        Raises:
            DatasetFormatError: No map, an unknown key, a missing key or a wrong value.
        """
        keys = {key.name: key for key in (*self.keys, *also)}
        if not isinstance(raw, YamlMap):
            raise place.mismatch(f"a map with the keys {', '.join(keys)}", raw)
        for name in raw:
            if name not in keys:
                raise place.unknown(raw, name, keys)
        values = {}
        for name, key in keys.items():
            if name in raw:
                values[name] = key.value.read(raw[name], place.key(raw, name))
            elif key.required:
                raise place.error(f"key {name!r} is missing. {key.about}")
            else:
                values[name] = key.default
        return values


def plain(value: Any) -> Any:
    """Returns a value with ordinary dicts and lists in it, shared with nobody."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def as_read(value: Any, file: str) -> Any:
    """Returns Python values as if they had been read from `file`, at unknown lines."""
    if isinstance(value, Mapping):
        mapping = YamlMap(file)
        for key, item in value.items():
            mapping[str(key)] = as_read(item, file)
        return mapping
    if isinstance(value, list | tuple):
        return [as_read(item, file) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _read_text(raw: Any, place: Place) -> str:
    if isinstance(raw, str) and raw:
        return raw
    hint = f" Write it in quotes: '{raw}'." if isinstance(raw, int | float) else ""
    raise place.mismatch("text", raw, hint)


def _read_flag(raw: Any, place: Place) -> bool:
    if isinstance(raw, bool):
        return raw
    raise place.mismatch("true or false", raw)


def _read_tags(raw: Any, place: Place) -> dict[str, Any]:
    if isinstance(raw, YamlMap):
        tags: dict[str, Any] = plain(raw)
        return tags
    raise place.mismatch("a map of tags", raw)


def is_integer(raw: Any) -> bool:
    """Returns whether a value is a whole number; `true` is none, though Python says so."""
    return isinstance(raw, int) and not isinstance(raw, bool)


def read_number(raw: Any, place: Place, expected: str = "a number of at least 0") -> float:
    """Reads a finite number of at least 0."""
    if is_integer(raw) or isinstance(raw, float):
        try:
            number = float(raw)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise place.mismatch(expected, raw)


TEXT = Value(_read_text, {"type": "string", "minLength": 1})
FLAG = Value(_read_flag, {"type": "boolean"})
TAGS = Value(_read_tags, {"type": "object"})
NUMBER = Value(read_number, {"type": "number", "minimum": 0})


def integer(minimum: int) -> Value:
    """Makes the type of whole numbers of at least `minimum`."""

    def read(raw: Any, place: Place) -> int:
        if not is_integer(raw) or raw < minimum:
            raise place.mismatch(f"a whole number of at least {minimum}", raw)
        number: int = raw
        return number

    return Value(read, {"type": "integer", "minimum": minimum})


def choice(*options: str) -> Value:
    """Makes the type of a few words."""

    def read(raw: Any, place: Place) -> str:
        if isinstance(raw, str) and raw in options:
            return raw
        hint = did_you_mean(str(raw), options)
        raise place.mismatch(
            f"one of {', '.join(options)}", raw, hint if "Did you mean" in hint else ""
        )

    return Value(read, {"enum": list(options)})


def or_nothing(value: Value) -> Value:
    """Makes the type in which an empty value, too, is fine; it is read as None."""

    def read(raw: Any, place: Place) -> Any:
        return None if raw is None else value.read(raw, place)

    return Value(read, {"anyOf": [dict(value.schema), {"type": "null"}]})
