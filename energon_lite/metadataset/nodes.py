"""The nodes of a metadataset; the fields of each class declare the keys of the YAML.

A new key is a new field: reader, error texts and JSON Schema follow from it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path, PurePath
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
    optional,
    read_map,
    subset,
    unknown_key,
)
from energon_lite.order.blending import MODES
from energon_lite.order.schedules import Schedule, Weight
from energon_lite.stages.blend import UNTIL
from energon_lite.storage.yaml import YamlMap


@dataclass(frozen=True)
class Aux:
    """A file store that cookers get.

    Attributes:
        written: the path, as in the file.
        is_plain: whether it is a plain folder, and not a prepared dataset.
        place: the place in the file.
        path: the absolute path.
        label: the path relative to the root metadataset.
    """

    written: str
    is_plain: bool
    place: Place = NOWHERE
    path: PurePath = Path()
    label: str = ""


# Before a local path, or `filesystem+` before the address of a store.
_PLAIN_FOLDER = re.compile(r"^filesystem(?::/{2}|\+(?=\w+:/))")
# Names that mean something else among the arguments of a cooker.
_RESERVED = {
    "primary": "the dataset itself, for `@cooker(need_primary=True)`",
    "cache": "the cache, for `@cooker(need_cache=True)`",
}
_STORE = "a path, as ./images or filesystem://./images, or a map {path: ...} or {fs_path: ...}"


@dataclass(frozen=True)
class Store:
    """The files in the tars of a prepared dataset, or of a folder: exactly one of path and fs_path.

    Attributes:
        path: A prepared dataset folder; relative to this file.
        fs_path: A folder; relative to this file.
    """

    path: str = key(TEXT, default="")
    fs_path: str = key(TEXT, default="")


def _read_store(raw: Any, place: Place) -> Aux:
    if isinstance(raw, YamlMap):
        paths = read_map(raw, place, keys_of(Store))
        if len(paths) != 1:
            raise place.mismatch(_STORE, dict(raw))
        ((name, written),) = paths.items()
        return Aux(_without_mark(written), name == "fs_path", place)
    if not isinstance(raw, str) or not _without_mark(raw):
        raise place.mismatch(_STORE, raw)
    return Aux(_without_mark(raw), raw != _without_mark(raw), place)


def _without_mark(written: str) -> str:
    return _PLAIN_FOLDER.sub("", written, count=1)


def _read_stores(raw: Any, place: Place) -> dict[str, Aux]:
    if not isinstance(raw, YamlMap):
        raise place.mismatch("a map of names and file stores, as {images: ./images}", raw)
    for name in raw:
        if name in _RESERVED:
            raise place.key(raw, name).error(
                f"{name!r} is reserved: it is {_RESERVED[name]}. Choose another name"
            )
    return {name: _read_store(value, place.key(raw, name)) for name, value in raw.items()}


_STORES = Value(
    _read_stores,
    {
        "type": "object",
        "propertyNames": {"pattern": f"^(?!({'|'.join(_RESERVED)})$)"},
        "additionalProperties": {
            "anyOf": [
                dict(TEXT.schema),
                {"$ref": "#/$defs/store", "minProperties": 1, "maxProperties": 1},
            ]
        },
    },
)


def entries(read_entry: Callable[[Any, Place], Any], name: str) -> Value:
    """Returns the type of lists of at least one entry; `name` is the entry in the JSON Schema."""

    def read(raw: Any, place: Place) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise place.mismatch("a list of entries, as [{path: ./coco}]", raw)
        if not raw:
            raise place.error("the list is empty; write at least one entry")
        return tuple(read_entry(item, place.item(i, item)) for i, item in enumerate(raw))

    return Value(read, {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "minItems": 1})


@dataclass(frozen=True, kw_only=True)
class _Anywhere:
    """The keys of every node; each applies to all datasets below the node.

    Attributes:
        name: A name; for a dataset, the id of its source in statistics and state.
        loss_weight: Factor for the loss of the samples; factors of nested nodes multiply.
        subset: Selects a range of the samples of each dataset.
        subflavors: Tags of the samples; they override those of dataset.yaml and of nested nodes.
        split_part: The split of the dataset or metadataset to use; by default the name of the
            surrounding split.
        shuffle_over_epochs_multiplier: Number of epochs that are shuffled together; -1 draws with
            replacement, null does not shuffle.
        place: the place of the node in its file.
        lines: the line of each key in that file.
    """

    name: str | None = key(optional(TEXT), default=None)
    loss_weight: float = key(NUMBER, default=1.0)
    subset: tuple[SubsetRange, ...] = key(subset(PercentSubset, "percent_subset"), default=())
    subflavors: dict[str, Any] = key(optional(TAGS, absent={}), default_factory=dict)
    split_part: str = key(optional(TEXT, absent=""), default="")
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

    `read_metadataset` replaces nested metadatasets and sets the effective values of each remaining
    leaf: the products of all loss weights and multipliers above it (a multiplier is -1 if any is
    -1, None if any is null), the merged tags, and the subsets to apply one after the other, from
    the innermost to the outermost.

    Attributes:
        written: A prepared dataset folder or another metadataset file; relative to this file.
        dataset_config: File in .nv-meta to use instead of dataset.yaml.
        split_config: File in .nv-meta to use instead of split.yaml.
        meta_dir: Folder with the .nv-meta and the tar indexes, if they are not beside the tars;
            relative to this file.
        aux: File stores that the cookers of a crude dataset get as arguments, by name. Prepared
            datasets, or plain folders (filesystem://FOLDER); relative to this file.
        path: the absolute path of the folder; `.` and `..` are resolved as text, links are not
            followed.
        source_id: `name`, or the path relative to the root metadataset plus the split part. It
            need not be unique.
    """

    written: str = key(TEXT, "path")
    subset: tuple[SubsetRange, ...] = key(subset(Subset, "subset"), default=())
    dataset_config: str | None = key(optional(TEXT), default=None)
    split_config: str | None = key(optional(TEXT), default=None)
    meta_dir: str | None = key(optional(TEXT), default=None)
    aux: dict[str, Aux] = key(optional(_STORES, absent={}), default_factory=dict)
    path: PurePath = Path()
    source_id: str = ""

    @property
    def folders(self) -> tuple[Leaf, ...]:
        """The dataset folders: one, or those of a join."""
        return (self,)


