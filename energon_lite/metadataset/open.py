"""Opens the leaves of a metadataset or a single folder: paths become sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from os import PathLike
from typing import Any

from energon_lite.core.arguments import ELSEWHERE
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.file_store import FileStore
from energon_lite.core.topology import WorkerConfig
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.formats.shards import MAX_OPEN
from energon_lite.metadataset.nodes import (
    Aux,
    Join,
    Joiner,
    Leaf,
    Node,
    combined_multiplier,
    leaves,
)
from energon_lite.metadataset.read import is_metadataset, read_metadataset
from energon_lite.metadataset.values import Place, SubsetRange, as_read, read_range
from energon_lite.names.energon_modules import import_name
from energon_lite.sources.dataset_config import load_factory, load_joiner
from energon_lite.sources.source_factory import SourceFactory
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path, with_meta_dir

# Imported on first use.
_JOINS, _STORES = "energon_lite.extras.joins.joined", "energon_lite.extras.stores.file_stores"

Stores = Mapping[str, FileStore[Any]]
Cook = Callable[[SavableDataset[Any], SourceFactory[Any], Stores], SavableDataset[Any]]

# Shards that all leaves together keep open. Where there are more leaves, each keeps one.
_OPEN_OF_ALL = 256

_SETTINGS = frozenset({
    "subflavors", "parallel_shard_iters", "trust", "sample_type", "field_map", "sample_loader",
    "part_filter", "max_samples_per_sequence",
})  # fmt: skip
_OF_FOLDER = frozenset(
    {"dataset_config", "split_config", "name", "loss_weight", "subset", "meta_dir"}
)


def open_node(
    path: str | PathLike[str] | Mapping[str, Any], split_part: str, settings: dict[str, Any]
) -> Node:
    """Reads a metadataset, or returns one leaf for a folder.

    Args:
        path: a folder, a YAML file, or the content of such a file.
        split_part: the split part of the folder, or the split of the metadataset.
        settings: further keyword arguments of the user; those that apply only to a folder are
            removed from it.

    Raises:
        TypeError: An argument is unknown.
        ValueError: An argument does not apply to a metadataset, or the file is invalid.
    """
    allowed = _SETTINGS | _OF_FOLDER
    old = {"auto_decode", "image_decode", "av_decode", "video_decode_audio", "handler"}
    unknown = sorted(set(settings) - allowed - old)
    if unknown:
        others = f"; besides the named ones there are {', '.join(sorted(allowed))}"
        raise TypeError(import_name(ELSEWHERE)("unexpected keyword argument", unknown[0], others))
    own = {name: settings.pop(name) for name in sorted(_OF_FOLDER & set(settings))}
    if not isinstance(path, Mapping):
        path = local_path(path)
    if is_metadataset(path):
        if own:
            raise ValueError(
                f"{next(iter(own))}=... applies to the folder of one dataset; in a metadataset, "
                "write it on the node that it is for"
            )
        return read_metadataset(path, split_part, settings.get("trust"))
    assert not isinstance(path, Mapping)
    subset, meta_dir = own.pop("subset", None), own.pop("meta_dir", None)
    return Leaf(
        path=files.absolute(path if meta_dir is None else with_meta_dir(path, meta_dir)),
        written=str(path),
        source_id=own.get("name") or f"{files.resolved(path).name}/{split_part}",
        split_part=split_part,
        subset=() if subset is None else (read_range(as_read(subset, ""), Place("subset")),),
        **own,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LeafOpener:
    """Builds the datasets of the leaves of a tree, with cookers over crude sources.

    Attributes:
        node: the tree; its leaves share the limit of open files.
        cook: puts the cooker over a crude source; by default sources are not changed.
        settings: further arguments of the factories; subflavors override those of the leaves.
        training: whether the order is shuffled.
        worker_config: seed and error handlers.
        decoder: decodes the parts of samples.
        shuffle_buffer_size: number of samples of a stream's shuffle window, in each source; None
            for no window.
        block: number of consecutive samples that file order assigns to a stream; None for 1.
        multiplier: `shuffle_over_epochs_multiplier` of the caller.
        check_index: called with a source and the name of a length index before it is used.
        factories: the opened factories, in the order of opening.
    """

    node: Node
    cook: Cook = lambda source, _factory, _aux: source
    settings: Mapping[str, Any]
    training: bool
    worker_config: WorkerConfig | None
    decoder: SampleDecoder | None = None
    shuffle_buffer_size: int | None = None
    block: int | None = None
    multiplier: int | None = 1
    check_index: Callable[[Any, str], None] = lambda _source, _index: None
    factories: list[SourceFactory[Any]] = field(default_factory=list)
    _stores: dict[Any, FileStore[Any]] = field(default_factory=dict)

    def __call__(
        self, leaf: Leaf, *, repeat: bool, repetitions: Fraction | None = None
    ) -> SavableDataset[Any]:
        """Builds the dataset of one leaf."""
        with located(leaf.place):
            factory = self.open(leaf)
            source = factory.build(
                shuffle_buffer_size=self.shuffle_buffer_size or 0,
                repeat=repeat,
                block=self.block or 1,
                repetitions=repetitions,
            )
            return self.cook(source, factory, self.stores(leaf, factory))

    def stores(self, leaf: Leaf, factory: SourceFactory[Any]) -> dict[str, FileStore[Any]]:
        """Opens the file stores of a leaf; leaves share the stores of one folder.

        Raises:
            DatasetFormatError: The dataset is not crude, or a folder is not prepared.
            FileNotFoundError: A folder does not exist.
        """
        if leaf.aux and not factory.is_crude:
            raise leaf.at("aux").error(
                f"'aux' is for crude datasets, whose cookers get it, and the samples of "
                f"{leaf.written} are of another class ({type(factory).__name__}). Write "
                "`__class__: CrudeWebdataset` in its dataset.yaml, or remove 'aux'"
            )
        found = {}
        for name, aux in leaf.aux.items():
            here = (aux.path, aux.label, aux.is_plain)
            if here not in self._stores:
                self._stores[here] = opened_store(aux)
            found[name] = self._stores[here]
        return found

    def open(self, leaf: Leaf) -> SourceFactory[Any]:
        """Opens the folder of a leaf, or the folders of a join."""
        factory = self._open_join(leaf) if isinstance(leaf, Join) else self._open_folder(leaf)
        wanted = self.settings.get("sample_type")
        found = factory.sample_type or factory.__sample_type__
        if wanted is not None and found is not None and not issubclass(found, wanted):
            raise TypeError(
                f"sample_type={wanted.__name__}, and the samples of {leaf.written} are "
                f"{found.__name__}; leave it out, or name their class"
            )
        self.factories.append(factory)
        return factory

    def _open_folder(self, leaf: Leaf) -> SourceFactory[Any]:
        trust = self.settings.get("trust")
        return load_factory(
            leaf.path,
            dataset_config=leaf.dataset_config,
            split_config=leaf.split_config,
            split_part=leaf.split_part,
            decoder=self.decoder,
            trust=trust,
            **self._settings_of(leaf),
        )

    def _open_join(self, join: Join) -> SourceFactory[Any]:
        keywords = [member.keyword for member in join.members]
        inner: list[Any] = [self._open_folder(member) for member in join.members]
        joiner = join.joiner
        if isinstance(joiner, Joiner):
            joiner = load_joiner(
                joiner.module, joiner.class_name or joiner.function, bool(joiner.class_name),
                str(joiner.place), self.settings.get("trust"),
            )  # fmt: skip
        factory: SourceFactory[Any] = import_name(f"{_JOINS}:JoinedWebdatasetFactory")(
            dict(zip(keywords, inner, strict=True)) if keywords[0] else inner,
            join_index=join.cache,
            joiner=joiner,
            nonmatch=[member.nonmatch for member in join.members],
            **self._settings_of(join),
        )
        return factory

    def _settings_of(self, leaf: Leaf) -> dict[str, Any]:
        """Returns the arguments that factories of folders and of joins have in common."""
        own = ("trust", "sample_type")
        settings = {name: value for name, value in self.settings.items() if name not in own}
        return {
            **settings,
            "name": leaf.source_id,
            "subflavors": {**leaf.subflavors, **(settings.get("subflavors") or {})},
            "training": self.training,
            "worker_config": self.worker_config,
            "loss_weight": leaf.loss_weight,
            "subset": partial(range_of, leaf.subset) if leaf.subset else None,
            "max_open": self._max_open,
            "shuffle_over_epochs": combined_multiplier(
                self.multiplier, leaf.shuffle_over_epochs_multiplier
            ),
        }

    @cached_property
    def _max_open(self) -> int:
        """The number of shards that each leaf keeps open between two reads."""
        return max(1, min(MAX_OPEN, _OPEN_OF_ALL // len(leaves(self.node))))


def opened_store(aux: Aux) -> FileStore[bytes]:
    """Opens a file store of a metadataset.

    Raises:
        FileNotFoundError: The folder does not exist, or is not prepared.
        DatasetFormatError: It is a file, or an invalid dataset.
    """
    with located(aux.place):
        if files.is_file(aux.path):
            raise DatasetFormatError(
                f"{aux.written} is a file; 'aux' names a prepared dataset folder, or a plain "
                "folder as filesystem://FOLDER"
            )
        if not files.is_folder(aux.path):
            raise FileNotFoundError(f"{aux.written} is no folder; check the path")
        if not aux.is_plain:
            return import_name(f"{_STORES}:WebdatasetFileStore")(aux.path)  # type: ignore[no-any-return]
        store = import_name(f"{_STORES}:SystemFileStore")(aux.path)
        store.name = aux.label or store.name
        return store  # type: ignore[no-any-return]


@contextmanager
def located(place: Place) -> Iterator[None]:
    """Adds a place in a metadataset to the errors of what is built from it."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        if str(place) in str(error):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            text = f"{place}: {error.strerror}"
            raise type(error)(error.errno, text, error.filename) from error
        raise type(error)(f"{place}: {error}") from error


def range_of(ranges: tuple[SubsetRange, ...], total: int) -> tuple[int, int]:
    """Returns the first sample of a split part that a leaf uses, and the one after the last.

    Args:
        ranges: the range of the leaf, then those of the nodes above it.
        total: number of samples of the split part.

    Example:
        Of 8 samples, 25 % to 75 % are 2..5; of these, 0 % to 50 % are 2 and 3.
    """
    start, stop = 0, total
    for part in ranges:
        size = stop - start
        first, last = (_edge(edge, size) for edge in (part.start, part.stop))
        if last > size:
            raise DatasetFormatError(
                f"subset range [{first}, {last}] ends after the last of {size} samples; correct it"
            )
        start, stop = start + first, start + last
    return start, stop


def _edge(edge: Fraction | int | None, size: int) -> int:
    if edge is None:
        return size
    return edge if isinstance(edge, int) else size * edge.numerator // edge.denominator
