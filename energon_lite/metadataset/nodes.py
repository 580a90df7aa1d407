"""What a metadataset says, as a tree; each class declares the keys that its nodes have.

To add a key, add a field here: reader, error texts and JSON Schema follow.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.values import (
    FLAG,
    MULTIPLIER,
    NOWHERE,
    NUMBER,
    REPETITIONS,
    TAGS,
    TEXT,
    WEIGHT,
    Keys,
    PercentSubset,
    Place,
    Subset,
    SubsetRange,
    Value,
    WrittenSchedule,
    checked,
    choice,
    key,
    keys_of,
    or_nothing,
    read_map,
    subset,
    unknown_key,
)
from energon_lite.order.schedules import Schedule, Weight
from energon_lite.stages.blend import MODES, UNTIL
from energon_lite.storage.yaml import YamlMap


def entries(read_entry: Callable[[Any, Place], Any], name: str) -> Value:
    """Makes the type of lists of at least one entry, which `name` names in the JSON Schema."""

    def read(raw: Any, place: Place) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise place.mismatch("a list of entries, as [{path: ./coco}]", raw)
        if not raw:
            raise place.error("the list is empty; give at least one entry")
        return tuple(read_entry(item, place.item(i, item)) for i, item in enumerate(raw))

    return Value(read, {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "minItems": 1})


@dataclass(frozen=True, kw_only=True)
class _Anywhere:
    """The keys of every node; what they say holds for all that is in the node.

    Attributes:
        name: A name; of a dataset, the source's id in statistics and state.
        loss_weight: Factor for the loss of its samples; multiplies down.
        subset: Takes only a range of the samples of each dataset in it.
        subflavors: Tags of the samples. They go over those of dataset.yaml and of nodes inside.
        split_part: Which split of the dataset or metadataset to take; by default the surrounding
            split's name.
        shuffle_over_epochs_multiplier: Epochs that are shuffled together; -1 draws with
            replacement, null does not shuffle.
        place: where the node is written.
        lines: the line of each key.
    """

    name: str | None = key(or_nothing(TEXT), default=None)
    loss_weight: float = key(NUMBER, default=1.0)
    subset: tuple[SubsetRange, ...] = key(subset(PercentSubset, "percent_subset"), default=())
    subflavors: dict[str, Any] = key(or_nothing(TAGS, absent={}), default_factory=dict)
    split_part: str = key(or_nothing(TEXT, absent=""), default="")
    shuffle_over_epochs_multiplier: int | None = key(MULTIPLIER, default=1)
    place: Place = NOWHERE
    lines: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def at(self, key: str) -> Place:
        """Returns the place of a key."""
        file, line, path = self.place
        return Place(file, self.lines.get(key, line), f"{path}.{key}")


@dataclass(frozen=True, kw_only=True)
class Leaf(_Anywhere):
    """A dataset folder, or another metadataset.

    In a finished tree a leaf is a folder, and its values are those that hold there, with all that
    the nodes around it say: products of loss weights and multipliers (-1 if any is -1, None if any
    is null), the tags that won, and the subsets to be taken one after the other: its own, then
    those of the nodes around it, outwards.

    Attributes:
        written: A prepared dataset folder or another metadataset file; relative to this file.
        dataset_config: File in .nv-meta to take in place of dataset.yaml.
        split_config: File in .nv-meta to take in place of split.yaml.
        path: the folder: absolute, `.` and `..` resolved by text alone, links not followed.
        source_id: `name`, or the path relative to the root metadataset plus the split part. Two
            leaves may have the same.
    """

    written: str = key(TEXT, "path")
    subset: tuple[SubsetRange, ...] = key(subset(Subset, "subset"), default=())
    dataset_config: str | None = key(or_nothing(TEXT), default=None)
    split_config: str | None = key(or_nothing(TEXT), default=None)
    path: Path = Path()
    source_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Member:
    """An entry of blend.

    Attributes:
        weight: Its share, relative to the entries beside it: a number, or a schedule. 0 is off.
        node: what the entry is.
    """

    weight: Weight = key(WEIGHT, default=1.0)
    node: Node

    @property
    def is_off(self) -> bool:
        """Whether its weight is always 0."""
        if isinstance(self.weight, Schedule):
            return all(value == 0 for _, value in self.weight.points)
        return self.weight == 0


@dataclass(frozen=True, kw_only=True)
class Blend(_Anywhere):
    """Each sample from one of the entries, by weight.

    In a finished tree it has no entries that are off, and `mode`, `unit` and `lengths` are those
    that hold there.

    Attributes:
        members: Entries, each with a weight (1 by default).
        mode: exact (the default) keeps to the weights at all times; random draws independently.
            Holds for the blends inside too.
        unit: What the weights are shares of: samples (the default) or tokens. Holds for the blends
            inside too.
        lengths: With unit: tokens, a stored length index; without, lengths are measured.
        until: When it ends: with the first entry that does, when all have ended once, or never.
    """

    members: tuple[Member, ...] = key(
        entries(lambda raw, at: read_node(raw, at, Member), "blend_entry"), "blend"
    )
    mode: str = key(or_nothing(choice(*MODES), absent=""), "blend_mode", default="")
    unit: str = key(or_nothing(choice("samples", "tokens"), absent=""), default="")
    lengths: str | None = key(or_nothing(TEXT), default=None)
    until: str | None = key(or_nothing(choice(*UNTIL)), default=None)


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """An entry of blend_epochized.

    Attributes:
        repetitions: How often an epoch holds each sample; may be fractional. 0 is off.
        node: what the entry is.
    """

    repetitions: Fraction = key(REPETITIONS, default=Fraction(1))
    node: Node

    @property
    def is_off(self) -> bool:
        """Whether it is not in the epoch."""
        return self.repetitions == 0


@dataclass(frozen=True, kw_only=True)
class BlendEpochized(_Anywhere):
    """All samples of the entries, each as often as its repetitions say, mixed, per epoch.

    Attributes:
        members: Entries, each with repetitions (1 by default).
    """

    members: tuple[Repetition, ...] = key(
        entries(lambda raw, at: read_node(raw, at, Repetition), "blend_epochized_entry"),
        "blend_epochized",
    )


@dataclass(frozen=True, kw_only=True)
class Concat(_Anywhere):
    """One entry after the other.

    Attributes:
        members: Entries.
    """

    members: tuple[Node, ...] = key(entries(lambda raw, at: read_node(raw, at), "node"), "concat")


Node: TypeAlias = Leaf | Blend | BlendEpochized | Concat
KEYS = {kind: keys_of(kind) for kind in (Leaf, Blend, BlendEpochized, Concat, Member, Repetition)}
# The key that makes a map a node of a kind.
KINDS: dict[str, type[Any]] = {
    "path": Leaf, "blend": Blend, "blend_epochized": BlendEpochized, "concat": Concat
}  # fmt: skip
# What stands where: nodes, or nodes with the further keys of a class.
ENTRIES: dict[str, type[Any] | None] = {
    "node": None,
    "blend_entry": Member,
    "blend_epochized_entry": Repetition,
}
# The keys of a node of a kind where it is an entry.
ALLOWED: dict[tuple[type[Any], type[Any] | None], Keys] = {
    (kind, entry): {**KEYS[kind], **(KEYS[entry] if entry else {})}
    for kind in KINDS.values()
    for entry in ENTRIES.values()
}

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
# Of each key where it belongs, for the places where it is not allowed.
HOMES = {
    "datasets": "to files without '__class__: MetadatasetV2'; write 'blend'",
    "subflavor": "to files without '__class__: MetadatasetV2'; write 'subflavors'",
    **{name: f"beside {main!r}" for main, kind in KINDS.items() for name in list(KEYS[kind])[1:]},
    **dict.fromkeys(KEYS[Member], "to the entries of 'blend'"),
    **dict.fromkeys(KEYS[Repetition], "to the entries of 'blend_epochized'"),
    **dict.fromkeys(keys_of(WrittenSchedule), "into 'weight'"),
    **dict.fromkeys(keys_of(Subset), "into 'subset'"),
}


def _refusal(
    mapping: YamlMap, name: str, place: Place, allowed: Iterable[str]
) -> DatasetFormatError:
    at = place.line_of(mapping, name)
    if name in NOT_READ:
        return at.error(NOT_READ[name].format(key=name))
    if name in HOMES:
        return at.error(
            f"key {name!r} does not belong here but {HOMES[name]}. Allowed here: "
            f"{', '.join(allowed)}."
        )
    return unknown_key(mapping, name, place, allowed)


def _kind_of(raw: YamlMap, place: Place, entry: type[Any] | None) -> type[Any]:
    for name in raw:
        if name in NOT_READ:
            raise _refusal(raw, name, place, ())
    found = [main for main in KINDS if main in raw]
    if len(found) == 1:
        return KINDS[found[0]]
    one_of = f"exactly one of {', '.join(KINDS)}"
    if found:
        raise place.error(f"{' and '.join(map(repr, found))} exclude each other: give {one_of}")
    names = [name for kind in KINDS.values() for name in ALLOWED[kind, entry]]
    allowed = dict.fromkeys([*KINDS, *names])
    for name in raw:
        if name not in allowed:
            raise _refusal(raw, name, place, allowed)
    raise place.error(f"what to read is missing: give {one_of}")


def read_node(raw: Any, place: Place, entry: type[Any] | None = None) -> Any:
    """Reads a node, and all that is written in it; looks nothing up.

    Args:
        raw: what the YAML has.
        place: where.
        entry: `Member` or `Repetition`, if the node is an entry of a blend.

    Returns:
        The node, or the member that it is in.

    Raises:
        DatasetFormatError: It is not as the grammar wants it.
    """
    if not isinstance(raw, YamlMap):
        hint = f" Write {{path: {raw}}}." if isinstance(raw, str) else ""
        raise place.mismatch(f"a map with one of the keys {', '.join(KINDS)}", raw, hint)
    kind = _kind_of(raw, place, entry)
    values = read_map(raw, place, ALLOWED[kind, entry], _refusal)
    if entry is None:
        return kind(place=place, lines=raw.lines, **values)
    own = {name: values.pop(name) for name in KEYS[entry] if name in values}
    return entry(node=kind(place=place, lines=raw.lines, **values), **own)


OLDER, NEWER = "Metadataset", "MetadatasetV2"
_MODULES = r"(megatron\.energon|energon_lite)(\.[A-Za-z0-9_]+)*"


@dataclass(frozen=True, kw_only=True)
class MetadatasetFile:
    """A metadataset: which datasets make up each split.

    Attributes:
        module: megatron.energon; others are not imported.
        kind: MetadatasetV2. Without it the file is read in the older form.
        splits: A node for each split, under the split's name.
        expand_paths: Whether ${VARIABLE} and a leading ~ in the paths of this file are expanded.
    """

    module: str = key(
        checked(
            "megatron.energon, or a module in it, as no other is imported, even with `trust`",
            lambda raw: isinstance(raw, str) and re.fullmatch(_MODULES, raw) is not None,
            {"type": "string", "pattern": f"^{_MODULES}$"},
        ),
        "__module__",
        default="megatron.energon",
    )
    kind: str = key(choice(OLDER, NEWER), "__class__", default=OLDER)
    splits: dict[str, Any] = key(
        checked(
            "a map of splits, as {train: {path: ./coco}}",
            lambda raw: isinstance(raw, YamlMap) and len(raw) > 0,
            {"type": "object", "minProperties": 1},
        )
    )
    expand_paths: bool = key(FLAG, default=False)


@dataclass(frozen=True, kw_only=True)
class OlderSplit:
    """A split in the older form.

    Attributes:
        members: Entries, each with a weight (1 by default).
    """

    members: tuple[Member, ...] = key(
        entries(lambda raw, at: _read_older_entry(raw, at), "v1_dataset"), "datasets"
    )


@dataclass(frozen=True, kw_only=True)
class OlderEntry:
    """An entry of datasets.

    Attributes:
        written: A prepared dataset folder or another metadataset file; relative to this file.
        weight: Its share, relative to the entries beside it. 0 is off.
        split_part: Which split of the dataset or metadataset to take; by default the surrounding
            split's name.
        subflavor: Deprecated: write subflavors.
        subflavors: Tags of the samples. They go over those of dataset.yaml and of nodes inside.
        shuffle_over_epochs_multiplier: Epochs that are shuffled together; -1 draws with
            replacement, null does not shuffle.
        dataset_config: File in .nv-meta to take in place of dataset.yaml.
        split_config: File in .nv-meta to take in place of split.yaml.
    """

    written: str = key(TEXT, "path")
    weight: float = key(NUMBER, default=1.0)
    split_part: str = key(or_nothing(TEXT, absent=""), default="")
    subflavor: str | None = key(or_nothing(TEXT), default=None)
    subflavors: dict[str, Any] = key(or_nothing(TAGS, absent={}), default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = key(MULTIPLIER, default=1)
    dataset_config: str | None = key(or_nothing(TEXT), default=None)
    split_config: str | None = key(or_nothing(TEXT), default=None)


_FILE, _SPLIT, _ENTRY = keys_of(MetadatasetFile), keys_of(OlderSplit), keys_of(OlderEntry)
_NEWER_ONLY = {"path", *HOMES, *KINDS, *NOT_READ} - {*_SPLIT, *(_ENTRY.keys() - {"path"})}


def _older_refusal(
    mapping: YamlMap, name: str, place: Place, allowed: Iterable[str]
) -> DatasetFormatError:
    if name not in _NEWER_ONLY:
        return unknown_key(mapping, name, place, allowed)
    return place.line_of(mapping, name).error(
        f"key {name!r} is not of the older form, in which files without '__class__' or with "
        "'__class__: Metadataset' are read. Add '__module__: megatron.energon' and '__class__: "
        "MetadatasetV2' at the top of the file; 'datasets' is then called 'blend'"
    )


def _read_older_entry(raw: Any, place: Place) -> Member:
    values = read_map(raw, place, _ENTRY, _older_refusal)
    weight, old = values.pop("weight", 1.0), values.pop("subflavor", None)
    if old is not None:
        message = f"is deprecated; write subflavors: {{__subflavor__: {old}}}"
        warnings.warn(f"{place.key(raw, 'subflavor')} {message}", FutureWarning, stacklevel=2)
        values["subflavors"] = {"__subflavor__": old, **values.get("subflavors", {})}
    return Member(weight=weight, node=Leaf(place=place, lines=raw.lines, **values))


def read_content(raw: Any, name: str) -> MetadatasetFile:
    """Reads all splits of a metadataset; looks nothing up.

    Args:
        raw: what the YAML has.
        name: the file's name, for error texts.

    Returns:
        The file, whose splits are nodes.

    Raises:
        DatasetFormatError: It is not as the grammar wants it.
    """
    place = Place(name, raw.line if isinstance(raw, YamlMap) else 0)
    file = MetadatasetFile(**read_map(raw, place, _FILE))
    at, splits = place.key(raw, "splits"), {}
    for split, written in file.splits.items():
        here = at.key(raw["splits"], split)
        if file.kind == NEWER:
            splits[split] = read_node(written, here)
        else:
            members = read_map(written, here, _SPLIT, _older_refusal)
            splits[split] = Blend(place=here, lines=written.lines, **members)
    return replace(file, splits=splits)


def children(node: Node) -> tuple[Node, ...]:
    """Returns the nodes right below `node`, in the file's order."""
    if isinstance(node, Leaf):
        return ()
    if isinstance(node, Concat):
        return node.members
    return tuple(member.node for member in node.members)


def leaves(node: Node) -> list[Leaf]:
    """Returns the leaves of a tree, in the file's order."""
    if isinstance(node, Leaf):
        return [node]
    return [leaf for child in children(node) for leaf in leaves(child)]


def combined_multiplier(outer: int | None, inner: int | None) -> int | None:
    """Multiplies `shuffle_over_epochs_multiplier` down the tree.

    None (file order) anywhere wins, then -1 (with replacement).
    """
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner
