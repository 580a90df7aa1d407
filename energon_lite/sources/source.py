"""A leaf of the pipeline: the samples of some tar shards, in their order, decoded and typed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import AnyDataset, Cursor, SavableDataset, SourceFacts, Traits
from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON, Names, RestoreKey, Snapshot
from energon_lite.core.stream_context import replaying
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.formats.shards import BlockReader
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.order.source_order import SourceOrder
from energon_lite.sources.reading import ReadCursor
from energon_lite.sources.refs import OrderAhead, RefOrder, Refs
from energon_lite.sources.sample_loader import SampleLoader

T = TypeVar("T")

# The first samples of a source, and about how many bytes, whose parts are looked at for
# `text_bytes`: headers and padding are most of a short sample in a tar.
_FIRST_SAMPLES, _FIRST_BYTES = 16, 64 << 10


@lru_cache(16)
def _traits(below: Traits, is_training: bool, is_endless: bool) -> Traits:
    """Returns one object for equal sources."""
    return dataclasses.replace(below, training=is_training, endless=is_endless)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class WebdatasetSource(SavableDataset[T]):
    """The samples of some tar shards.

    State: one integer, the position in the stream.
    Length: the stream's share of an epoch.
    Keys: `(source, epoch, index, sample_index)`; the last is the number of the draw in the run,
    over all sources of the pipeline.

    Args:
        order: how the samples are ordered; carries the source's id.
        reader: reads samples by their numbers.
        loader: makes samples.
        data: hash of what the data is, to notice that it changed.
        content: digest of keys and bytes, empty if it is not known.
        settings: what the user set, by its public names, for messages about checkpoints.
        is_training: whether this is training data.
        split_part: of which it is the data.
        num_bytes: bytes of the shards.
        worker_config: where error handlers come from.

    Attributes:
        mean_bytes: bytes of a sample.
    """

    order: SourceOrder
    reader: BlockReader
    loader: SampleLoader
    data: str
    content: str
    settings: dict[str, JSON]
    is_training: bool
    split_part: str
    num_bytes: int
    worker_config: WorkerConfig | None
    _read_lengths = LazyFunction("energon_lite.formats.length_files:read_lengths")
    _read_facts = LazyFunction("energon_lite.formats.length_files:read_facts")

    def __post_init__(self) -> None:
        """Wraps the loader, to count what fails."""
        self._lengths: dict[tuple[str, str], Int64Array] = {}
        self.mean_bytes = self.num_bytes / self.order.num_samples
        self.function = UserFunction(
            self.loader.__call__, name="load", config=self.worker_config, is_stateless=True
        )
        self.function.may_draw = self.loader.may_draw

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the lengths behind: another process reads them when it needs them."""
        return {**super().__getstate__(), "_lengths": {}}

    @property
    def name(self) -> str:
        """The source's id."""
        return self.order.source

    def own_traits(self, below: Traits) -> Traits:
        """Returns whether this is training data, and whether epoch follows epoch."""
        return _traits(below, self.is_training, self.order.endless)

    def sources(self) -> list[SourceFacts]:
        """Returns what is known of it."""
        weight = self.loader.loss_weight
        return [SourceFacts(self.name, self.order.num_samples, self.num_bytes, weight)]

    def stored_lengths(self, name: str, resource: str = "tokens") -> Int64Array:
        """Reads a length index of the split part, by the index in a restore key.

        Once in a process: all streams look up in the same array, also in forked workers.

        Raises:
            FileNotFoundError: There is none.
            DatasetFormatError: It is of other data.
        """
        reader = self.reader
        if (name, resource) not in self._lengths:
            self._lengths[name, resource] = self._read_lengths(
                reader.root, self.split_part, name, reader.num_samples, self.data, resource
            )
        return self._lengths[name, resource]

    def stored_facts(self, name: str) -> dict[str, Any]:
        """Returns the description of a length index; see `formats.length_files.read_facts`."""
        return self._read_facts(self.reader.root, self.split_part, name) or {}

    def text_bytes(self) -> float:
        """Estimates the bytes of a sample's parts by the first samples; NaN if some are no text."""
        num_samples = min(_FIRST_SAMPLES, self.order.num_samples)
        indices = np.arange(self.order.first, self.order.first + num_samples)
        return self.mean_bytes * self.loader.text_share(self.reader.read(indices, _FIRST_BYTES))

    def renamed(self, names: Mapping[str, str]) -> SavableDataset[T]:
        """Returns the same samples, in another order, under another id."""
        if self.name not in names:
            return self
        other = copy.copy(self)
        other.order = dataclasses.replace(self.order, source=names[self.name])
        return other

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return ReadCursor(self.refs(stream), stream)

    def refs(self, stream: Stream) -> SourceRefs:
        """Returns the order of a stream."""
        return SourceRefs(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the samples of the stream's share."""
        length = self.order.stream(stream).length
        if length is None:
            own, rest = divmod(self.order.num_samples, stream.num_streams)
            return own + (stream.index < rest)
        return length

    def index_in(self, restore_key: RestoreKey) -> int:
        """Returns the index of a sample of this source, by its key.

        Raises:
            ValueError: It is not the key of one.
        """
        if len(restore_key) != 4 or restore_key[0] != self.name:
            raise ValueError(f"{restore_key!r} is not a restore key of source {self.name!r}")
        index, first = restore_key[2], self.order.first
        are_numbers = all(isinstance(number, int) for number in restore_key[1:])
        if not are_numbers or not first <= index < first + self.order.num_samples:
            raise ValueError(
                f"{restore_key!r}: source {self.name!r} has samples "
                f"{first}..{first + self.order.num_samples - 1}"
            )
        return int(index)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Reads the sample of a key again."""
        block = self.reader.read(np.array([self.index_in(restore_key)], dtype=np.int64))
        with replaying():
            sample: T = self.loader(
                block.data, block.members[0], block.shards[0], block.places[0], restore_key
            )
        return sample

    def config(self) -> dict[str, JSON]:
        """Returns the settings of the order, and a hash of the data."""
        content = {"content": self.content} if self.content else {}
        return {
            "stage": "source",
            "name": self.name,
            "samples": self.order.num_samples,
            "data": self.data,
            **content,
            "seed_offset": self.order.seed,
            **self.settings,
        }


def sources_in(dataset: AnyDataset) -> Iterator[WebdatasetSource[Any]]:
    """Yields the sources of a pipeline."""
    if isinstance(dataset, WebdatasetSource):
        yield dataset
    for child in dataset.children:
        yield from sources_in(child)


class SourceRefs(RefOrder):
    """A stream's place in the order of one source."""

    def __init__(self, source: WebdatasetSource[Any], stream: Stream) -> None:
        self.sources, self.mean_bytes, self.stream = (source,), source.mean_bytes, stream
        self._ahead = OrderAhead(source.order.stream(stream))
        self.position = 0

    def ahead(self, n: int) -> Refs:
        """Returns the next `n` references, or what is left, or can be looked up quickly."""
        epochs, indices = self._ahead.at(self.position, min(n, self._ahead.most))
        return Refs(np.zeros(len(indices), np.int64), epochs, indices)

    def pass_over(self, n: int) -> None:
        """Advances by `n` references."""
        self.position += n

    def snapshot(self) -> Snapshot:
        """Returns the position."""
        return Snapshot("source", {"name": self.sources[0].name, "position": self.position})

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a position."""
        self.position = _position_in(snapshot, self.sources[0].name)


def _position_in(snapshot: Snapshot, name: str) -> int:
    """Returns the position that a snapshot of a source has."""
    snapshot.expect("source", 0)
    saved = snapshot.field("name")
    if saved != name:
        raise StateError(
            f"The checkpoint stands in source {saved!r} where this pipeline has {name!r}. "
            "Build the pipeline with the sources it was saved with."
        )
    return snapshot.count("position")


def _places_of(names: Names, positions: bytes) -> SourcePlaces:
    return SourcePlaces(names, np.frombuffer(positions, dtype=np.int64))


class SourcePlaces(Sequence[Snapshot]):
    """The snapshots of many sources, as one array.

    Args:
        names: of the sources.
        positions: shape (N,); where a stream stood in each.
    """

    __slots__ = ("_names", "_positions")

    def __init__(self, names: Names, positions: Int64Array) -> None:
        self._names = names
        self._positions = positions

    def __reduce__(self) -> Any:
        """Sends the positions to another process as bytes; numpy takes longer to make an array."""
        return _places_of, (self._names, self._positions.tobytes())

    def __iter__(self) -> Iterator[Snapshot]:
        """Yields the snapshots."""
        for name, position in zip(self._names, self._positions.tolist(), strict=True):
            yield Snapshot("source", {"name": name, "position": position})

    def __getitem__(self, number: Any) -> Any:
        """Returns a snapshot, or several."""
        return [*self][number]

    def __len__(self) -> int:
        """Counts the sources."""
        return len(self._positions)

    @staticmethod
    def positions(snapshots: Sequence[Snapshot], names: Names) -> Int64Array:
        """Returns the positions that the snapshots of the sources `names` have.

        Raises:
            StateError: They are not of these sources.
        """
        if isinstance(snapshots, SourcePlaces) and snapshots._names == names:
            return snapshots._positions
        pairs = zip(snapshots, names, strict=True)
        return np.array([_position_in(*pair) for pair in pairs], dtype=np.int64)
