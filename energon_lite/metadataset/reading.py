"""Metadataset file -> tree of nodes, in which the metadatasets that it names are in place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from energon_lite.core.errors import DatasetFormatError, add_note, did_you_mean
from energon_lite.core.json_text import MAX_DEPTH
from energon_lite.metadataset.grammar import BLEND, BLEND_EPOCHIZED, REFERENCE, Written
from energon_lite.metadataset.grammar_file import WrittenFile, read_file
from energon_lite.metadataset.nodes import (
    Blend,
    BlendEpochized,
    Concat,
    Leaf,
    Member,
    Node,
    Repetition,
    SubsetRange,
    children,
    combined_multiplier,
    leaves,
)
from energon_lite.metadataset.paths import Folder, Target, root_folder
from energon_lite.metadataset.shapes import Place, as_read
from energon_lite.order.schedules import Schedule, Weight
from energon_lite.storage.files import errors_of
from energon_lite.storage.local_paths import local_path, local_text
from energon_lite.storage.yaml import load_yaml

__all__ = ["is_metadataset", "leaves", "read_metadataset", "split_names"]

Source: TypeAlias = "str | PathLike[str] | Mapping[str, Any]"

_SUFFIXES = (".yaml", ".yml")
_INLINE = "<dict>"
# So 10,000 datasets may have 180 subflavors each.
_LARGEST_TREE, _TAGS = 100_000, 20


@dataclass(frozen=True)
class _File:
    """An open metadataset; `chain` has (real path, shown name) of it and those it was named by."""

    name: str
    content: WrittenFile
    folder: Folder
    chain: tuple[tuple[str, str], ...]
    tree: _Tree


@dataclass
class _Tree:
    """The tree that is being made of several files: those that were read, and how large it is.

    Ten files, each of which names the next one ten times, stand for ten billion datasets.
    """

    files: dict[str, WrittenFile] = field(default_factory=dict)
    size: float = 0

    def add(self, here: _Around, place: Place) -> None:
        """Counts a node, with the tags that hold there."""
        self.size += 1 + _num_values(here.subflavors) / _TAGS
        if self.size > _LARGEST_TREE:
            raise place.error(
                f"the datasets and blends up to here, those of nested metadatasets included, are "
                f"more than {_LARGEST_TREE:,}, where {_TAGS} subflavors count as one more; name "
                "fewer, or give them fewer subflavors"
            )
        if here.depth > MAX_DEPTH // 2:
            raise place.error(f"more than {MAX_DEPTH // 2} nodes inside of one another")
        if not isfinite(here.loss_weight):
            raise place.error("the loss weights down to here multiply to infinity; lower them")


@dataclass(frozen=True)
class _Around:
    """What the nodes around a node say about it; `name` only if it comes from a reference."""

    split_part: str
    loss_weight: float = 1.0
    subflavors: dict[str, Any] = field(default_factory=dict)
    multiplier: int | None = 1
    subset: tuple[SubsetRange, ...] = ()
    name: str | None = None
    mode: str = "exact"
    unit: str = "samples"
    lengths: str | None = None
    depth: int = 0

    def entered(self, values: Mapping[str, Any]) -> _Around:
        """Returns what holds inside a node with these values."""
        own, tags = values["subset"], values["subflavors"]
        return replace(
            self,
            split_part=values["split_part"] or self.split_part,
            loss_weight=self.loss_weight * values["loss_weight"],
            subflavors={**tags, **self.subflavors} if tags else self.subflavors,
            multiplier=combined_multiplier(
                self.multiplier, values["shuffle_over_epochs_multiplier"]
            ),
            subset=(*([own["range"]] if own else []), *self.subset),
            name=self.name or values["name"],
            depth=self.depth + 1,
        )


def is_metadataset(path: Source) -> bool:
    """Returns whether a path or mapping is a metadataset: by its form only, nothing is read."""
    return isinstance(path, Mapping) or _is_file_name(local_path(path))


def split_names(source: Source) -> list[str]:
    """Returns the names of the splits of a metadataset, in the file's order.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The file is wrong; names file, line and key.
    """
    return list(_open_root(source).content.splits)


def read_metadataset(source: Source, split_part: str) -> Node:
    """Reads one split of a metadataset.

    The whole file is checked, and each metadataset that the split names. No dataset is opened.

    Args:
        source: path of a YAML file, or a mapping with the same content, whose relative paths are
            relative to the current folder.
        split_part: the split.

    Raises:
        FileNotFoundError: A metadataset is missing.
        DatasetFormatError: A file is wrong, or has no such split; names file, line and key.
    """
    file = _open_root(source)
    node = _split(file, _Around(split_part), Place(file.name))
    _check_blend_modes(node)
    return node


def _is_file_name(path: Path) -> bool:
    return path.suffix in _SUFFIXES and not path.is_dir()


def _open_root(source: Source) -> _File:
    if isinstance(source, Mapping):
        content = read_file(as_read(source, _INLINE), _INLINE)
        return _File(_INLINE, content, root_folder(_INLINE), (), _Tree())
    name = local_text(os.fspath(source))
    with errors_of(name):
        is_file = Path(name).is_file()
    if not is_file:
        what = "is a folder, not a metadataset file" if Path(name).is_dir() else "does not exist"
        raise FileNotFoundError(f"metadataset {name} {what}; check the path")
    content = read_file(load_yaml(Path(name)), name)
    return _File(name, content, root_folder(name), ((os.path.realpath(name), name),), _Tree())


def _open_nested(file: _File, target: Target, place: Place) -> _File:
    with errors_of(target.path):
        is_file = target.path.is_file()
    if not is_file:
        raise FileNotFoundError(
            f"{place}: there is no metadataset {target.path}; check the path, which is relative to "
            "the folder of the file that names it"
        )
    real = os.path.realpath(target.path)
    known = [path for path, _ in file.chain]
    chain = (*file.chain, (real, target.shown))
    if real in known:
        names = " -> ".join(name for _, name in chain[known.index(real) :])
        raise place.error(f"metadatasets name each other in a circle: {names}")
    files = file.tree.files
    if target.shown not in files:
        files[target.shown] = read_file(load_yaml(target.path), target.shown)
    return _File(target.shown, files[target.shown], file.folder.above(target), chain, file.tree)


def _split(file: _File, around: _Around, place: Place) -> Node:
    name, splits = around.split_part, file.content.splits
    if name not in splits:
        hint = did_you_mean(name, splits)
        close = hint if "Did you mean" in hint else ""
        subject = "" if place.file == file.name else f"{file.name} has "
        raise place.error(
            f"{subject}no split {name!r}.{close} Splits there: {', '.join(splits)}. "
            "Ask for one of them with split_part"
        )
    return _node(splits[name], file, around)


def _node(written: Written, file: _File, around: _Around) -> Node:
    """Makes the node of what is written, and those in it."""
    values, shape, place = written.values, written.shape, str(written.place)
    here = around.entered(values)
    file.tree.add(here, written.place)
    if shape is REFERENCE:
        return _reference(written, file, here)
    inside = replace(here, name=None)
    entries: tuple[Written, ...] = values[shape.keys[0].name]
    if shape is BLEND:
        inside = _blending(written, inside)
        members = tuple(
            Member(entry.values["weight"], _node(entry, file, inside))
            for entry in entries
            if not _is_off(entry.values["weight"])
        )
        if not members:
            raise _nothing_left(written, "weights", "a weight")
        return Blend(
            members, inside.mode, inside.unit, inside.lengths, values["until"], here.name, place
        )
    if shape is BLEND_EPOCHIZED:
        repeated = tuple(
            Repetition(entry.values["repetitions"], _node(entry, file, inside))
            for entry in entries
            if entry.values["repetitions"]
        )
        if not repeated:
            raise _nothing_left(written, "repetitions", "repetitions")
        return BlendEpochized(repeated, here.name, place)
    return Concat(tuple(_node(entry, file, inside) for entry in entries), here.name, place)


def _blending(written: Written, around: _Around) -> _Around:
    """Returns how a blend chooses, which holds for the blends in it that do not say it."""
    values = written.values
    unit, mode = values["unit"] or around.unit, values["blend_mode"] or around.mode
    if unit != "tokens":
        if values["lengths"]:
            raise written.at("lengths").error("'lengths' has no meaning without 'unit: tokens'")
        return replace(around, mode=mode, unit=unit, lengths=None)
    if mode == "random":
        at = written.at("unit" if values["unit"] else "blend_mode")
        raise at.error("a blend by tokens is exact: 'unit: tokens' cannot be 'blend_mode: random'")
    return replace(around, mode=mode, unit=unit, lengths=values["lengths"] or around.lengths)


def _reference(written: Written, file: _File, here: _Around) -> Node:
    """Makes a leaf, or the node that a nested metadataset stands for."""
    values, place = written.values, written.at("path")
    try:
        target = file.folder.find(values["path"], expand=file.content.expand_paths)
    except ValueError as error:
        raise place.error(str(error)) from None
    if target.path.suffix == ".jsonl" and not target.path.is_dir():
        raise place.error(
            f"{values['path']!r}: this version does not read JSONL datasets; pack the samples into "
            "tar shards and prepare their folder"
        )
    if _is_file_name(target.path):
        return _nested(written, file, here, target)
    return Leaf(
        path=target.path,
        written=values["path"],
        source_id=here.name or f"{file.folder.name(target)}/{here.split_part}",
        name=here.name,
        split_part=here.split_part,
        subflavors=here.subflavors,
        loss_weight=here.loss_weight,
        shuffle_over_epochs_multiplier=here.multiplier,
        dataset_config=values["dataset_config"],
        split_config=values["split_config"],
        subset=here.subset,
        place=str(written.place),
    )


def _nested(written: Written, file: _File, here: _Around, target: Target) -> Node:
    values, place = written.values, written.at("path")
    for key in ("dataset_config", "split_config"):
        if values[key] is not None:
            raise written.at(key).error(
                f"{key!r} is for dataset folders, and {values['path']} is a metadataset; set it "
                "beside the paths of the folders in there"
            )
    if values["subset"] and isinstance(values["subset"]["range"].start, int):
        raise written.at("subset").error(
            f"numbers of samples are for the path of a dataset, and {values['path']} is a "
            "metadataset; write percentages, as ['0%', '50%']"
        )
    try:
        return _split(_open_nested(file, target, place), here, place)
    except (DatasetFormatError, FileNotFoundError) as error:
        if str(place) not in str(error):
            add_note(error, f"{target.shown} is named at {place}")
        raise


def _nothing_left(written: Written, what: str, one: str) -> DatasetFormatError:
    return written.place.error(
        f"all {what} are 0, which turns every entry off. Give {one} above 0 to at least one"
    )


def _num_values(tags: Any) -> int:
    if isinstance(tags, dict):
        return len(tags) + sum(_num_values(value) for value in tags.values())
    return 1 + sum(map(_num_values, tags)) if isinstance(tags, list) else 0


def _is_off(weight: Weight) -> bool:
    if isinstance(weight, Schedule):
        return all(value == 0 for _, value in weight.points)
    return weight == 0


def _blends(node: Node) -> Iterator[Blend | BlendEpochized]:
    if isinstance(node, Blend | BlendEpochized):
        yield node
    for child in children(node):
        yield from _blends(child)


def _check_blend_modes(root: Node) -> None:
    """Refuses `blend` and `blend_epochized` in one tree, as Energon does."""
    first: dict[type, str] = {}
    for node in _blends(root):
        first.setdefault(type(node), node.place)
    if len(first) > 1:
        raise DatasetFormatError(
            f"all blends of a split must have the same blend mode: {first[BlendEpochized]} is a "
            f"'blend_epochized', {first[Blend]} a 'blend'. Write one of them in the other form"
        )
