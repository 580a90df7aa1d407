"""The grammar of whole metadataset files: the keys at the top, and the older form (v1)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from energon_lite.core.errors import did_you_mean
from energon_lite.metadataset.grammar import (
    BLEND,
    BLEND_ENTRY,
    CONFIGS,
    HOMES,
    MULTIPLIER,
    NODE,
    NODE_SHAPES,
    NOT_READ,
    PATH,
    REFERENCE,
    SPLIT_PART,
    SUBFLAVORS,
    Written,
    read_node,
)
from energon_lite.metadataset.shapes import (
    FLAG,
    NUMBER,
    TEXT,
    Key,
    Place,
    Shape,
    Value,
    or_nothing,
    shown,
)
from energon_lite.storage.yaml import YamlMap

V1, V2 = "Metadataset", "MetadatasetV2"
_MODULES = r"(megatron\.energon|energon_lite)(\.[A-Za-z0-9_]+)*"
_HEADER = "'__module__: megatron.energon' and '__class__: MetadatasetV2'"


def _read_module(raw: Any, place: Place) -> str:
    if isinstance(raw, str) and re.fullmatch(_MODULES, raw):
        return raw
    raise place.error(
        f"{shown(raw)} is no module of metadatasets; write megatron.energon. No other module is "
        "imported for one (`trust` is only for classes that a dataset.yaml names)"
    )


def _read_class(raw: Any, place: Place) -> str:
    if isinstance(raw, str) and raw in (V1, V2):
        return raw
    hint = did_you_mean(str(raw), (V1, V2))
    raise place.error(
        f"{shown(raw)} is no class of metadatasets.{hint} No other class is imported for one "
        "(`trust` is only for classes that a dataset.yaml names)"
    )


def _read_splits(raw: Any, place: Place) -> YamlMap:
    if isinstance(raw, YamlMap) and raw:
        return raw
    raise place.mismatch("a map of splits, as {train: {path: ./coco}}", raw)


FILE = Shape(
    "file",
    "A metadataset: which datasets make up each split.",
    (
        Key("__module__", Value(_read_module, {"type": "string", "pattern": f"^{_MODULES}$"}),
            "megatron.energon; others are not imported.", default="megatron.energon"),
        Key("__class__", Value(_read_class, {"enum": [V1, V2]}),
            "MetadatasetV2. Without it the file is read in the older form.", default=V1),
        Key("splits", Value(_read_splits, {"type": "object", "minProperties": 1}),
            "A node for each split, under the split's name.", required=True),
        Key("expand_paths", FLAG,
            "Whether ${VARIABLE} and a leading ~ in the paths of this file are expanded.",
            default=False),
    ),
)  # fmt: skip

DATASET_V1 = Shape(
    "v1_dataset",
    "An entry of datasets.",
    (
        PATH,
        Key("weight", NUMBER, "Its share, relative to the entries beside it. 0 is off.",
            default=1.0),
        SPLIT_PART,
        Key("subflavor", or_nothing(TEXT), "Deprecated: write subflavors."),
        SUBFLAVORS,
        MULTIPLIER,
        *CONFIGS,
    ),
)  # fmt: skip


def _read_datasets(raw: Any, place: Place) -> tuple[Written, ...]:
    if not isinstance(raw, list) or not raw:
        raise place.mismatch("a list of at least one entry, as [{path: ./coco}]", raw)
    return tuple(_read_v1_entry(item, place.item(i, item)) for i, item in enumerate(raw))


SPLIT_V1 = Shape(
    "v1_split",
    "A split in the older form.",
    (
        Key(
            "datasets",
            Value(
                _read_datasets,
                {"type": "array", "items": {"$ref": "#/$defs/v1_dataset"}, "minItems": 1},
            ),
            "Entries, each with a weight (1 by default).",
            required=True,
        ),
    ),
)


_V1_KEYS = {key.name for key in (*DATASET_V1.keys, *SPLIT_V1.keys)}
_V2_ONLY = {*HOMES, *NODE_SHAPES, *NOT_READ} - _V1_KEYS


def _refuse_v2_keys(raw: Any, place: Place, newer: Collection[str]) -> None:
    """Describes what the file needs for the first key of the newer form."""
    for key in raw if isinstance(raw, YamlMap) else ():
        if key in newer:
            raise place.line_of(raw, key).error(
                f"key {key!r} is not of the older form, in which files without '__class__' or with "
                f"'__class__: Metadataset' are read. Add {_HEADER} at the top of the file; "
                "'datasets' is then called 'blend'"
            )


def _read_v1_entry(raw: Any, place: Place) -> Written:
    _refuse_v2_keys(raw, place, _V2_ONLY)
    values = DATASET_V1.read(raw, place)
    old = values.pop("subflavor")
    if old is not None:
        warnings.warn(
            f"{place.key(raw, 'subflavor')} is deprecated; write "
            f"subflavors: {{__subflavor__: {old}}}",
            FutureWarning,
            stacklevel=2,
        )
        values["subflavors"] = {"__subflavor__": old, **(values["subflavors"] or {})}
    others = {key.name: key.default for key in (*REFERENCE.keys, *BLEND_ENTRY.keys)}
    return Written(REFERENCE, {**others, **values}, place, raw)


def _read_v1_split(raw: Any, place: Place) -> Written:
    _refuse_v2_keys(raw, place, {*_V2_ONLY, "path"})
    entries = SPLIT_V1.read(raw, place)["datasets"]
    others = {key.name: key.default for key in BLEND.keys}
    return Written(BLEND, {**others, "blend": entries}, place, raw)


@dataclass(frozen=True)
class WrittenFile:
    """A metadataset file as it is written: checked, nothing looked up."""

    splits: dict[str, Written]
    expand_paths: bool


def read_file(raw: Any, file: str) -> WrittenFile:
    """Checks all splits of a metadataset.

    Args:
        raw: what the YAML has.
        file: the file's name, for error texts.

    Raises:
        DatasetFormatError: It is not as the grammar wants it.
    """
    place = Place(file, raw.line if isinstance(raw, YamlMap) else 0)
    values = FILE.read(raw, place)
    read = read_node if values["__class__"] == V2 else None
    at = place.key(raw, "splits")
    splits = {}
    for name, split in values["splits"].items():
        here = at.key(values["splits"], name)
        splits[name] = read(split, here, NODE) if read else _read_v1_split(split, here)
    return WrittenFile(splits, values["expand_paths"])