@dataclass(frozen=True, kw_only=True)
class JoinMember(Leaf):
    """An entry of join.

    Attributes:
        written: A prepared dataset folder; relative to this file.
        nonmatch: What happens to a sample of the first entry without a match here: error (the
            default), skip (it is dropped), or none (the joiner gets None).
        split_part: The split part to use; by default that of the join.
        subflavors: Tags of the samples; those of the join override them.
        subset: Selects a range of the samples.
        shuffle_over_epochs_multiplier: As beside join; that of the first entry counts.
        keyword: the name of the entry in a map; empty in a list.
    """

    nonmatch: str = key(choice("error", "skip", "none"), default="error")
    name: str | None = None
    loss_weight: float = 1.0
    aux: dict[str, Aux] = field(default_factory=dict)
    keyword: str = ""


@dataclass(frozen=True, kw_only=True)
class Joiner:
    """Makes one sample of those of a row: exactly one of __class__ and __function__.

    Attributes:
        module: The module; it is imported only with `trust`, or if it is imported already.
        class_name: A class of samples, whose from_joined is called.
        function: A function.
        place: the place in the file.
    """

    module: str = key(TEXT, "__module__")
    class_name: str = key(optional(TEXT, absent=""), "__class__", default="")
    function: str = key(optional(TEXT, absent=""), "__function__", default="")
    place: Place = NOWHERE


