"""Energon's names for opening a path without building a pipeline, and what it gives to builders."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.topology import WorkerConfig
from energon_lite.metadataset.nodes import (
    Blend,
    BlendEpochized,
    Concat,
    Leaf,
    Node,
    children,
    leaves,
)
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.metadataset.read import is_metadataset, read_metadataset, split_names
from energon_lite.order.schedules import Schedule, weight_at
from energon_lite.sources.webdataset import BaseCoreDatasetFactory

AnyPath = str | PathLike[str] | Mapping[str, Any]


class DatasetBlendMode(enum.Enum):
    """What the numbers of a list of datasets mean."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


@dataclass(kw_only=True)
class LoadedDataset:
    """One leaf, opened.

    Attributes:
        dataset: builds the source.
        weight: its share of the whole blend, at the start of the run; None outside of blends.
        repetitions: how many times an epoch has it; None outside of epochized blends.
        aux: always None: auxiliary data are not in this version.
    """

    dataset: BaseCoreDatasetFactory[Any]
    weight: float | None = None
    repetitions: float | None = None
    aux: dict[str, Any] | None = None


@dataclass(kw_only=True)
class LoadedDatasetList:
    """The leaves of a split, in the order of the file."""

    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode = DatasetBlendMode.NONE


def loaded_datasets(node: Node, opener: LeafOpener) -> LoadedDatasetList:
    """Opens the leaves of a tree."""
    found = [
        LoadedDataset(dataset=opener.open(leaf), weight=weight, repetitions=repetitions)
        for leaf, weight, repetitions in _amounts(node, 1.0, 1)
    ]
    mode = DatasetBlendMode.NONE
    if isinstance(node, Blend):
        mode = DatasetBlendMode.DATASET_WEIGHT
    elif isinstance(node, BlendEpochized):
        mode = DatasetBlendMode.SAMPLE_REPETITIONS
    return LoadedDatasetList(datasets=found, blend_mode=mode)


def check_is_list(node: Node, who: str) -> None:
    """Checks that a tree says no more than a list of datasets with numbers can.

    Args:
        node: the tree.
        who: what gets the list, for the error.

    Raises:
        ValueError: It does; names the place, and what is lost.
    """
    found = _beyond_a_list(node, type(node))
    if found is not None:
        raise ValueError(
            f"{who} gets a list of datasets, each with a weight or repetitions, which cannot say "
            f"{found}. Take that out of the metadataset, or do not override it"
        )


def _beyond_a_list(node: Node, kind: type[Any]) -> str | None:
    """Returns what a list cannot say of a tree, whose root is of a kind; None if nothing."""
    if isinstance(node, Leaf):
        return None
    if not isinstance(node, kind):
        names = {Blend: "blend", BlendEpochized: "blend_epochized", Concat: "concat"}
        return f"{node.place}: {names[type(node)]} inside {names[kind]}"
    if isinstance(node, Blend):
        settings = {
            "unit: tokens": node.unit == "tokens",
            f"until: {node.until}": node.until not in (None, "forever"),
            f"blend_mode: {node.mode}": node.mode != "exact",
            "a weight that changes": any(isinstance(m.weight, Schedule) for m in node.members),
        }
        for name, is_set in settings.items():
            if is_set:
                return f"{node.place}: {name}"
    return next((f for f in (_beyond_a_list(n, kind) for n in children(node)) if f), None)


def _amounts(
    node: Node, weight: float, repetitions: Fraction | int
) -> Iterator[tuple[Leaf, float | None, float | None]]:
    """Yields each leaf with its share of the blend, or its repetitions."""
    if isinstance(node, Leaf):
        yield node, None, None
    elif isinstance(node, Blend):
        start = np.zeros(1, dtype=np.int64)
        own = [float(weight_at(member.weight, start)[0]) for member in node.members]
        for member, part in zip(node.members, own, strict=True):
            share = weight * part / (sum(own) or 1.0)
            for leaf, inner, _ in _amounts(member.node, share, 1):
                yield leaf, share if inner is None else inner, None
    elif isinstance(node, BlendEpochized):
        for entry in node.members:
            times = repetitions * entry.repetitions
            for leaf, _, inner in _amounts(entry.node, 1.0, times):
                yield leaf, None, float(times) if inner is None else inner
    else:
        for below in node.members:
            yield from _amounts(below, weight, repetitions)


class TraversedDatasetReference(NamedTuple):
    """One leaf, as it is named; nothing of it is opened."""

    path: Path
    split_part: str
    aux: dict[str, Path]
    subflavors: dict[str, Any]


class DatasetLoaderInterface(ABC):
    """A path that was read: a prepared folder, or a metadataset."""

    path: AnyPath

    def post_initialize(self, mds_path: str | PathLike[str] | None = None) -> None:
        """Resolves a relative path; there is nothing else to do.

        Args:
            mds_path: the metadataset in whose folder a relative path lies.
        """
        if mds_path is not None and not isinstance(self.path, Mapping):
            self.path = Path(mds_path).parent / self.path

    def prepare(self, split_part: str | None = None) -> tuple[Path, ...]:
        """Returns the files that were prepared: none, since only joins would need it.

        Args:
            split_part: which part is checked; by default none.
        """
        if split_part is not None:
            self.node(split_part)
        return ()

    @abstractmethod
    def node(self, split_part: str) -> Node:
        """Returns what a split holds, as a tree."""

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: WorkerConfig | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        **kwargs: Any,
    ) -> LoadedDatasetList:
        """Opens all leaves of a split.

        Args:
            training: whether the order is shuffled.
            split_part: the split.
            worker_config: seed and error handlers.
            subflavors: tags that go over those of the files.
            shuffle_over_epochs_multiplier: as in `get_train_dataset`.
            kwargs: for the dataset classes.
        """
        node = self.node(split_part)
        opener = LeafOpener(
            node=node,
            decoder=kwargs.pop("decoder", None),
            settings={**kwargs, "subflavors": dict(subflavors or {})},
            training=training,
            worker_config=worker_config,
            multiplier=shuffle_over_epochs_multiplier,
        )
        return loaded_datasets(node, opener)

    def traverse(
        self, mds_path: str | PathLike[str] | None = None, *, split_part: str
    ) -> list[TraversedDatasetReference]:
        """Lists the leaves of a split, without opening them.

        Args:
            mds_path: as in `post_initialize`.
            split_part: the split.
        """
        self.post_initialize(mds_path)
        return [
            TraversedDatasetReference(leaf.path, leaf.split_part, {}, leaf.subflavors)
            for leaf in leaves(self.node(split_part))
        ]


class DatasetLoader(DatasetLoaderInterface):
    """A prepared folder.

    Args:
        path: the folder.
        split_part: which part of it, instead of the one asked for later.
        subflavors: tags.
        shuffle_over_epochs_multiplier: as in `get_train_dataset`.
        dataset_config: name of the dataset file in `.nv-meta`.
        split_config: name of the split file in `.nv-meta`.
    """

    def __init__(
        self,
        *,
        path: str | PathLike[str],
        split_part: str | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        dataset_config: str | None = None,
        split_config: str | None = None,
    ) -> None:
        self.path: AnyPath = Path(path)
        self.split_part = split_part
        self._leaf: dict[str, Any] = {
            "subflavors": dict(subflavors or {}),
            "shuffle_over_epochs_multiplier": shuffle_over_epochs_multiplier,
            "dataset_config": dataset_config,
            "split_config": split_config,
        }

    def node(self, split_part: str) -> Node:
        """Returns the one leaf."""
        leaf = open_node(self.path, self.split_part or split_part, {})
        assert isinstance(leaf, Leaf)
        return replace(leaf, **self._leaf)


class Metadataset(DatasetLoaderInterface):
    """A metadataset: the path of its file, or what that holds."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    def node(self, split_part: str) -> Node:
        """Returns what a split holds, as a tree."""
        return read_metadataset(self.path, split_part)


class MetadatasetV2(Metadataset):
    """The second version, under Energon's name; both are read by the same code."""


def load_dataset(path: AnyPath, **kwargs: Any) -> DatasetLoaderInterface:
    """Reads a path: a prepared folder, or a metadataset.

    Args:
        path: the folder, the YAML file, or what such a file holds.
        kwargs: for a folder, those of `DatasetLoader`.

    Raises:
        FileNotFoundError: There is no such path.
        DatasetFormatError: The file is wrong.
    """
    if not is_metadataset(path):
        assert not isinstance(path, Mapping)
        return DatasetLoader(path=path, **kwargs)
    for name in split_names(path):
        open_node(path, name, dict(kwargs))
    return MetadatasetV2(path)


def traverse_metadataset(
    path: AnyPath, *, split_part: str, **kwargs: Any
) -> list[TraversedDatasetReference]:
    """Lists the leaves of a split of a metadataset, without opening them.

    Raises:
        DatasetFormatError: `path` is no metadataset, or wrong.
    """
    if not is_metadataset(path):
        raise DatasetFormatError(f"{path} is no metadataset; give a YAML file or a dict")
    return load_dataset(path, **kwargs).traverse(split_part=split_part)


def prepare_metadataset(path: str | PathLike[str]) -> None:
    """Checks a metadataset. Nothing has to be prepared: only joins would need it.

    Raises:
        FileNotFoundError: A file is missing.
        DatasetFormatError: A file is wrong.
    """
    load_dataset(path)
