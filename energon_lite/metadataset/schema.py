"""The grammar as JSON Schema, with which editors check and complete metadataset files."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from energon_lite.metadataset.grammar import NODE_SHAPES, ROLES
from energon_lite.metadataset.grammar_file import DATASET_V1, FILE, SPLIT_V1, V1, V2
from energon_lite.metadataset.grammar_values import PERCENT_SUBSET, SCHEDULE, SUBSET
from energon_lite.metadataset.shapes import Key, Shape

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _key(key: Key) -> dict[str, Any]:
    schema: dict[str, Any] = {**key.value.schema, "description": key.about}
    if key.default is not None:
        is_exact = isinstance(key.default, Fraction)
        schema["default"] = int(key.default) if is_exact else key.default
    return schema


def _map(shape: Shape, title: str, also: tuple[Key, ...] = ()) -> dict[str, Any]:
    keys = (*shape.keys, *also)
    schema = {
        "title": title,
        "description": shape.about,
        "type": "object",
        "properties": {key.name: _key(key) for key in keys},
        "required": [key.name for key in keys if key.required],
        "additionalProperties": False,
    }
    return schema if schema["required"] else {k: v for k, v in schema.items() if k != "required"}


def _file(title: str, split: str, class_name: str, is_required: bool) -> dict[str, Any]:
    schema = _map(FILE, title)
    schema["properties"]["__class__"].update({"enum": [class_name], "default": class_name})
    schema["properties"]["splits"]["additionalProperties"] = {"$ref": f"#/$defs/{split}"}
    if is_required:
        schema["required"].insert(0, "__class__")
    return schema


def metadataset_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of metadataset files, of both forms."""
    definitions: dict[str, Any] = {}
    for role in ROLES:
        names = {main: f"{role.name}_{shape.name}" for main, shape in NODE_SHAPES.items()}
        definitions[role.name] = {
            "title": role.about,
            "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names.values()],
        }
        for main, shape in NODE_SHAPES.items():
            title = f"{role.name} with {main!r}"
            definitions[names[main]] = _map(shape, title, role.keys)
    for shape in (SCHEDULE, SUBSET, PERCENT_SUBSET, SPLIT_V1, DATASET_V1):
        definitions[shape.name] = _map(shape, shape.name)
    return {
        "$schema": DIALECT,
        "title": "Metadataset",
        "description": FILE.about,
        "anyOf": [
            _file("MetadatasetV2", "node", V2, is_required=True),
            _file("Metadataset, the older form", SPLIT_V1.name, V1, is_required=False),
        ],
        "$defs": definitions,
    }
