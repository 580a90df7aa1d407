"""Types of values in metadatasets, and the reader of maps.

One declaration serves the parser, the error texts and the JSON Schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from inspect import cleandoc
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.order.schedules import KINDS, Schedule, Weight
from energon_lite.storage.yaml import YamlMap

_LONGEST_SHOWN = 80
_LONGEST_PERCENT = 100


class Place(NamedTuple):
    """A place in a file, for error texts.

    Attributes:
        file: the file's name.
        line: counted from 1; 0 if it is unknown.
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
        """Returns an exception that names this place."""
        return DatasetFormatError(f"{self}: {message}")

    def mismatch(self, expected: str, found: Any, hint: str = "") -> DatasetFormatError:
        """Returns an exception for a value of the wrong type."""
        return self.error(f"expected {expected}, not {shown(found)}.{hint}")


NOWHERE = Place("")


def shown(value: Any) -> str:
    """Returns a value for error texts: on one line, and not too long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."


def close_match(word: Any, options: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` if an option is similar to the word, else nothing."""
    hint = did_you_mean(str(word), options)
    return hint if "Did you mean" in hint else ""


class Value(NamedTuple):
    """A type of value.

    Attributes:
        read: converts a parsed YAML value, given its place; raises `DatasetFormatError` if the
            value is invalid.
        schema: the same type in JSON Schema.
    """

    read: Callable[[Any, Place], Any]
    schema: Mapping[str, Any]


class Key(NamedTuple):
    """A key of a map.

    Attributes:
        value: the type of the value.
        field: the field of the dataclass that stores the value.
        about: a description for users, from the docstring of the class.
        default: the converted value if the key is absent.
        is_required: whether the key must be present.
    """

    value: Value
    field: str
    about: str
    default: Any
    is_required: bool


Keys = Mapping[str, Key]


def key(value: Value, name: str = "", **default: Any) -> Any:
    """Declares a field of a dataclass as a key of the grammar.

    Args:
        value: the type of the value.
        name: the key, if it differs from the name of the field.
        default: `default` or `default_factory` of the field; without one the key is required.
    """
    return field(metadata={"key": (name, value)}, **default)


def about(kind: type[Any]) -> str:
    """Returns what a class is, for users: the first line of its docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def keys_of(kind: Any) -> Keys:
    """Returns the keys that a dataclass declares, the required ones first."""
    abouts: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        section = cleandoc(cls.__doc__ or "").partition("Attributes:")[2]
        abouts.update(re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE))
    found = {}
    for one in fields(kind):
        if "key" in one.metadata:
            name, value = one.metadata["key"]
            text = " ".join(abouts.get(one.name, "").split())
            default = None if one.default is MISSING else one.default
            is_required = one.default is one.default_factory is MISSING
            found[name or one.name] = Key(value, one.name, text, default, is_required)
    return dict(sorted(found.items(), key=lambda item: not item[1].is_required))


def unknown_key(
    mapping: YamlMap, key: str, place: Place, allowed: Iterable[str]
) -> DatasetFormatError:
    """Returns an exception for an unknown key of a map."""
    return place.line_of(mapping, key).error(
        f"unknown key {key!r}.{close_match(key, allowed)} Allowed here: {', '.join(allowed)}."
    )


def read_map(
    raw: Any,
    place: Place,
    keys: Keys,
    refusal: Callable[[YamlMap, str, Place, Iterable[str]], DatasetFormatError] = unknown_key,
) -> dict[str, Any]:
    """Reads a map with fixed keys.

    Args:
        raw: the parsed YAML value.
        place: its place in the file.
        keys: the allowed keys.
        refusal: returns the exception for any other key.

    Returns:
        The converted value of each key that is present, by the name of its field.

    Raises:
        DatasetFormatError: `raw` is no map, has an unknown key or an invalid value, or lacks a
            required key.
    """
    if not isinstance(raw, YamlMap):
        raise place.mismatch(f"a map with the keys {', '.join(keys)}", raw)
    for name in raw:
        if name not in keys:
            raise refusal(raw, name, place, keys)
    for name, key in keys.items():
        if key.is_required and name not in raw:
            raise place.error(f"key {name!r} is missing. {key.about}")
    return {
        keys[name].field: keys[name].value.read(raw[name], place.key(raw, name)) for name in raw
    }


def as_read(value: Any, file: str) -> Any:
    """Returns Python values as if they were read from `file`, at unknown lines."""
    if isinstance(value, Mapping):
        mapping = YamlMap(file)
        for key, item in value.items():
            mapping[str(key)] = as_read(item, file)
        return mapping
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [as_read(item, file) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PurePath) else value


def checked(
    expected: str,
    accepts: Callable[[Any], bool],
    schema: Mapping[str, Any],
    hint: Callable[[Any], str] = lambda _raw: "",
) -> Value:
    """Returns the type of all values that a function accepts; they are not converted."""

    def read(raw: Any, place: Place) -> Any:
        if accepts(raw):
            return raw
        raise place.mismatch(expected, raw, hint(raw))

    return Value(read, schema)


def choice(*options: str) -> Value:
    """Returns the type of a fixed set of words."""
    return checked(
        f"one of {', '.join(options)}",
        lambda raw: isinstance(raw, str) and raw in options,
        {"enum": list(options)},
        hint=lambda raw: close_match(raw, options),
    )


def optional(value: Value, absent: Any = None) -> Value:
    """Returns a type that also accepts an empty value, which is read as `absent`."""

    def read(raw: Any, place: Place) -> Any:
        return absent if raw is None else value.read(raw, place)

    return Value(read, {"anyOf": [dict(value.schema), {"type": "null"}]})


def is_integer(raw: Any) -> bool:
    """Returns whether a value is a whole number; Python's `True` is not."""
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


