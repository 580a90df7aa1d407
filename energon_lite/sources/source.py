"""A leaf of the pipeline: the samples of some tar shards, in their order, decoded and typed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset, SourceFacts, Traits
from energon_lite.core.errors import StateError
from energon_lite.core.sample_columns import Columns, Origin, SampleColumns
from energon_lite.core.samples import SourceInfo
from energon_lite.core.state import JSON, Names, RestoreKey, Snapshot
from energon_lite.core.stream_context import context_or, replaying
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import FunctionRun, UserFunction
from energon_lite.formats.shards import Block, BlockReader
from energon_lite.formats.tar import key_of_members
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.order.source_order import SourceOrder
from energon_lite.sources.order_ahead import BlockOrder, OrderAhead
from energon_lite.sources.sample_loader import DecodedBlock, SampleLoader
from energon_lite.sources.source_blocks import source_blocks

T = TypeVar("T")


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
        settings: what the user set, by its public names, for messages about checkpoints.
        is_training: whether this is training data.
        split_part: of which it is the data.
        num_bytes: bytes of the shards.
        worker_config: where error handlers come from.
    """

    order: SourceOrder
    reader: BlockReader
    loader: SampleLoader
    data: str
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
        self._function = UserFunction(
            self.loader.__call__, name="load", config=self.worker_config, is_stateless=True
        )
        self._function.may_draw = self.loader.may_draw

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the lengths behind: another process reads them when it needs them."""
        return {**super().__getstate__(), "_lengths": {}}

    @property
    def name(self) -> str:
        """The source's id."""
        return self.order.source

    @property
    def mean_bytes(self) -> float:
        """Bytes of a sample."""
        return self.num_bytes / self.order.num_samples

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

    def renamed(self, names: Mapping[str, str]) -> SavableDataset[T]:
        """Returns the same samples, in another order, under another id."""
        if self.name not in names:
            return self
        other = copy.copy(self)
        other.order = dataclasses.replace(self.order, source=names[self.name])
        return other

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return SourceCursor(self, stream)

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
        return {
            "stage": "source",
            "name": self.name,
            "samples": self.order.num_samples,
            "data": self.data,
            "seed_offset": self.order.seed,
            **self.settings,
        }


