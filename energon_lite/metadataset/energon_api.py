"""Energon's names for opening a path without building a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.topology import WorkerConfig
from energon_lite.metadataset.loaded import LoadedDatasetList, loaded_datasets
from energon_lite.metadataset.nodes import Leaf, Node, leaves
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.metadataset.read import is_metadataset, read_metadataset, split_names

AnyPath = str | PathLike[str] | Mapping[str, Any]


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
        self._leaf = {
            "subflavors": dict(subflavors or {}),
            "shuffle_over_epochs_multiplier": shuffle_over_epochs_multiplier,
            "dataset_config": dataset_config,
            "split_config": split_config,
        }

    def node(self, split_part: str) -> Node:
        """Returns the one leaf."""
        leaf = open_node(_source(self.path), self.split_part or split_part, {})
        assert isinstance(leaf, Leaf)
        return Leaf(**{**vars(leaf), **self._leaf})


class Metadataset(DatasetLoaderInterface):
    """A metadataset: the path of its file, or what that holds."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    def node(self, split_part: str) -> Node:
        """Returns what a split holds, as a tree."""
        return read_metadataset(_source(self.path), split_part)


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
    if not is_metadataset(_source(path)):
        assert not isinstance(path, Mapping)
        return DatasetLoader(path=path, **kwargs)
    for name in split_names(_source(path)):
        open_node(path, name, dict(kwargs))
    return MetadatasetV2(path)


def traverse_metadataset(
    path: AnyPath, *, split_part: str, **kwargs: Any
) -> list[TraversedDatasetReference]:
    """Lists the leaves of a split of a metadataset, without opening them.

    Raises:
        DatasetFormatError: `path` is no metadataset, or wrong.
    """
    if not is_metadataset(_source(path)):
        raise DatasetFormatError(f"{path} is no metadataset; give a YAML file or a dict")
    return load_dataset(path, **kwargs).traverse(split_part=split_part)


def prepare_metadataset(path: str | PathLike[str]) -> None:
    """Checks a metadataset. Nothing has to be prepared: only joins would need it.

    Raises:
        FileNotFoundError: A file is missing.
        DatasetFormatError: A file is wrong.
    """
    load_dataset(path)


def _source(path: AnyPath) -> Path | Mapping[str, Any]:
    return path if isinstance(path, Mapping) else Path(path)
