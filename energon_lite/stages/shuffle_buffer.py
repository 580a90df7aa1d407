"""A buffer of items from which one is taken at random."""

from __future__ import annotations

from typing import Any, TypeVar

from energon_lite.batching.key_rows import KeyArray
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again
from energon_lite.core.topology import Stream, WorkerConfig

T = TypeVar("T")

# Random words made at once; a multiple of 4, as `random_words` wants it.
_WORDS = 256


class ShuffleBufferDataset(Stage[T]):
    """Holds `size` items of a stream, and gives one of them at random for each that it reads.

    Prefer the sources' own shuffling (`shuffle_buffer_size`): it costs no memory, reads nothing
    ahead and keeps nothing in the state. This is for the order of items that stages made.

    State: how many items were given, and the restore keys of those held; a resume makes them again.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items; they must be replayable, since those held are saved as restore keys.
        size: items held; None, 0 and 1 pass everything on as it comes.
        worker_config: gives the seed; by default that of the dataset.

    Raises:
        ValueError: `size` is negative, or items below cannot be made again.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        size: int | None,
        *,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(dataset.nested())
        self.worker_config = worker_config or self.worker_config
        if size is not None and size < 0:
            raise ValueError(f"size={size} is negative; None, 0 or 1 for no shuffling")
        self.size = max(1, size or 1)
        self.holds_back = self.size > 1
        if self.size > 1 and not dataset.can_restore_sample():
            raise ValueError(
                "A shuffle buffer holds items back, and these are saved as restore keys; but a "
                "function below is not marked as repeatable. Put @stateless on it (with "
                "restore_seeds=True, or sample_rng(), if it is random; for an IterMapDataset "
                "stateless_iter_fn=True), or leave the shuffling to the sources: "
                "shuffle_buffer_size."
            )

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.worker_config.seed_offset if self.worker_config else 0

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        if self.size == 1:
            return self.dataset.cursor(stream)
        return _ShuffleCursor(self, stream)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """Returns size and seed; nothing of its own where it passes everything on."""
        below = self.dataset.config()
        if self.size == 1:
            return below
        return {
            "stage": "shuffle_buffer",
            "size": self.size,
            "seed_offset": self.seed,
            "of": below,
        }

    def random_key(self, stream: Stream) -> int:
        """Returns the key of a stream's random words, different from any other buffer's."""
        return key_of(
            "shuffle_buffer",
            self.seed,
            tuple(facts.name for facts in self.dataset.sources()),
            _depth(self),
            stream.num_streams,
            stream.index,
            stream.pass_index,
        )


class _ShuffleCursor(Cursor[T]):
    def __init__(self, spec: ShuffleBufferDataset[T], stream: Stream) -> None:
        self._spec = spec
        self._inner: Cursor[T] = spec.dataset.cursor(stream)
        self._random_key = spec.random_key(stream)
        self._held: list[tuple[RestoreKey, T]] = []
        self._keys = KeyArray()
        self._given = 0
        self._words: list[int] = []  # the next one last

    def __next__(self) -> T:
        held, inner, size = self._held, self._inner, self._spec.size
        try:
            while len(held) < size:
                item = next(inner)
                held.append((inner.key, item))
                self._keys.add(inner.key)
        except StopIteration:
            if not held:
                raise
        words = self._words or self._next_words()
        chosen = words.pop() % len(held)
        # The last one fills the gap, so that nothing has to be moved.
        held[chosen], held[-1] = held[-1], held[chosen]
        self.key, item = held.pop()
        self._keys.take(chosen)
        self._given += 1
        return item

    def _next_words(self) -> list[int]:
        """Makes random words for the items that come next, up to a multiple of `_WORDS`."""
        block, place = divmod(self._given, _WORDS)
        words = random_words(self._random_key, size=_WORDS, skip=block * _WORDS)
        self._words = words[place:][::-1].tolist()
        return self._words

    def snapshot(self) -> Snapshot:
        fields: Any = self._keys.fields({"given": self._given})
        return Snapshot("shuffle_buffer", fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("shuffle_buffer", 1)
        given, held = snapshot.count("given"), snapshot.field("held")
        if not isinstance(held, tuple) or not all(isinstance(key, tuple) for key in held):
            raise StateError(
                f"'held' of the checkpoint's shuffle_buffer is {held!r:.80}, not a list of keys"
            )
        if len(held) >= self._spec.size:
            raise StateError(
                f"The checkpoint's shuffle_buffer holds {len(held)} items between two, which does "
                f"not go with size={self._spec.size}."
            )
        self._inner.restore(snapshot.inner[0])
        again = Again(self._spec.dataset.restore_sample, held)
        self._held = [(key, again(key)) for key in held]
        self._keys = KeyArray(held)
        self._given, self._words = given, []


def _depth(dataset: SavableDataset[Any]) -> int:
    """Counts how many buffers lie in one another, so that those do not choose in step."""
    below = max((_depth(child) for child in dataset.children), default=0)
    return below + isinstance(dataset, ShuffleBufferDataset)