class SourceCursor(Cursor[T]):
    """A stream's place in a source.

    Args:
        source: the samples.
        stream: the stream.
        order: what comes next, by position; by default the source's own order.
    """

    def __init__(
        self, source: WebdatasetSource[T], stream: Stream, order: BlockOrder | None = None
    ) -> None:
        self.spec = source
        self._name = source.name
        self._stream = stream
        self._order = order or source.order.stream(stream)
        self._run = FunctionRun(source._function)
        self._origins: dict[str, Origin] = {}
        self.go_to(0)

    def go_to(self, position: int) -> None:
        """Goes to a position."""
        # The last block, decoded or not, which of its samples is next, and the position behind it.
        self._block: Block | None = None
        self._decoded: DecodedBlock | None = None
        self._row = self._num_rows = 0
        self._stop = position
        self._blocks: Iterator[tuple[Block, Int64Array, Int64Array]] | None = None
        self._last_failed = 0

    @property
    def position(self) -> int:
        """The position of the next sample."""
        return self._stop - self._num_rows + self._row

    def __next__(self) -> T:
        """Returns the next sample that can be read."""
        while True:
            if self._row == self._num_rows:
                self._read_on()
            if samples := self._one()[0]:
                return samples[0]

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        """Returns the next samples of a block that was decoded, or one, if it can be read."""
        if self._row == self._num_rows:
            self._read_on()
        return self._made(self._decoded, n) if self._decoded and n > 1 else self._one()

    def _one(self) -> tuple[list[T], list[RestoreKey]]:
        """Returns the next sample of a block, if it can be read."""
        row, context = self._row, self._context
        self._row, number = row + 1, context.sample_index
        context.sample_index = number + self._stream.num_streams
        context.costs[self._name].draws += 1
        self.key = key = (self._name, self._own_epochs[row], self._own_indices[row], number)
        if self._decoded:
            return [self.spec.loader.made_one(self._decoded, row, key)], [key]
        block: Any = self._block
        members, shard, place = block.members[row], block.shards[row], block.places[row]
        since = perf_counter()
        try:
            sample: Any = self.spec.loader(block.data, members, shard, place, key)
        except Exception as error:
            self._count_skip(error, members, shard, place, key)
            return [], []
        finally:
            context.costs[self._name].read_sec += perf_counter() - since
        # Of a dataclass, or of a crude sample, a dict.
        is_crude = isinstance(sample, dict)
        self.key = sample["__restore_key__"] if is_crude else sample.__restore_key__
        return [sample], [self.key]

    def _made(self, block: DecodedBlock, n: int) -> tuple[SampleColumns, list[RestoreKey]]:
        """Returns the next samples of a block that was decoded, and their restore keys."""
        rows = slice(self._row, min(self._row + n, self._num_rows))
        self._row = rows.stop
        keys = self.numbered(self._own_epochs[rows], self._own_indices[rows])
        self._context.costs[self._name].draws += len(keys)
        return self.spec.loader.made(block, rows, keys, self._origins), keys

    def numbered(self, epochs: list[int], indices: list[int]) -> list[RestoreKey]:
        """Returns the restore keys of the next draws, at least one.

        They are counted over all sources of the pipeline, which take turns.
        """
        context, step = context_or(self._stream), self._stream.num_streams
        first = context.sample_index
        context.sample_index = stop = first + len(indices) * step
        keys = [*zip(repeat(self._name), epochs, indices, range(first, stop, step))]
        self.key = keys[-1]
        return keys

    def _read_on(self) -> None:
        """Reads the next block, and decodes its samples if this can be done for all at once.

        Raises:
            StopIteration: There is none.
        """
        since = perf_counter()
        self._block = self._decoded = None  # keeps no bytes while it reads
        spec = self.spec
        if self._blocks is None:
            self._context = context_or(self._stream)
            order, share = OrderAhead(self._order), self._stream.share
            self._blocks = source_blocks(spec.reader, order, self._stop, share, spec.mean_bytes)
        try:
            block, epochs, indices = next(self._blocks)
            decoded = spec.loader.together(block)
            if decoded and not self._origins:
                self._origins = {self._name: spec.loader.origin}
        except BaseException:
            self._blocks = None  # a caller that continues after the error reads again
            raise
        finally:
            self._context.costs[self._name].read_sec += perf_counter() - since
        self._row, self._num_rows = 0, len(indices)
        self._block, self._decoded = None if decoded else block, decoded
        self._own_epochs, self._own_indices = epochs.tolist(), indices.tolist()
        self._stop += self._num_rows

    def _count_skip(
        self, error: Exception, members: Any, shard: str, place: int, key: RestoreKey
    ) -> None:
        """Counts a sample that could not be read, under its key if that could be."""
        if self.position != self._last_failed + 1:
            self._run.failures = 0  # those before it were well
        self._last_failed = self.position
        source = self.spec
        sample_key = key_of_members(members) or f"{shard}[{place}]"
        info = SourceInfo(str(source.reader.root), key[2], shard, ())
        described = {"__key__": sample_key, "__sources__": (info,)}
        self._run.count_skip(error, key, described, is_noted=True)

    def snapshot(self) -> Snapshot:
        """Returns the position."""
        return Snapshot("source", {"name": self._name, "position": self.position})

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a position."""
        self.go_to(_position_in(snapshot, self.spec.name))


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
        taken: numbers of the sources that a sample was taken from since.
    """

    __slots__ = ("_names", "_positions", "_taken")

    def __init__(
        self, names: Names, positions: Int64Array, taken: Int64Array | Sequence[int] = ()
    ) -> None:
        self._names = names
        self._positions = positions
        self._taken = taken

    def __reduce__(self) -> Any:
        """Sends the positions to another process as bytes; numpy takes longer to make an array."""
        return _places_of, (self._names, self._all().tobytes())

    def _all(self) -> Int64Array:
        """Counts what was taken; where many snapshots are made, few of them are looked at."""
        if not len(self._taken):
            return self._positions
        return self._positions + np.bincount(self._taken, minlength=len(self._positions))

    def __iter__(self) -> Iterator[Snapshot]:
        """Yields the snapshots."""
        for name, position in zip(self._names, self._all().tolist(), strict=True):
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
            return snapshots._all()
        pairs = zip(snapshots, names, strict=True)
        return np.array([_position_in(*pair) for pair in pairs], dtype=np.int64)
