"""A buffer of items from which one is taken at random."""

from __future__ import annotations

from typing import TypeVar

from energon_lite.batching.one_by_one import ShuffleCollector
from energon_lite.core.dataset import Cursor, SavableDataset, depth_of
from energon_lite.core.seeds import key_of
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.stages.collect import CollectCursor, CollectDataset

T = TypeVar("T")


class ShuffleBufferDataset(CollectDataset[T]):
    """Buffers `size` items of a stream, and returns one of them at random for each that it reads.

    Prefer the sources' own shuffling (`shuffle_buffer_size`): it costs no memory, reads nothing
    ahead and keeps nothing in the state. This is for the order of items that stages made. Of a
    stream with fewer samples it buffers an epoch, and begins the next when nothing is left.

    State: that of `CollectDataset`.
    Length, Keys: as below.

    Args:
        dataset: the items; they must be replayable, since buffered ones are saved as restore keys.
        size: items of the buffer; None, 0 and 1 pass every item on as it comes.
        worker_config: has the seed; by default that of the dataset.

    Raises:
        ValueError: `size` is negative, or items below cannot be re-created.
    """

    samples_per_list = 1
    joins_epochs = False

    def __init__(
        self,
        dataset: SavableDataset[T],
        size: int | None,
        *,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        if size is not None and size < 0:
            raise ValueError(f"size={size} is negative; None, 0 or 1 for no shuffling")
        self.size = max(1, size or 1)
        if self.size > 1:
            self.name, self.what = "shuffle_buffer", "A shuffle buffer"
        super().__init__(dataset, worker_config)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return super().cursor(stream) if self.size > 1 else self.dataset.cursor(stream)

    def collector(self, stream: Stream, cursor: CollectCursor) -> ShuffleCollector:
        """Returns what chooses the items of a stream; unlike that of any other buffer."""
        names = tuple(facts.name for facts in self.dataset.sources())
        place = (stream.num_streams, stream.index, stream.pass_index)
        depth = depth_of(self, ShuffleBufferDataset)  # so that one in another chooses otherwise
        key = key_of("shuffle_buffer", self.run_seed, names, depth, *place)
        return ShuffleCollector(self.size, key)

    def made(self, keys: list[RestoreKey], items: list[T]) -> tuple[RestoreKey, T]:
        """Returns the one item with its own key."""
        return keys[0], items[0]

    restore_sample = Stage.restore_sample
    restore_member = Stage.restore_sample

    def own_settings(self) -> dict[str, JSON]:
        """Returns size and seed."""
        return {"size": self.size, "seed_offset": self.run_seed}
