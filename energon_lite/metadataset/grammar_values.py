"""What stands in the values of MetadatasetV2: ranges of samples, and weights that change."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from energon_lite.metadataset.nodes import SubsetRange
from energon_lite.metadataset.shapes import (
    NUMBER,
    Key,
    Place,
    Shape,
    Value,
    choice,
    integer,
    is_integer,
    or_nothing,
    read_number,
    shown,
)
from energon_lite.order.schedules import KINDS, Schedule, Weight
from energon_lite.storage.yaml import YamlMap

# Also a pattern of the JSON Schema, hence in what Python and JavaScript share.
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
_LONGEST_PERCENT = 100
_RANGE = "two percentages, as ['0%', '50%'], or two sample numbers, as [0, 1000] or [1000, end]"


def _read_range(raw: Any, place: Place) -> SubsetRange:
    if not isinstance(raw, list) or len(raw) != 2:
        raise place.mismatch(f"a list of {_RANGE}", raw)
    percents = [isinstance(end, str) and _PERCENT.fullmatch(end) for end in raw]
    if all(percents):
        if max(map(len, raw)) > _LONGEST_PERCENT:
            raise place.mismatch(f"percentages of at most {_LONGEST_PERCENT} characters", raw)
        start, stop = (Fraction(match[1]) / 100 for match in percents if match)
        if stop > 1:
            raise place.error(f"{raw[1]!r} is more than 100%")
        if start >= stop:
            raise place.error(f"{shown(raw)} selects nothing: it must start before it ends")
        return SubsetRange(start, stop)
    if any(percents):
        raise place.error(
            f"{shown(raw)} mixes a percentage with something else; write both ends in percent "
            "('100%' is the end) or both as sample numbers"
        )
    first, last = raw
    if not is_integer(first) or not (is_integer(last) or last == "end") or first < 0:
        raise place.mismatch(f"a list of {_RANGE}", raw)
    if last == "end":
        return SubsetRange(first, None)
    if first >= last:
        raise place.error(f"{shown(raw)} selects nothing: it must start before it ends")
    return SubsetRange(first, last)


def _read_percent_range(raw: Any, place: Place) -> SubsetRange:
    found = _read_range(raw, place)
    if isinstance(found.start, int):
        raise place.error(
            f"{shown(raw)}: numbers of samples are for the path of a dataset; write percentages, "
            "as ['0%', '50%']"
        )
    return found


_PERCENTAGES = {
    "type": "array",
    "items": {"type": "string", "pattern": f"^{_PERCENT.pattern}$"},
    "minItems": 2,
    "maxItems": 2,
}
_NUMBERS = {
    "type": "array",
    "prefixItems": [
        {"type": "integer", "minimum": 0},
        {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "end"}]},
    ],
    "minItems": 2,
    "maxItems": 2,
}
_ABOUT_SUBSET = "A range of the samples. Of nested ranges the outer is taken inside the inner one."
SUBSET = Shape(
    "subset",
    _ABOUT_SUBSET,
    (
        Key(
            "range",
            Value(_read_range, {"anyOf": [_PERCENTAGES, _NUMBERS]}),
            "[start, end], the end excluded: in percent, or as numbers of samples, whose end may "
            "be the word end. Numbers are for datasets, not for metadatasets.",
            required=True,
        ),
    ),
)
PERCENT_SUBSET = Shape(
    "percent_subset",
    _ABOUT_SUBSET,
    (
        Key(
            "range",
            Value(_read_percent_range, _PERCENTAGES),
            "[start, end] in percent, the end excluded.",
            required=True,
        ),
    ),
)


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


SCHEDULE = Shape(
    "schedule",
    "A weight that changes over the run.",
    (
        Key(
            "schedule",
            choice(*KINDS),
            "What is between two points: a line, the value of the left one, or half a cosine wave.",
            required=True,
        ),
        Key(
            "points",
            Value(
                _read_points,
                {
                    "type": "object",
                    "minProperties": 1,
                    "propertyNames": {"pattern": r"^\+?[0-9._]+([eE][+-]?[0-9]+)?$"},
                    "additionalProperties": {"type": "number", "minimum": 0},
                },
            ),
            "Weights by the number of samples drawn so far in the run, or by steps.",
            required=True,
        ),
        Key(
            "samples_per_step",
            or_nothing(integer(1)),
            "Says that the points are in steps, and how many samples a step takes.",
        ),
    ),
)


def _read_weight(raw: Any, place: Place) -> Weight:
    if not isinstance(raw, YamlMap):
        return read_number(raw, place, "a number of at least 0 or a schedule")
    values = SCHEDULE.read(raw, place)
    try:
        return Schedule(values["schedule"], values["points"]).scaled(
            values["samples_per_step"] or 1
        )
    except (ValueError, OverflowError) as error:
        raise place.error(str(error)) from None


WEIGHT = Value(_read_weight, {"anyOf": [dict(NUMBER.schema), {"$ref": "#/$defs/schedule"}]})
