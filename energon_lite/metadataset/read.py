"""Reads a metadataset file into a tree of nodes; nested metadatasets become parts of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from os import PathLike
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

from energon_lite.core.errors import DatasetFormatError, add_note
from energon_lite.core.json_text import MAX_DEPTH
from energon_lite.formats.known import format_of
from energon_lite.metadataset.nodes import (
    Aux,
    Blend,
    BlendEpochized,
    Concat,
    Join,
    Leaf,
    MetadatasetFile,
    Node,
    combined_multiplier,
    read_content,
    walk,
)
from energon_lite.metadataset.paths import Folder, Target, root_folder
from energon_lite.metadataset.values import ONLY_LEAVES, Place, SubsetRange, as_read, close_match
from energon_lite.sources.dataset_config import WAY_OUT, is_trusted
from energon_lite.storage import files
from energon_lite.storage.byte_file import registered
from energon_lite.storage.local_paths import is_absolute, local_path, with_meta_dir
from energon_lite.storage.yaml import load_yaml

Source: TypeAlias = "str | PathLike[str] | Mapping[str, Any]"

_SUFFIXES = (".yaml", ".yml")
_INLINE = "<dict>"
# For example, 10,000 datasets may have 180 subflavors each.
_LARGEST_TREE, _TAGS = 100_000, 20
_OF_LEAF = {field.name for field in fields(Leaf)}


@dataclass(frozen=True, eq=False)
class _File:
    """A metadataset file; `chain` has (real path, shown name) of it and of the files above it."""

    name: str
    content: MetadatasetFile
    folder: Folder
    chain: tuple[tuple[PurePath, str], ...]
    tree: _Tree


@dataclass(eq=False)
class _Tree:
    """The files that were read for a tree, and the size of the tree so far.

    The size is limited, as ten files that each name the next file ten times stand for ten billion
    datasets.

    Attributes:
        trust: whether files may read the environment, and files at an address local paths; None:
            the value of `ENERGON_LITE_TRUST`.
        contents: by their shown names.
        size: number of nodes, plus a fraction for their subflavors.
    """

    trust: bool | None = None
    contents: dict[str, MetadatasetFile] = field(default_factory=dict)
    size: float = 0

    def add(self, node: Node, here: _Around) -> None:
        """Counts a node and its effective subflavors, and checks the limits."""
        self.size += 1 + _num_values(here.subflavors) / _TAGS
        if self.size > _LARGEST_TREE:
            raise node.place.error(
                f"the datasets and blends up to here, including those of nested metadatasets, are "
                f"more than {_LARGEST_TREE:,}, where {_TAGS} subflavors count as one more; name "
                "fewer datasets, or write fewer subflavors"
            )
        if here.depth > MAX_DEPTH // 2:
            raise node.place.error(f"more than {MAX_DEPTH // 2} nodes nested in one another")
        if not isfinite(here.loss_weight):
            raise node.place.error("the loss weights down to here multiply to infinity; lower them")


class _Around(NamedTuple):
    """Settings that a node inherits from those above it; `name` only by references to files."""

    split_part: str
    subflavors: dict[str, Any]
    loss_weight: float = 1.0
    shuffle_over_epochs_multiplier: int | None = 1
    subset: tuple[SubsetRange, ...] = ()
    name: str | None = None
    mode: str = "exact"
    unit: str = "samples"
    lengths: str | None = None
    depth: int = 0

    def entered(self, node: Node) -> _Around:
        """Returns the effective values of a node, which its children inherit."""
        tags = node.subflavors
        outer, inner = self.shuffle_over_epochs_multiplier, node.shuffle_over_epochs_multiplier
        return self._replace(
            split_part=node.split_part or self.split_part,
            subflavors={**tags, **self.subflavors} if tags else self.subflavors,
            loss_weight=self.loss_weight * node.loss_weight,
            shuffle_over_epochs_multiplier=combined_multiplier(outer, inner),
            subset=(*node.subset, *self.subset),
            name=self.name or node.name,
            depth=self.depth + 1,
        )

    def effective(self) -> dict[str, Any]:
        """Returns the values that a leaf gets."""
        own = self._asdict()
        return {name: own[name] for name in _OF_LEAF & own.keys()}


def is_metadataset(path: Source) -> bool:
    """Returns whether a path or mapping is a metadataset; decides by form, without reading."""
    if isinstance(path, Mapping):
        return True
    local = local_path(path)
    return local.suffix.lower() in _SUFFIXES and not files.is_folder(local)


def split_names(source: Source) -> list[str]:
    """Returns the names of the splits of a metadataset, in the order of the file.

    Raises:
        FileNotFoundError: The file does not exist.
        DatasetFormatError: The file is invalid; names file, line and key.
    """
    return list(_open_root(source).content.splits)


def read_metadataset(source: Source, split_part: str, trust: bool | None = None) -> Node:
    """Reads one split of a metadataset.

    Checks the whole file, and each metadataset that the split names. Opens no dataset.

    Args:
        source: path of a YAML file, or a mapping with the same content; relative paths in a
            mapping are relative to the current folder.
        split_part: the split.
        trust: whether paths may hold `${VARIABLE}`, and files at an address may name local paths;
            None: the value of `ENERGON_LITE_TRUST`.

    Raises:
        FileNotFoundError: A metadataset does not exist.
        DatasetFormatError: A file is invalid, lacks the split or needs trust; names file, line and
            key.
    """
    file = _open_root(source, trust)
    node = _split(file, _Around(split_part, {}), Place(file.name))
    first = {type(inner): inner.place for inner in reversed(list(walk(node)))}
    if Blend in first and BlendEpochized in first:  # Energon refuses them, too
        raise DatasetFormatError(
            f"all blends of a split must have the same blend mode: {first[BlendEpochized]} is a "
            f"'blend_epochized', {first[Blend]} a 'blend'. Write one of them in the other form"
        )
    return node


def _open_root(source: Source, trust: bool | None = None) -> _File:
    if isinstance(source, Mapping):
        content = read_content(as_read(source, _INLINE), _INLINE)
        return _File(_INLINE, content, root_folder(_INLINE), (), _Tree(trust))
    path = local_path(source)
    name = str(path)
    if not files.is_file(path):
        is_folder = files.is_folder(path)
        what = "is a folder, not a metadataset file" if is_folder else "does not exist"
        raise FileNotFoundError(f"metadataset {name} {what}; check the path")
    content = read_content(load_yaml(path), name)
    return _File(name, content, root_folder(name), ((files.resolved(path), name),), _Tree(trust))


def _open_nested(file: _File, target: Target, place: Place) -> _File:
    if not files.is_file(target.path):
        raise FileNotFoundError(
            f"{place}: there is no metadataset {target.path}; check the path, which is relative to "
            "the folder of the file that names it"
        )
    real = files.resolved(target.path)
    known = [path for path, _ in file.chain]
    chain = (*file.chain, (real, target.shown))
    if real in known:
        names = " -> ".join(name for _, name in chain[known.index(real) :])
        raise place.error(f"metadatasets name each other in a circle: {names}")
    contents = file.tree.contents
    if target.shown not in contents:
        contents[target.shown] = read_content(load_yaml(target.path), target.shown)
    return _File(target.shown, contents[target.shown], file.folder.above(target), chain, file.tree)


def _split(file: _File, around: _Around, place: Place) -> Node:
    name, splits = around.split_part, file.content.splits
    if name not in splits:
        subject = "" if place.file == file.name else f"{file.name} has "
        raise place.error(
            f"{subject}no split {name!r}.{close_match(name, splits)} Splits there: "
            f"{', '.join(splits)}. Ask for one of them with split_part"
        )
    return _looked_up(splits[name], file, around)


def _looked_up(node: Node, file: _File, around: _Around) -> Node:
    """Returns a node with its effective values, and with its children looked up."""
    here = around.entered(node)
    file.tree.add(node, here)
    if isinstance(node, Join):
        return _join(node, file, here)
    if isinstance(node, Leaf):
        return _leaf(node, file, here)
    inside = here._replace(name=None)
    if isinstance(node, Concat):
        nodes = tuple(_looked_up(member, file, inside) for member in node.members)
        return replace(node, members=nodes, name=here.name)
    if isinstance(node, Blend):
        inside = _blending(node, file, inside)
        node = replace(node, mode=inside.mode, unit=inside.unit, lengths=inside.lengths)
    members: Any = tuple(
        replace(member, node=_looked_up(member.node, file, inside))
        for member in node.members
        if not member.is_off
    )
    if not members:
        what, one = ("weights", "a weight") if isinstance(node, Blend) else ("repetitions",) * 2
        raise node.place.error(
            f"all {what} are 0, which turns every entry off. Write {one} above 0 to at least one"
        )
    return replace(node, members=members, name=here.name)


def _blending(node: Blend, file: _File, around: _Around) -> _Around:
    """Returns the effective mode, unit and lengths of a blend, which nested blends inherit."""
    unit, mode = node.unit or around.unit, node.mode or around.mode
    if unit != "tokens":
        if node.lengths:
            raise node.at("lengths").error("'lengths' has no meaning without 'unit: tokens'")
        return around._replace(mode=mode, unit=unit, lengths=None)
    if mode == "random":
        raise node.at("unit" if node.unit else "blend_mode").error(
            "a blend by tokens is exact: 'unit: tokens' cannot be 'blend_mode: random'"
        )
    if node.lengths and is_absolute(node.lengths):
        _check_local(file, local_path(node.lengths), node.at("lengths"))
    return around._replace(mode=mode, unit=unit, lengths=node.lengths or around.lengths)


def _leaf(node: Leaf, file: _File, here: _Around) -> Node:
    """Returns a leaf with its effective values, or the node of a nested metadataset."""
    target = _found(node.written, file, node.at("path"))
    found = format_of(target.path)
    if found.only_part is not None:
        what = f"a {found.name} file, which has no split parts and only crude samples"
        _refuse_configs(node, what)
    if is_metadataset(target.path):
        return _nested(node, file, here, target)
    path = target.path
    if node.meta_dir is not None:
        path = with_meta_dir(path, _found(node.meta_dir, file, node.at("meta_dir")).path)
    return replace(
        node,
        path=path,
        source_id=here.name or f"{file.folder.name(target)}/{here.split_part}",
        **here.effective(),
        aux={name: _looked_up_store(aux, file) for name, aux in node.aux.items()},
    )


def _found(written: str, file: _File, place: Place) -> Target:
    """Resolves a path that is written in a file."""
    expand = file.content.expand_paths
    if expand and "${" in written and not is_trusted(file.tree.trust):
        raise place.error(
            f"{written!r} reads the environment, which may hold secrets. Write the path itself; "
            f"or, if you trust the authors of {file.name}, {WAY_OUT}"
        )
    try:
        target = file.folder.find(written, expand=expand)
    except ValueError as error:
        raise place.error(str(error)) from None
    _check_local(file, target.path, place)
    return target


def _check_local(file: _File, path: PurePath, place: Place) -> None:
    """Refuses a path of this machine in a file that lies at an address."""
    if registered(file.folder.path) and not registered(path) and not is_trusted(file.tree.trust):
        raise place.error(
            f"{path} is on this machine, and {file.name} is at an address, so it may name "
            f"addresses only. If you trust its authors, {WAY_OUT}"
        )


def _looked_up_store(aux: Aux, file: _File) -> Aux:
    target = _found(aux.written, file, aux.place)
    return replace(aux, path=target.path, label=file.folder.name(target))


def _join(node: Join, file: _File, here: _Around) -> Join:
    """Returns a join with its effective values and its datasets."""
    inside = here._replace(name=None, loss_weight=1.0, subset=())
    members: list[Any] = []
    for member in node.members:
        around = inside.entered(member)
        file.tree.add(member, around)
        written = PurePath(member.written)
        if written.suffix.lower() in _SUFFIXES or format_of(written).only_part is not None:
            raise member.at("path").error(
                f"{member.written!r}: a join is of prepared dataset folders, as its samples are "
                "found by key; prepare the samples as a folder of tar shards"
            )
        members.append(_leaf(member, file, around))
    primary = members[0]
    is_file = file.name != _INLINE
    return replace(
        node,
        members=tuple(members),
        path=primary.path,
        cache=file.folder.path / f"{PurePath(file.name).name}.cache" if is_file else None,
        source_id=here.name or "+".join(member.source_id for member in members),
        **here.effective()
        | {"shuffle_over_epochs_multiplier": primary.shuffle_over_epochs_multiplier},
    )


def _refuse_configs(node: Leaf, what: str) -> None:
    """Refuses the keys that are for folders, where the path is `what`."""
    for key in ("dataset_config", "split_config", "meta_dir"):
        if getattr(node, key) is not None:
            raise node.at(key).error(
                f"{key!r} is for dataset folders, and {node.written} is {what}"
            )


def _nested(node: Leaf, file: _File, here: _Around, target: Target) -> Node:
    place = node.at("path")
    _refuse_configs(node, "a metadataset; set it beside the paths of the folders in there")
    if node.aux:
        raise node.at("aux").error(
            f"'aux' is for dataset folders, and {node.written} is a metadataset; write it beside "
            "the paths of the folders in there"
        )
    if node.subset and isinstance(node.subset[0].start, int):
        raise node.at("subset").error(
            f"{ONLY_LEAVES}, and {node.written} is a metadataset; write percentages, as "
            "['0%', '50%']"
        )
    try:
        return _split(_open_nested(file, target, place), here, place)
    except (DatasetFormatError, FileNotFoundError) as error:
        if str(place) not in str(error):
            add_note(error, f"{target.shown} is named at {place}")
        raise


def _num_values(tags: Any) -> int:
    if isinstance(tags, dict):
        return len(tags) + sum(_num_values(value) for value in tags.values())
    return 1 + sum(map(_num_values, tags)) if isinstance(tags, list) else 0