def _read_repetitions(raw: Any, place: Place) -> Fraction:
    read_number(raw, place)
    # Through the text: 0.1 is a tenth, not the nearest binary number.
    return Fraction(str(raw))


def _unshared(value: Any) -> Any:
    """Returns a copy of a value with ordinary dicts and lists in it."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _read_tags(raw: Any, place: Place) -> Any:
    if isinstance(raw, YamlMap):
        return _unshared(raw)
    raise place.mismatch("a map of tags", raw)


TEXT = checked(
    "text",
    lambda raw: isinstance(raw, str) and raw != "",
    {"type": "string", "minLength": 1},
    hint=lambda raw: f" Write it in quotes: '{raw}'." if isinstance(raw, int | float) else "",
)
FLAG = checked("true or false", lambda raw: isinstance(raw, bool), {"type": "boolean"})
TAGS = Value(_read_tags, {"type": "object"})
NUMBER = Value(read_number, {"type": "number", "minimum": 0})
COUNT = checked(
    "a whole number of at least 1",
    lambda raw: is_integer(raw) and raw >= 1,
    {"type": "integer", "minimum": 1},
)
REPETITIONS = Value(_read_repetitions, NUMBER.schema)
MULTIPLIER = checked(
    "a whole number of at least 1, -1 (with replacement) or null",
    lambda raw: raw is None or (is_integer(raw) and (raw == -1 or raw >= 1)),
    {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]},
)


@dataclass(frozen=True)
class SubsetRange:
    """The samples from `start` up to, but not including, `stop`.

    Attributes:
        start: the number of a sample; or, as a `Fraction` in 0..1, a fraction of all samples.
        stop: of the same type as `start`; None for the end.
    """

    start: Fraction | int
    stop: Fraction | int | None


# Also a pattern of the JSON Schema, so only syntax that Python and JavaScript share.
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
_RANGE = "two percentages, as ['0%', '50%'], or two sample numbers, as [0, 1000] or [1000, end]"


def read_range(raw: Any, place: Place) -> SubsetRange:
    """Reads the range of a subset, also from the arguments of a function."""
    if not isinstance(raw, list) or len(raw) != 2:
        raise place.mismatch(f"a list of {_RANGE}", raw)
    percents = [isinstance(end, str) and _PERCENT.fullmatch(end) for end in raw]
    if all(percents):
        if max(map(len, raw)) > _LONGEST_PERCENT:
            raise place.mismatch(f"percentages of at most {_LONGEST_PERCENT} characters", raw)
        start, stop = (Fraction(match[1]) / 100 for match in percents if match)
        if stop > 1:
            raise place.error(f"{raw[1]!r} is more than 100%")
        found = SubsetRange(start, stop)
    elif any(percents):
        raise place.error(
            f"{shown(raw)} mixes a percentage with something else; write both ends in percent "
            "('100%' is the end) or both as sample numbers"
        )
    else:
        first, last = raw
        last = None if last == "end" else last
        if not is_integer(first) or not (is_integer(last) or last is None) or first < 0:
            raise place.mismatch(f"a list of {_RANGE}", raw)
        found = SubsetRange(first, last)
    if found.stop is not None and found.start >= found.stop:
        raise place.error(f"{shown(raw)} selects nothing: it must start before it ends")
    return found


# The first words are Energon's, which scripts look for.
ONLY_LEAVES = (
    "Can only use absolute subset ranges for a leaf dataset: numbers of samples are only allowed "
    "for a leaf dataset, a folder or a JSONL file"
)


def _read_percent_range(raw: Any, place: Place) -> SubsetRange:
    found = read_range(raw, place)
    if isinstance(found.start, int):
        raise place.error(f"{shown(raw)}: {ONLY_LEAVES}; write percentages, as ['0%', '50%']")
    return found


_PAIR = {"type": "array", "minItems": 2, "maxItems": 2}
_PERCENTAGES = {**_PAIR, "items": {"type": "string", "pattern": f"^{_PERCENT.pattern}$"}}
_LAST = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "end"}]}
_NUMBERS = {**_PAIR, "prefixItems": [{"type": "integer", "minimum": 0}, _LAST]}


@dataclass(frozen=True)
class Subset:
    """A range of the samples. An outer range selects from what the inner one selects.

    Attributes:
        range: [start, end], the end excluded: in percent, or as numbers of samples, whose end may
            be the word end. Numbers are for datasets, not for metadatasets.
    """

    range: SubsetRange = key(Value(read_range, {"anyOf": [_PERCENTAGES, _NUMBERS]}))


@dataclass(frozen=True)
class PercentSubset:
    """A range of the samples. An outer range selects from what the inner one selects.

    Attributes:
        range: [start, end] in percent, the end excluded.
    """

    range: SubsetRange = key(Value(_read_percent_range, _PERCENTAGES))


def subset(kind: type[Any], name: str) -> Value:
    """Returns the type of an optional subset, which is read as a tuple of at most one range."""
    keys = keys_of(kind)

    def read(raw: Any, place: Place) -> tuple[SubsetRange, ...]:
        return (read_map(raw, place, keys)["range"],)

    return optional(Value(read, {"$ref": f"#/$defs/{name}"}), absent=())


def _read_points(raw: Any, place: Place) -> tuple[tuple[float, float], ...]:
    if not isinstance(raw, YamlMap) or not raw:
        raise place.mismatch("a map of points, as {0: 1.0, 1000: 0.1}", raw)
    points = []
    for text, value in raw.items():
        at = place.key(raw, text)
        try:
            x = float(text)
        except ValueError:
            raise at.error(f"{text!r} is not a number of draws or steps") from None
        points.append((x, read_number(value, at)))
    return tuple(sorted(points))


_POINTS = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": r"^\+?[0-9._]+([eE][+-]?[0-9]+)?$"},
    "additionalProperties": NUMBER.schema,
}


@dataclass(frozen=True)
class WrittenSchedule:
    """A weight that changes over the run.

    Attributes:
        schedule: What is between two points: a line, the value of the left one, or half a cosine
            wave.
        points: Weights by the number of samples drawn so far in the run, or by steps.
        samples_per_step: If set, the points are in steps of this number of samples.
    """

    schedule: str = key(choice(*KINDS))
    points: tuple[tuple[float, float], ...] = key(Value(_read_points, _POINTS))
    samples_per_step: int | None = key(optional(COUNT), default=None)


_SCHEDULE = keys_of(WrittenSchedule)


def _read_weight(raw: Any, place: Place) -> Weight:
    if not isinstance(raw, YamlMap):
        return read_number(raw, place, "a number of at least 0 or a schedule")
    values = read_map(raw, place, _SCHEDULE)
    try:
        schedule = Schedule(values["schedule"], values["points"])
        return schedule.scaled(values.get("samples_per_step") or 1)
    except (ValueError, OverflowError) as error:
        raise place.error(str(error)) from None


WEIGHT = Value(_read_weight, {"anyOf": [dict(NUMBER.schema), {"$ref": "#/$defs/schedule"}]})