def _read_joiner(raw: Any, place: Place) -> Joiner:
    if not isinstance(raw, YamlMap):
        raise place.mismatch("{__module__: my_module, __class__: MyJoined}", raw)
    found = Joiner(place=place, **read_map(raw, place, keys_of(Joiner)))
    if bool(found.class_name) == bool(found.function):
        raise place.error(
            "a joiner has exactly one of __class__ (a class of samples) and __function__"
        )
    return found


def _read_joined(raw: Any, place: Place) -> tuple[JoinMember, ...]:
    if isinstance(raw, YamlMap):
        named = [(name, entry, place.key(raw, name)) for name, entry in raw.items()]
    elif isinstance(raw, list):
        named = [("", entry, place.item(i, entry)) for i, entry in enumerate(raw)]
    else:
        raise place.mismatch("a list of entries, as [{path: ./texts}, {path: ./pictures}]", raw)
    found = tuple(
        JoinMember(
            keyword=name, place=at, lines=getattr(entry, "lines", {}),
            **read_map(entry, at, keys_of(JoinMember), _refusal),
        )
        for name, entry, at in named
    )  # fmt: skip
    if len(found) < 2:
        raise place.error(f"a join of {len(found)} datasets; write at least two, or a `path`")
    if found[0].nonmatch != "error":
        raise found[0].place.error(
            f"nonmatch: {found[0].nonmatch} on the first entry, the primary, whose samples are "
            "those of the join; move it to the entry whose samples may be missing"
        )
    return found


_JOINED = {"$ref": "#/$defs/join_entry"}
_JOIN = Value(_read_joined, {"anyOf": [
    {"type": "array", "items": _JOINED, "minItems": 2},
    {"type": "object", "additionalProperties": _JOINED, "minProperties": 2},
]})  # fmt: skip
_JOINER = Value(_read_joiner, {"$ref": "#/$defs/joiner"})


@dataclass(frozen=True, kw_only=True)
class Join(Leaf):
    """One dataset of several: the samples of the same key become one sample.

    Attributes:
        members: Datasets, the primary first, whose samples and order the join has: a list, or a
            map, whose names are the keyword arguments of the joiner.
        joiner: What makes one sample of those of a key.
        path: the absolute path of the primary.
        cache: folder of the join indexes; None in a dict without a file.
    """

    members: tuple[JoinMember, ...] = key(_JOIN, "join")
    joiner: Joiner | Callable[..., Any] = key(_JOINER)
    written: str = ""
    dataset_config: str | None = None
    split_config: str | None = None
    aux: dict[str, Aux] = field(default_factory=dict)
    cache: PurePath | None = None

    @property
    def folders(self) -> tuple[Leaf, ...]:
        """The dataset folders."""
        return self.members


@dataclass(frozen=True, kw_only=True)
class Member:
    """An entry of blend.

    Attributes:
        weight: Share relative to the other entries: a number or a schedule. 0 turns the entry off.
        node: the entry itself.
    """

    weight: Weight = key(WEIGHT, default=1.0)
    node: Node

    @property
    def is_off(self) -> bool:
        """Whether the weight is always 0."""
        if isinstance(self.weight, Schedule):
            return all(value == 0 for _, value in self.weight.points)
        return self.weight == 0


@dataclass(frozen=True, kw_only=True)
class Blend(_Anywhere):
    """Draws each sample from one of the entries, by weight.

    `read_metadataset` removes the entries of weight 0, and sets the effective `mode`, `unit` and
    `lengths`.

    Attributes:
        members: Entries, each with a weight (1 by default).
        mode: exact (the default) keeps to the weights at all times; random draws independently.
            Nested blends inherit it.
        unit: Whether the weights are shares of the samples (the default) or of the tokens. Nested
            blends inherit it.
        lengths: Name of a stored length index for unit: tokens; without one, lengths are measured.
        until: When the blend ends: with the first entry that ends, when all entries have ended
            once, or never.
    """

    members: tuple[Member, ...] = key(
        entries(lambda raw, at: read_node(raw, at, Member), "blend_entry"), "blend"
    )
    mode: str = key(optional(choice(*MODES), absent=""), "blend_mode", default="")
    unit: str = key(optional(choice("samples", "tokens"), absent=""), default="")
    lengths: str | None = key(optional(TEXT), default=None)
    until: str | None = key(optional(choice(*UNTIL)), default=None)


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """An entry of blend_epochized.

    Attributes:
        repetitions: How often each sample is in an epoch; may be fractional. 0 turns the entry off.
        node: the entry itself.
    """

    repetitions: Fraction = key(REPETITIONS, default=Fraction(1))
    node: Node

    @property
    def is_off(self) -> bool:
        """Whether no sample is in the epoch."""
        return self.repetitions == 0


