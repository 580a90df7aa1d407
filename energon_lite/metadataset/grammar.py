"""The grammar of MetadatasetV2: which keys the nodes of a tree have, and what may stand there.

To add a key, add it to a table here: parser, error texts and JSON Schema follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.grammar_values import PERCENT_SUBSET, SCHEDULE, SUBSET, WEIGHT
from energon_lite.metadataset.shapes import (
    NUMBER,
    TAGS,
    TEXT,
    Key,
    Place,
    Shape,
    Value,
    choice,
    is_integer,
    or_nothing,
    read_number,
)
from energon_lite.stages.blend import MODES, UNTIL
from energon_lite.storage.yaml import YamlMap


def _read_repetitions(raw: Any, place: Place) -> Fraction:
    read_number(raw, place)
    # 0.1 means a tenth, not the float next to it.
    return Fraction(str(raw))


def _read_multiplier(raw: Any, place: Place) -> int | None:
    if raw is None or (is_integer(raw) and (raw == -1 or raw >= 1)):
        value: int | None = raw
        return value
    raise place.mismatch("a whole number of at least 1, -1 (with replacement) or null", raw)


@dataclass(frozen=True)
class Written:
    """A node as it is written: checked, defaults filled in, nothing looked up."""

    shape: Shape
    values: dict[str, Any]
    place: Place
    mapping: YamlMap

    def at(self, key: str) -> Place:
        """Returns the place of a key."""
        return self.place.key(self.mapping, key)


@dataclass(frozen=True)
class Role:
    """A place where a node may stand, with the keys that it has there only."""

    name: str
    about: str
    keys: tuple[Key, ...] = ()


def _nodes(role: Role) -> Value:
    def read(raw: Any, place: Place) -> tuple[Written, ...]:
        if not isinstance(raw, list):
            raise place.mismatch("a list of entries, as [{path: ./coco}]", raw)
        if not raw:
            raise place.error("the list is empty; give at least one entry")
        return tuple(
            read_node(item, place.item(index, item), role) for index, item in enumerate(raw)
        )

    items = {"$ref": f"#/$defs/{role.name}"}
    return Value(read, {"type": "array", "items": items, "minItems": 1})


NODE = Role("node", "A split, or an entry of concat.")
BLEND_ENTRY = Role(
    "blend_entry",
    "An entry of blend.",
    (
        Key(
            "weight",
            WEIGHT,
            "Its share, relative to the entries beside it: a number, or a schedule. 0 is off.",
            default=1.0,
        ),
    ),
)
EPOCHIZED_ENTRY = Role(
    "blend_epochized_entry",
    "An entry of blend_epochized.",
    (
        Key(
            "repetitions",
            Value(_read_repetitions, NUMBER.schema),
            "How often an epoch holds each sample; may be fractional. 0 is off.",
            default=Fraction(1),
        ),
    ),
)
ROLES = (NODE, BLEND_ENTRY, EPOCHIZED_ENTRY)

PATH = Key(
    "path",
    TEXT,
    "A prepared dataset folder or another metadataset file; relative to this file.",
    required=True,
)
SPLIT_PART = Key(
    "split_part",
    or_nothing(TEXT),
    "Which split of the dataset or metadataset to take; by default the surrounding split's name.",
)
SUBFLAVORS = Key(
    "subflavors",
    or_nothing(TAGS),
    "Tags of the samples. They go over those of dataset.yaml and of nodes inside.",
)
MULTIPLIER = Key(
    "shuffle_over_epochs_multiplier",
    Value(
        _read_multiplier,
        {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]},
    ),
    "Epochs that are shuffled together; -1 draws with replacement, null does not shuffle.",
    default=1,
)
CONFIGS = (
    Key("dataset_config", or_nothing(TEXT), "File in .nv-meta to take in place of dataset.yaml."),
    Key("split_config", or_nothing(TEXT), "File in .nv-meta to take in place of split.yaml."),
)


def _anywhere(subset: Shape) -> tuple[Key, ...]:
    """Returns the keys of every node; what they say holds for all that is in it."""
    return (
        Key(
            "name",
            or_nothing(TEXT),
            "A name; of a dataset, the source's id in statistics and state.",
        ),
        Key(
            "loss_weight",
            NUMBER,
            "Factor for the loss of its samples; multiplies down.",
            default=1.0,
        ),
        Key(
            "subset",
            or_nothing(Value(subset.read, {"$ref": f"#/$defs/{subset.name}"})),
            "Takes only a range of the samples of each dataset in it.",
        ),
        SUBFLAVORS,
        SPLIT_PART,
        MULTIPLIER,
    )


# The first key of each shape is the one that makes a map a node of that kind.
REFERENCE = Shape(
    "reference", "A dataset folder, or another metadataset.", (PATH, *_anywhere(SUBSET), *CONFIGS)
)
BLEND = Shape(
    "blend",
    "Each sample from one of the entries, by weight.",
    (
        Key(
            "blend", _nodes(BLEND_ENTRY), "Entries, each with a weight (1 by default).",
            required=True,
        ),
        *_anywhere(PERCENT_SUBSET),
        Key(
            "blend_mode",
            or_nothing(choice(*MODES)),
            "exact (the default) keeps to the weights at all times; random draws independently. "
            "Holds for the blends inside too.",
        ),
        Key(
            "unit",
            or_nothing(choice("samples", "tokens")),
            "What the weights are shares of: samples (the default) or tokens. Holds for the blends "
            "inside too.",
        ),
        Key(
            "lengths",
            or_nothing(TEXT),
            "With unit: tokens, a stored length index; without, lengths are measured.",
        ),
        Key(
            "until",
            or_nothing(choice(*UNTIL)),
            "When it ends: with the first entry that does, when all have ended once, or never.",
        ),
    ),
)  # fmt: skip
BLEND_EPOCHIZED = Shape(
    "blend_epochized",
    "All samples of the entries, each as often as its repetitions say, mixed, per epoch.",
    (
        Key(
            "blend_epochized",
            _nodes(EPOCHIZED_ENTRY),
            "Entries, each with repetitions (1 by default).",
            required=True,
        ),
        *_anywhere(PERCENT_SUBSET),
    ),
)
CONCAT = Shape(
    "concat",
    "One entry after the other.",
    (Key("concat", _nodes(NODE), "Entries.", required=True), *_anywhere(PERCENT_SUBSET)),
)
NODE_SHAPES = {shape.keys[0].name: shape for shape in (REFERENCE, BLEND, BLEND_EPOCHIZED, CONCAT)}

_NO_JOIN = (
    "this version does not read joins (key {key!r}). Store the joined samples as one dataset, or "
    "read this file with megatron.energon"
)
NOT_READ = {
    "join": _NO_JOIN,
    "joiner": _NO_JOIN,
    "nonmatch": _NO_JOIN,
    "aux": "this version does not read auxiliary datasets (key 'aux'). Put the parts into the "
    "dataset itself, or open the other dataset in your task encoder",
}


def _homes() -> dict[str, str]:
    """Names the place where each misplaced key belongs."""
    homes = {
        "datasets": "to files without '__class__: MetadatasetV2'; write 'blend'",
        "subflavor": "to files without '__class__: MetadatasetV2'; write 'subflavors'",
    }
    for main, shape in NODE_SHAPES.items():
        homes.update({key.name: f"beside {main!r}" for key in shape.keys[1:]})
    for role, main in ((BLEND_ENTRY, "blend"), (EPOCHIZED_ENTRY, "blend_epochized")):
        homes.update({key.name: f"to the entries of {main!r}" for key in role.keys})
    homes.update({key.name: "into 'weight'" for key in SCHEDULE.keys})
    homes.update({key.name: "into 'subset'" for key in SUBSET.keys})
    return homes


HOMES = _homes()


def _refusal(mapping: YamlMap, key: str, place: Place, allowed: list[str]) -> DatasetFormatError:
    at = place.line_of(mapping, key)
    if key in NOT_READ:
        return at.error(NOT_READ[key].format(key=key))
    if key in HOMES:
        return at.error(
            f"key {key!r} does not belong here but {HOMES[key]}. "
            f"Allowed here: {', '.join(allowed)}."
        )
    return place.unknown(mapping, key, allowed)


def _shape_of(mapping: YamlMap, place: Place, role: Role) -> Shape:
    for key in mapping:
        if key in NOT_READ:
            raise _refusal(mapping, key, place, [])
    found = [main for main in NODE_SHAPES if main in mapping]
    if len(found) == 1:
        return NODE_SHAPES[found[0]]
    one_of = f"exactly one of {', '.join(NODE_SHAPES)}"
    if found:
        raise place.error(f"{' and '.join(map(repr, found))} exclude each other: give {one_of}")
    shapes = NODE_SHAPES.values()
    keys = [*NODE_SHAPES, *(key.name for key in role.keys)]
    keys += [key.name for shape in shapes for key in shape.keys if key.name not in keys]
    allowed = list(dict.fromkeys(keys))
    for key in mapping:
        if key not in allowed:
            raise _refusal(mapping, key, place, allowed)
    raise place.error(f"what to read is missing: give {one_of}")


def read_node(raw: Any, place: Place, role: Role) -> Written:
    """Checks a node and all that is written in it.

    Args:
        raw: what the YAML has.
        place: where.
        role: where the node stands.

    Raises:
        DatasetFormatError: It is not as the grammar wants it.
    """
    if not isinstance(raw, YamlMap):
        hint = f" Write {{path: {raw}}}." if isinstance(raw, str) else ""
        raise place.mismatch(f"a map with one of the keys {', '.join(NODE_SHAPES)}", raw, hint)
    shape = _shape_of(raw, place, role)
    allowed = [key.name for key in (*shape.keys, *role.keys)]
    for key in raw:
        if key not in allowed:
            raise _refusal(raw, key, place, allowed)
    return Written(shape, shape.read(raw, place, role.keys), place, raw)
