"""The JSON Schema accepts what the parser accepts; `UPDATE_GOLDEN=1` writes the file."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.metadataset_schema import DIALECT, metadataset_schema
from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.read import read_metadataset
from energon_lite.storage.yaml import parse_yaml

from .test_grammar import FULL, FULL_V1, MISTAKES, misspellings

FILE = Path(__file__).resolve().parents[2] / "docs" / "metadataset.schema.json"
SCHEMA = metadataset_schema()

TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "integer": int, "number": (int, float),
}  # fmt: skip
# Keywords that say nothing about a value.
NOTES = {"$schema", "$defs", "title", "description", "default"}

# What the parser refuses but no schema can say: what lies further away than a key and its value.
BEYOND_SCHEMA = {
    "all weights 0", "all repetitions 0", "lengths without tokens", "more than everything",
    "start behind the end", "empty range", "infinite weight",
    "weight that is too large a number",
}  # fmt: skip


def matches(value: Any, schema: Any) -> bool:
    """A small checker of JSON Schema; fails at keywords that it does not know."""
    if isinstance(schema, bool):
        return schema
    return all(
        keyword in NOTES or RULES[keyword](value, argument, schema)
        for keyword, argument in schema.items()
    )


def is_of_type(value: Any, name: str) -> bool:
    number = name in ("integer", "number")
    return isinstance(value, TYPES[name]) and not (number and isinstance(value, bool))


def other_keys(value: Any, schema: Any) -> list[str]:
    known = schema.get("properties", {})
    return [key for key in value if key not in known] if isinstance(value, dict) else []


def same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


RULES: dict[str, Any] = {
    "type": lambda v, a, s: is_of_type(v, a),
    "enum": lambda v, a, s: any(same(v, option) for option in a),
    "const": lambda v, a, s: same(v, a),
    "minLength": lambda v, a, s: not isinstance(v, str) or len(v) >= a,
    "pattern": lambda v, a, s: not isinstance(v, str) or bool(re.search(a, v)),
    "minimum": lambda v, a, s: not is_of_type(v, "number") or v >= a,
    "minItems": lambda v, a, s: not isinstance(v, list) or len(v) >= a,
    "maxItems": lambda v, a, s: not isinstance(v, list) or len(v) <= a,
    "items": lambda v, a, s: not isinstance(v, list) or all(matches(item, a) for item in v),
    "prefixItems": lambda v, a, s: not isinstance(v, list) or all(map(matches, v, a)),
    "minProperties": lambda v, a, s: not isinstance(v, dict) or len(v) >= a,
    "maxProperties": lambda v, a, s: not isinstance(v, dict) or len(v) <= a,
    "required": lambda v, a, s: not isinstance(v, dict) or all(key in v for key in a),
    "properties": lambda v, a, s: (
        not isinstance(v, dict) or all(matches(v[key], a[key]) for key in v if key in a)
    ),
    "propertyNames": lambda v, a, s: not isinstance(v, dict) or all(matches(k, a) for k in v),
    "additionalProperties": lambda v, a, s: all(matches(v[k], a) for k in other_keys(v, s)),
    "anyOf": lambda v, a, s: any(matches(v, option) for option in a),
    "$ref": lambda v, a, s: matches(v, SCHEMA["$defs"][a.removeprefix("#/$defs/")]),
}


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from parts(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from parts(value)


def test_written_schema_is_that_of_the_grammar() -> None:
    text = json.dumps(SCHEMA, indent=2) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        FILE.write_text(text)
    assert FILE.read_text() == text


def test_schema_is_whole() -> None:
    assert SCHEMA["$schema"] == DIALECT
    references = {part["$ref"] for part in parts(SCHEMA) if isinstance(part.get("$ref"), str)}
    assert references == {f"#/$defs/{name}" for name in SCHEMA["$defs"]}


def test_every_key_and_every_map_is_described() -> None:
    described = 0
    for part in parts(SCHEMA):
        if part.get("additionalProperties") is False:
            assert part["title"]
            assert part["description"]
            for key in part["properties"].values():
                assert key["description"]
                described += 1
    assert described > 50


@pytest.mark.parametrize("whole", [FULL, FULL_V1], ids=["v2", "v1"])
def test_schema_takes_what_the_parser_takes_and_no_misspelled_key(whole: Any) -> None:
    assert matches(whole, SCHEMA)
    wrong = [text for text, _, _ in misspellings(whole)]
    assert len(wrong) > 10
    assert not any(matches(text, SCHEMA) for text in wrong)


def test_schema_refuses_what_the_parser_refuses() -> None:
    matched = {
        name
        for name, (text, _) in MISTAKES.items()
        if text and matches(parse_yaml(text, "x.yaml"), SCHEMA)
    }
    assert matched == {name for name in BEYOND_SCHEMA if MISTAKES[name][0]}


VALUES = [
    None, True, False, 0, 1, -1, 2.5, -0.5, "", "text", "end", "50%", [], ["0%", "50%"],
    [0, 5], [0, "end"], [0, 0.5], ["x%", "50%"], {}, {"range": ["0%", "7.5%"]}, {"range": [3, 4]},
    {"tag": 1}, {"schedule": "step", "points": {"0": 1, "1e3": 0.5}},
    {"schedule": "step", "points": {"soon": 1}}, {"schedule": "step", "points": {"-1": 1}},
    "exact", "random", "tokens", "samples", "forever", "first", "all_once", "gpt2",
    [{"path": "x"}], [{"path": "x", "weight": 2}], [{"path": "x", "repetitions": 2}], ["x"],
    {"path": "x"},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["path", "blend", "blend_epochized", "concat", "v1"])
def test_schema_and_parser_agree_on_every_value_of_every_key(
    kind: str,
) -> None:
    one = {"path": "one"}  # so that a weight of 0 beside it is fine
    main: Any = "x" if kind == "path" else [{"path": "x"}]
    keys = {key for part in parts(SCHEMA) for key in part.get("properties", ())}
    agreed = 0
    for key in sorted(keys):
        for value in VALUES:
            if kind == "v1":
                document = {"splits": {"s": {"datasets": [{"path": "x", key: value}, one]}}}
            else:
                # Lengths go with tokens only, which two keys decide together.
                unit = {"unit": "tokens"} if (kind, key) == ("blend", "lengths") else {}
                document = {**FULL, "splits": {"s": {kind: main, **unit, key: value}}}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                try:
                    read_metadataset(document, "s")
                    is_read = True
                except DatasetFormatError:
                    is_read = False
            assert matches(document, SCHEMA) == is_read, (key, value)
            agreed += is_read
    assert agreed > 10