@dataclass(frozen=True, kw_only=True)
class BlendEpochized(_Anywhere):
    """Mixes the samples of all entries; each is in an epoch as often as its repetitions.

    Attributes:
        members: Entries, each with repetitions (1 by default).
    """

    members: tuple[Repetition, ...] = key(
        entries(lambda raw, at: read_node(raw, at, Repetition), "blend_epochized_entry"),
        "blend_epochized",
    )


@dataclass(frozen=True, kw_only=True)
class Concat(_Anywhere):
    """Reads one entry after the other.

    Attributes:
        members: Entries.
    """

    members: tuple[Node, ...] = key(entries(lambda raw, at: read_node(raw, at), "node"), "concat")


Node: TypeAlias = Leaf | Blend | BlendEpochized | Concat
KEYS = {
    kind: keys_of(kind)
    for kind in (Leaf, Join, Blend, BlendEpochized, Concat, Member, Repetition, JoinMember)
}
# By the key that only nodes of one class have, the class.
KINDS: dict[str, type[Any]] = {
    "path": Leaf, "join": Join, "blend": Blend, "blend_epochized": BlendEpochized,
    "concat": Concat,
}  # fmt: skip
# Where nodes are written; entries of blends have the further keys of a class.
ENTRIES: dict[str, type[Any] | None] = {
    "node": None,
    "blend_entry": Member,
    "blend_epochized_entry": Repetition,
}
# The allowed keys of a node, by its class and the class of the entry.
ALLOWED: dict[tuple[type[Any], type[Any] | None], Keys] = {
    (kind, entry): {**KEYS[kind], **(KEYS[entry] if entry else {})}
    for kind in KINDS.values()
    for entry in ENTRIES.values()
}

# Where each key belongs, for errors at places where it is not allowed.
HOMES = {
    "datasets": "to files without '__class__: MetadatasetV2'; write 'blend'",
    "subflavor": "to files without '__class__: MetadatasetV2'; write 'subflavors'",
    **{name: f"beside {main!r}" for main, kind in KINDS.items() for name in list(KEYS[kind])[1:]},
    "nonmatch": "to the entries of 'join'",
    **dict.fromkeys(KEYS[Member], "to the entries of 'blend'"),
    **dict.fromkeys(KEYS[Repetition], "to the entries of 'blend_epochized'"),
    **dict.fromkeys(keys_of(WrittenSchedule), "into 'weight'"),
    **dict.fromkeys(keys_of(Subset), "into 'subset'"),
}


def _refusal(
    mapping: YamlMap, name: str, place: Place, allowed: Iterable[str]
) -> DatasetFormatError:
    at = place.line_of(mapping, name)
    if name in HOMES:
        return at.error(
            f"key {name!r} does not belong here but {HOMES[name]}. Allowed here: "
            f"{', '.join(allowed)}."
        )
    return unknown_key(mapping, name, place, allowed)


