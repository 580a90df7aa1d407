"""A leaf of the pipeline: the samples of some tar shards, in their order, decoded and typed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset, SourceFacts, Traits
from energon_lite.core.errors import StateError
from energon_lite.core.samples import SourceInfo
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Cost, context_or, replaying
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import FunctionRun, UserFunction
from energon_lite.order.source_order import SourceOrder
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.storage.length_files import TOKENS, read_facts, read_lengths
from energon_lite.storage.read_ahead import BlockOrder, ReadAhead
from energon_lite.storage.shards import MAX_BLOCK_BYTES, BlockReader
from energon_lite.storage.tar import key_of_members

T = TypeVar("T")

# Samples that are ordered and read together: few at first, so that the first comes at once and a
# short pass costs little, then twice as many each time. The sources of a blend share what may be
# held ahead by their shares of the draws; a block of few samples costs much for each of them.
_FIRST_BLOCK, _LARGEST_BLOCK, _SMALLEST_BLOCK = 32, 1024, 32
_HELD_BY_ALL, _BYTES_OF_ALL = 16 * _LARGEST_BLOCK, 4 * MAX_BLOCK_BYTES
_SMALLEST_READ_BYTES = 64 << 10


@dataclasses.dataclass(kw_only=True, eq=False)
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

    def own_traits(self, below: Traits) -> Traits:
        """Returns whether this is training data, and whether epoch follows epoch."""
        return dataclasses.replace(below, training=self.is_training, endless=self.order.endless)

    def sources(self) -> list[SourceFacts]:
        """Returns what is known of it."""
        weight = self.loader.loss_weight
        return [SourceFacts(self.name, self.order.num_samples, self.num_bytes, weight)]

    def stored_lengths(self, name: str, resource: str = TOKENS) -> Int64Array:
        """Reads a length index of the split part, by the index in a restore key.

        Once in a process: all streams look up in the same array, also in forked workers.

        Raises:
            FileNotFoundError: There is none.
            DatasetFormatError: It is of other data.
        """
        reader = self.reader
        if (name, resource) not in self._lengths:
            self._lengths[name, resource] = read_lengths(
                reader.root, self.split_part, name, reader.num_samples, self.data, resource
            )
        return self._lengths[name, resource]

    def stored_facts(self, name: str) -> dict[str, Any]:
        """Returns the description of a length index; see `storage.length_files.read_facts`."""
        return read_facts(self.reader.root, self.split_part, name) or {}

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

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Reads the sample of a key again."""
        if len(restore_key) != 4 or restore_key[0] != self.name:
            raise ValueError(f"{restore_key!r} is not a restore key of source {self.name!r}")
        index, first = restore_key[2], self.order.first
        are_numbers = all(isinstance(number, int) for number in restore_key[1:])
        if not are_numbers or not first <= index < first + self.order.num_samples:
            raise ValueError(
                f"{restore_key!r}: source {self.name!r} has samples "
                f"{first}..{first + self.order.num_samples - 1}"
            )
        block = self.reader.read(np.array([index], dtype=np.int64))
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
        self._context = context_or(stream)
        self._cost = Cost()
        self._block_sec = 0.0
        self._order = order or source.order.stream(stream)
        self._run = FunctionRun(source._function)
        self._go_to(0)

    def _go_to(self, position: int) -> None:
        self._position = position
        self._last_failed = 0
        self._samples: Iterator[T] = self._generate()

    def __next__(self) -> T:
        """Returns the next sample that can be read."""
        before = self._position
        # One in eight is timed, and stands for all; reading a block is timed where it is done.
        since = 0.0 if before & 7 else perf_counter()
        try:
            sample: Any = next(self._samples)
            # A dataclass, or a crude sample, a dict.
            crude = isinstance(sample, dict)
            self.key = sample["__restore_key__"] if crude else sample.__restore_key__
            return sample  # type: ignore[no-any-return]
        except StopIteration:
            raise
        except BaseException:
            # The generator is over; a caller that continues after the error gets the next sample.
            self._samples = self._generate()
            raise
        finally:
            cost = self._cost
            if not cost.is_touched:
                cost = self._context.cost(self._name)
            cost.draws += self._position - before
            if since:
                cost.read_sec += 8 * (perf_counter() - since - self._block_sec)
            if self._block_sec:
                cost.read_sec += self._block_sec
                self._block_sec = 0.0

    def take(self, n: int) -> tuple[list[T], list[RestoreKey]]:
        """Returns the next samples, and their restore keys."""
        since, before = perf_counter(), self._position
        items: list[T] = []
        try:
            items.extend(islice(self._samples, n))
        except BaseException:
            self._samples = self._generate()
            raise
        finally:
            cost = self._context.cost(self._name)
            cost.draws += self._position - before
            cost.read_sec += perf_counter() - since
            self._block_sec = 0.0
        if items and isinstance(items[0], dict):
            return items, [item["__restore_key__"] for item in items]  # type: ignore[index]
        return items, [item.__restore_key__ for item in items]  # type: ignore[attr-defined]

    def _generate(self) -> Iterator[T]:
        name, context = self._name, context_or(self._stream)
        self._context, self._cost = context, context.cost(name)
        num_streams = self._stream.num_streams
        load, share = self.spec.loader, self._stream.share
        mean_bytes = self.spec.num_bytes / self.spec.order.num_samples
        ahead = ReadAhead(self.spec.reader, self._order, share, mean_bytes)
        largest = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, int(share * _HELD_BY_ALL)))
        max_bytes = min(MAX_BLOCK_BYTES, max(_SMALLEST_READ_BYTES, int(share * _BYTES_OF_ALL)))
        size = min(_FIRST_BLOCK, largest)
        while True:
            since = perf_counter()
            epochs, indices = self._order.block(self._position, size)
            if not len(indices):
                return
            size = min(2 * size, largest)
            pairs = self._pairs(epochs, indices)
            for data, block, shards, places in ahead.blocks(self._position, indices, max_bytes):
                self._block_sec += perf_counter() - since
                own = islice(pairs, len(places))
                for members, shard, place, (epoch, index) in zip(
                    block, shards, places, own, strict=True
                ):
                    self._position += 1
                    # Draws are counted over all sources of the pipeline, which take turns.
                    number = context.sample_index
                    context.sample_index = number + num_streams
                    key = (name, epoch, index, number)
                    try:
                        sample = load(data, members, shard, place, key)
                    except Exception as error:
                        sample = self._count_skip(error, members, shard, place, key)
                        if sample is None:
                            continue
                    yield sample
                since = perf_counter()

    def _pairs(self, epochs: Int64Array, indices: Int64Array) -> Iterator[tuple[int, int]]:
        """Returns epoch and index of each sample of a block, right before it is made."""
        return zip(epochs.tolist(), indices.tolist(), strict=True)

    def _count_skip(
        self, error: Exception, members: Any, shard: str, place: int, key: RestoreKey
    ) -> Any:
        """Counts a sample that could not be read, under its key if that could be.

        Returns:
            What is given in its place; None for nothing.
        """
        if self._position != self._last_failed + 1:
            self._run.failures = 0  # those before it were well
        self._last_failed = self._position
        source = self.spec
        sample_key = key_of_members(members) or f"{shard}[{place}]"
        info = SourceInfo(str(source.reader.root), key[2], shard, ())
        described = {"__key__": sample_key, "__sources__": (info,)}
        self._run.count_skip(error, key, described, is_noted=True)

    def snapshot(self) -> Snapshot:
        """Returns the position."""
        return Snapshot("source", {"name": self._name, "position": self._position})

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a position."""
        snapshot.expect("source", 0)
        name = snapshot.field("name")
        if name != self.spec.name:
            raise StateError(
                f"The checkpoint stands in source {name!r} where this pipeline has "
                f"{self.spec.name!r}. Build the pipeline with the sources it was saved with."
            )
        self._go_to(snapshot.count("position"))
