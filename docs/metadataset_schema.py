"""Makes metadataset.schema.json, with which editors check and complete metadataset files.

To write the file after a change of the grammar:

UPDATE_GOLDEN=1 pytest tests/metadataset/test_schema.py
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from energon_lite.metadataset import nodes, values
from energon_lite.metadataset.values import Key, Keys, about, keys_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MAPS = {
    "schedule": values.WrittenSchedule,
    "join_entry": nodes.JoinMember,
    "joiner": nodes.Joiner,
    "subset": values.Subset,
    "percent_subset": values.PercentSubset,
    "store": nodes.Store,
    "v1_split": nodes.OlderSplit,
    "v1_dataset": nodes.OlderEntry,
}


def _key_schema(key: Key) -> dict[str, Any]:
    schema: dict[str, Any] = {**key.value.schema, "description": key.about}
    if key.default not in (None, "", ()):
        schema["default"] = int(key.default) if isinstance(key.default, Fraction) else key.default
    return schema


def _map_schema(title: str, kind: type[Any], keys: Keys) -> dict[str, Any]:
    required = [name for name, key in keys.items() if key.is_required]
    return {
        "title": title,
        "description": about(kind),
        "type": "object",
        "properties": {name: _key_schema(key) for name, key in keys.items()},
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _file_schema(title: str, split: str, class_name: str, is_required: bool) -> dict[str, Any]:
    schema = _map_schema(title, nodes.MetadatasetFile, keys_of(nodes.MetadatasetFile))
    schema["properties"]["__class__"].update({"enum": [class_name], "default": class_name})
    schema["properties"]["splits"]["additionalProperties"] = {"$ref": f"#/$defs/{split}"}
    if is_required:
        schema["required"].insert(0, "__class__")
    return schema


def metadataset_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of metadataset files, of both forms."""
    definitions: dict[str, Any] = {}
    for name, entry in nodes.ENTRIES.items():
        text = about(entry) if entry else "A split, or an entry of concat."
        options = [{"$ref": f"#/$defs/{name}_{main}"} for main in nodes.KINDS]
        definitions[name] = {"title": text, "anyOf": options}
        for main, kind in nodes.KINDS.items():
            title = f"{name} with {main!r}"
            definitions[f"{name}_{main}"] = _map_schema(title, kind, nodes.ALLOWED[kind, entry])
    definitions.update(
        {name: _map_schema(name, kind, keys_of(kind)) for name, kind in _MAPS.items()}
    )
    return {
        "$schema": DIALECT,
        "title": "Metadataset",
        "description": about(nodes.MetadatasetFile),
        "anyOf": [
            _file_schema("MetadatasetV2", "node", nodes.NEWER, is_required=True),
            _file_schema("Metadataset, the older form", "v1_split", nodes.OLDER, is_required=False),
        ],
        "$defs": definitions,
    }