def _kind_of(raw: YamlMap, place: Place, entry: type[Any] | None) -> type[Any]:
    found = [main for main in KINDS if main in raw]
    if len(found) == 1:
        return KINDS[found[0]]
    one_of = f"exactly one of {', '.join(KINDS)}"
    if found:
        raise place.error(f"{' and '.join(map(repr, found))} exclude each other; write {one_of}")
    names = [name for kind in KINDS.values() for name in ALLOWED[kind, entry]]
    allowed = dict.fromkeys([*KINDS, *names])
    for name in raw:
        if name not in allowed:
            raise _refusal(raw, name, place, allowed)
    raise place.error(f"what to read is missing; write {one_of}")


def read_node(raw: Any, place: Place, entry: type[Any] | None = None) -> Any:
    """Reads a node and all nodes below it; resolves no path.

    Args:
        raw: the parsed YAML value.
        place: its place in the file.
        entry: `Member` or `Repetition`, if the node is an entry of a blend.

    Returns:
        The node, or the entry that contains it.

    Raises:
        DatasetFormatError: The node does not follow the grammar.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class MetadatasetFile:
    """A metadataset: which datasets make up each split.

    Attributes:
        module: megatron.energon; no other module is imported.
        kind: MetadatasetV2. Without it the file is read in the older form.
        splits: A node for each split, by the name of the split.
        expand_paths: Whether ${VARIABLE} and a leading ~ are expanded in the paths of this file.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class OlderSplit:
    """A split in the older form.

    Attributes:
        members: Entries, each with a weight (1 by default).
    """

    members: tuple[Member, ...] = key(
        entries(lambda raw, at: _read_older_entry(raw, at), "v1_dataset"), "datasets"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OlderEntry:
    """An entry of datasets.

    Attributes:
        written: A prepared dataset folder or another metadataset file; relative to this file.
        weight: Share relative to the other entries. 0 turns the entry off.
        split_part: The split of the dataset or metadataset to use; by default the name of the
            surrounding split.
        subflavor: Deprecated; write subflavors.
        subflavors: Tags of the samples; they override those of dataset.yaml and of nested nodes.
        shuffle_over_epochs_multiplier: Number of epochs that are shuffled together; -1 draws with
            replacement, null does not shuffle.
        dataset_config: File in .nv-meta to use instead of dataset.yaml.
        split_config: File in .nv-meta to use instead of split.yaml.
    """

    written: str = key(TEXT, "path")
    weight: float = key(NUMBER, default=1.0)
    split_part: str = key(optional(TEXT, absent=""), default="")
    subflavor: str | None = key(optional(TEXT), default=None)
    subflavors: dict[str, Any] = key(optional(TAGS, absent={}), default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = key(MULTIPLIER, default=1)
    dataset_config: str | None = key(optional(TEXT), default=None)
    split_config: str | None = key(optional(TEXT), default=None)


_FILE, _SPLIT, _ENTRY = keys_of(MetadatasetFile), keys_of(OlderSplit), keys_of(OlderEntry)
_NEWER_ONLY = {"path", *HOMES, *KINDS} - {*_SPLIT, *(_ENTRY.keys() - {"path"})}


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
    """Reads all splits of a metadataset file; resolves no path.

    Args:
        raw: the parsed YAML document.
        name: the name of the file, for error texts.

    Returns:
        The file; its splits are nodes.

    Raises:
        DatasetFormatError: The file does not follow the grammar.
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
    """Returns the direct children of a node, in the order of the file."""
    if isinstance(node, Leaf):
        return ()
    if isinstance(node, Concat):
        return node.members
    return tuple(member.node for member in node.members)


def walk(node: Node) -> Iterator[Node]:
    """Yields a node and all nodes below it, in the order of the file."""
    yield node
    for child in children(node):
        yield from walk(child)


def leaves(node: Node) -> list[Leaf]:
    """Returns the leaves of a tree, in the order of the file."""
    return [leaf for leaf in walk(node) if isinstance(leaf, Leaf)]


def combined_multiplier(outer: int | None, inner: int | None) -> int | None:
    """Multiplies `shuffle_over_epochs_multiplier` down the tree.

    None (file order) anywhere wins, then -1 (with replacement).
    """
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner
