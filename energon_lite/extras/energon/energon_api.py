"""Energon's names for opening a path without a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.file_store import FileStore
from energon_lite.core.topology import WorkerConfig
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.energon.epath import EPath
from energon_lite.extras.energon.loaded_leaves import loaded_datasets
from energon_lite.extras.energon.prepared_joins import prepare_joins
from energon_lite.extras.joins.join_keys import JoinReport
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import META, is_prepared, read_info
from energon_lite.formats.sqlite import INDEX_SQLITE
from energon_lite.metadataset.loaded import LoadedDatasetList
from energon_lite.metadataset.nodes import Aux, Join, JoinMember, Leaf, Node, leaves
from energon_lite.metadataset.open import LeafOpener, open_node, opened_store
from energon_lite.metadataset.read import is_metadataset, read_metadataset, split_names
from energon_lite.metadataset.values import Place
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.source_factory import BaseCoreDatasetFactory
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

AnyPath = str | PathLike[str] | Mapping[str, Any]


class TraversedDatasetReference(NamedTuple):
    """One leaf; its folder is not opened."""

    path: EPath
    split_part: str
    aux: dict[str, EPath]
    subflavors: dict[str, Any]


class DatasetLoaderInterface(ABC):
    """A path that was read: a prepared folder, or a metadataset."""

    path: AnyPath

    def post_initialize(self, mds_path: str | PathLike[str] | None = None) -> None:
        """Resolves a relative path.

        Args:
            mds_path: the metadataset that a relative path is relative to.
        """
        if mds_path is not None and not isinstance(self.path, Mapping):
            self.path = Path(mds_path).parent / self.path

    def prepare(self, split_part: str | None = None) -> tuple[Path, ...]:
        """Makes the missing join indexes.

        Args:
            split_part: the split; by default all splits of a metadataset.

        Returns:
            The files of all join indexes.
        """
        names = self.split_names() if split_part is None else [split_part]
        return tuple(path for name in names for path, _ in prepare_joins(self.node(name)))

    def split_names(self) -> list[str]:
        """Returns the splits that may have joins."""
        return []

    @abstractmethod
    def node(self, split_part: str) -> Node:
        """Returns the tree of a split."""

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
            subflavors: tags that override those of the files.
            shuffle_over_epochs_multiplier: as in `get_train_dataset`.
            kwargs: further arguments of the dataset classes.
        """
        node = self.node(split_part)
        opener = LeafOpener(
            node=node,
            decoder=kwargs.pop("decoder", SampleDecoder()),
            settings={**kwargs, "subflavors": dict(subflavors or {})},
            training=training,
            worker_config=worker_config,
            multiplier=shuffle_over_epochs_multiplier,
        )
        return loaded_datasets(node, opener)

    def get_dataset(
        self, *, training: bool = True, split_part: str | None = None, **kwargs: Any
    ) -> BaseCoreDatasetFactory[Any]:
        """Opens a folder or a join; as `get_datasets`, of which it is the first."""
        found = self.get_datasets(training=training, split_part=split_part or "train", **kwargs)
        return found.datasets[0].dataset

    def traverse(
        self, mds_path: str | PathLike[str] | None = None, *, split_part: str
    ) -> list[TraversedDatasetReference]:
        """Returns the leaves of a split, without opening them.

        Args:
            mds_path: as in `post_initialize`.
            split_part: the split.
        """
        self.post_initialize(mds_path)
        return [
            TraversedDatasetReference(
                EPath(folder.path),
                folder.split_part,
                {name: EPath(aux.path) for name, aux in folder.aux.items()},
                folder.subflavors,
            )
            for leaf in leaves(self.node(split_part))
            for folder in leaf.folders
        ]


class _AuxReference:
    """A file store of a metadataset; its one field is the path."""

    def post_initialize(self, mds_path: str | PathLike[str] | None = None) -> None:
        """Resolves a relative path.

        Args:
            mds_path: the metadataset that a relative path is relative to.
        """
        if mds_path is not None:
            ((name, path),) = vars(self).items()
            setattr(self, name, Path(mds_path).parent / path)

    def get_file_store(self) -> FileStore[bytes]:
        """Opens the store."""
        ((name, path),) = vars(self).items()
        place = Place(str(path))
        root = files.absolute(local_path(path))
        return opened_store(Aux(str(path), name == "fs_path", place, root))


@dataclass(kw_only=True)
class AuxDatasetReference(_AuxReference):
    """A prepared dataset as a file store.

    Attributes:
        path: the folder of the dataset.
    """

    path: str | PathLike[str]


@dataclass(kw_only=True)
class AuxFilesystemReference(_AuxReference):
    """A plain folder as a file store.

    Attributes:
        fs_path: the folder.
    """

    fs_path: str | PathLike[str]


@dataclass(kw_only=True)
class DatasetLoader(DatasetLoaderInterface):
    """A prepared folder.

    Attributes:
        path: the folder.
        split_part: the split part to use, instead of the argument of `get_datasets`.
        subflavors: tags.
        shuffle_over_epochs_multiplier: as in `get_train_dataset`.
        dataset_config: name of the dataset file in `.nv-meta`.
        split_config: name of the split file in `.nv-meta`.
    """

    path: AnyPath
    split_part: str | None = None
    subflavors: Mapping[str, Any] | None = None
    shuffle_over_epochs_multiplier: int | None = 1
    dataset_config: str | None = None
    split_config: str | None = None

    def node(self, split_part: str) -> Node:
        """Returns the one leaf."""
        leaf = open_node(self.path, self.split_part or split_part, {})
        if not isinstance(leaf, Leaf) or is_metadataset(self.path):
            raise DatasetFormatError(f"{self.path} is a metadataset; open it with load_dataset")
        return replace(
            leaf,
            subflavors=dict(self.subflavors or {}),
            shuffle_over_epochs_multiplier=self.shuffle_over_epochs_multiplier,
            dataset_config=self.dataset_config,
            split_config=self.split_config,
        )


@dataclass(kw_only=True)
class JoinedDatasetInfo:
    """A dataset of a join.

    Attributes:
        dataset: the dataset.
        nonmatch: what happens to a sample of the first dataset without a match here: `error`,
            `skip`, or `none` (the joiner gets None).
    """

    dataset: DatasetLoader
    nonmatch: str = "error"


@dataclass(kw_only=True)
class JoinDatasetLoader(DatasetLoaderInterface):
    """Datasets that are joined by the keys of their samples.

    Attributes:
        datasets: the datasets, the primary first; a dict passes their samples as keyword arguments.
        joiner: a class of samples, whose `from_joined` is called, or a function.
        cache_path: folder of the join indexes; by default one for temporary files.
        split_part: the split part to use, where the datasets set none.
        split_config: name of the split file of all datasets.
        subflavors: tags that go over those of the datasets.
        shuffle_over_epochs_multiplier: as in `get_train_dataset`.
    """

    datasets: list[JoinedDatasetInfo] | dict[str, JoinedDatasetInfo]
    joiner: Callable[..., Any]
    cache_path: str | PathLike[str] | None = None
    split_part: str | None = None
    split_config: str | None = None
    subflavors: Mapping[str, Any] | None = None
    shuffle_over_epochs_multiplier: int | None = 1

    def post_initialize(self, mds_path: str | PathLike[str] | None = None) -> None:
        """Resolves relative paths, and sets where the index is.

        Args:
            mds_path: the metadataset that relative paths are relative to.
        """
        for _, info in self._named():
            info.dataset.post_initialize(mds_path)
        if mds_path is not None and self.cache_path is None:
            self.cache_path = f"{mds_path}.cache"

    def _named(self) -> list[tuple[str, JoinedDatasetInfo]]:
        if isinstance(self.datasets, dict):
            return list(self.datasets.items())
        return [("", info) for info in self.datasets]

    def node(self, split_part: str) -> Node:
        """Returns the one join."""
        part, tags = self.split_part or split_part, dict(self.subflavors or {})
        members = []
        for name, info in self._named():
            side: Any = info.dataset.node(part)
            written = {own.name: getattr(side, own.name) for own in fields(Leaf)}
            written["split_config"] = self.split_config or side.split_config
            written["subflavors"] = {**side.subflavors, **tags}
            members.append(JoinMember(**written, nonmatch=info.nonmatch, keyword=name))
        return Join(
            members=tuple(members),
            joiner=self.joiner,
            path=members[0].path,
            cache=None if self.cache_path is None else Path(self.cache_path),
            source_id="+".join(member.source_id for member in members),
            split_part=part,
            subflavors=tags,
            shuffle_over_epochs_multiplier=self.shuffle_over_epochs_multiplier,
        )


@dataclass
class Metadataset(DatasetLoaderInterface):
    """A metadataset: the path of its file, or the content of the file."""

    path: AnyPath

    def node(self, split_part: str) -> Node:
        """Returns the tree of a split."""
        return read_metadataset(self.path, split_part)

    def split_names(self) -> list[str]:
        """Returns all splits."""
        return split_names(self.path)


class MetadatasetV2(Metadataset):
    """Energon's name for the second version; `Metadataset` reads both versions."""


def load_dataset(path: AnyPath, **kwargs: Any) -> DatasetLoaderInterface:
    """Reads a path: a prepared folder, or a metadataset.

    Args:
        path: the folder, the YAML file, or the content of such a file.
        kwargs: for a folder, further arguments of `DatasetLoader`.

    Raises:
        FileNotFoundError: The path does not exist.
        DatasetFormatError: The file is invalid.
    """
    if not is_metadataset(path):
        assert not isinstance(path, Mapping)
        return DatasetLoader(path=path, **kwargs)
    for name in split_names(path):
        open_node(path, name, dict(kwargs))
    return MetadatasetV2(path)


def get_dataset_from_config(
    path: AnyPath, *, dataset_config: str | None = None, split_config: str | None = None,
    **kwargs: Any,
) -> BaseCoreDatasetFactory[Any]:  # fmt: skip
    """Opens a prepared folder or a JSONL file, without a task encoder.

    Args:
        path: the folder or file.
        dataset_config: name of the dataset file in `.nv-meta`.
        split_config: name of the split file in `.nv-meta`.
        kwargs: as in `DatasetLoader.get_dataset`.

    Returns:
        The factory; its `build()` makes the dataset.

    Raises:
        FileNotFoundError: The folder does not exist, or is not prepared.
        DatasetFormatError: A file of it is invalid.
    """
    loader = DatasetLoader(path=path, dataset_config=dataset_config, split_config=split_config)
    return loader.get_dataset(**kwargs)


def load_config(
    path: str | PathLike[str], *, default_type: Any, default_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Opens a dataset by its `dataset.yaml`, or reads a metadataset.

    Args:
        path: the file; with `path` in `default_kwargs`, its name counts only.
        default_type: accepted for Energon's signature; the content of the file decides.
        default_kwargs: arguments of the dataset class; what the file sets wins.

    Returns:
        The factory of a dataset, or what `load_dataset` returns.
    """
    del default_type
    file, arguments = Path(path), dict(default_kwargs or {})
    if file.parent.name != META:
        return load_dataset(file)
    arguments = {"path": file.parent.parent, "decoder": SampleDecoder(), **arguments}
    return load_factory(dataset_config=file.name, **arguments)


class EnergonDatasetType(Enum):
    """The kind of thing at a path."""

    METADATASET = "metadataset"
    WEBDATASET = "webdataset"
    JSONL = "jsonl"
    FILESYSTEM = "filesystem"
    INVALID = "invalid"


def get_dataset_type(path: str | PathLike[str]) -> EnergonDatasetType:
    """Returns what lies at a path; does not read it."""
    place = local_path(path)
    has_index = files.is_file(place / META / INDEX_SQLITE)
    kind = "webdataset" if is_prepared(place) else "filesystem" if has_index else "invalid"
    if files.is_file(place):
        known = format_of(place).name.lower()
        kind = "jsonl" if known == "jsonl" else "metadataset" if is_metadataset(place) else kind
    return EnergonDatasetType(kind)


def get_dataset_info(path: str | PathLike[str]) -> dict[str, Any]:
    """Returns what `.info.json` of a prepared folder holds: `shard_counts`, `energon_version`.

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: The file is invalid.
    """
    return vars(read_info(local_path(path))).copy()


def get_info_shard_files(path: str | PathLike[str]) -> list[str]:
    """Returns the shards of a prepared folder, relative to it; errors as `get_dataset_info`."""
    return list(get_dataset_info(path)["shard_counts"])


def traverse_metadataset(
    path: AnyPath, *, split_part: str, **kwargs: Any
) -> list[TraversedDatasetReference]:
    """Returns the leaves of a split of a metadataset, without opening them.

    Raises:
        DatasetFormatError: `path` is no metadataset, or an invalid one.
    """
    if not is_metadataset(path):
        raise DatasetFormatError(f"{path} is no metadataset; pass a YAML file or a dict")
    return load_dataset(path, **kwargs).traverse(split_part=split_part)


def prepare_metadataset(
    path: str | PathLike[str], num_workers: int | None = None
) -> list[tuple[Path, JoinReport | None]]:
    """Checks a metadataset, and makes the indexes of its joins that are missing.

    Args:
        path: the YAML file.
        num_workers: processes; by default one per usable core.

    Returns:
        For each join the file of its index, and how its samples match; None if it was there.

    Raises:
        FileNotFoundError: A file does not exist.
        DatasetFormatError: A file is invalid, a key is there twice, or a sample has no match.
    """
    loader = load_dataset(path)
    return [
        found
        for name in loader.split_names()
        for found in prepare_joins(loader.node(name), num_workers)
    ]
