"""A buffer of items from which one is taken at random."""

from __future__ import annotations

from typing import TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset, WrapperDataset
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig

T = TypeVar("T")

_WORDS = 256


class ShuffleBufferDataset(WrapperDataset[T]):
    """Keeps `size` items of a stream and gives one of them at random, again and again.

    For samples as they come from their sources, `shuffle_buffer_size` of `get_train_dataset` does
    the same without holding or reading anything ahead; this is for items that stages made.

    State: the restore keys of the items held, and how many were given.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items; they must be replayable, since those held are saved as restore keys.
        size: items held; None, 0 and 1 pass everything on as it comes.
        worker_config: by default that of the dataset.

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
        if self.size > 1 and not dataset.can_restore_sample():
            raise ValueError(
                "A shuffle buffer holds items back, and these are saved as restore keys; but a "
                "function below is not marked as repeatable. Put @stateless on it (with "
                "restore_seeds=True, or sample_rng(), if it is random), or shuffle the source: "
                "shuffle_buffer_size."
            )

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.worker_config.seed_offset if self.worker_config else 0

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives a fresh cursor."""
        return _ShuffleCursor(self, stream)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """Gives the size and what is shuffled."""
        return {"stage": "shuffle_buffer", "size": self.size, "of": self.dataset.config()}


class _ShuffleCursor(Cursor[T]):
    def __init__(self, spec: ShuffleBufferDataset[T], stream: Stream) -> None:
        self._spec = spec
        self._inner: Cursor[T] = spec.dataset.cursor(stream)
        self._key = key_of(
            "shuffle_buffer", spec.seed, stream.num_streams, stream.index, stream.pass_index
        )
        self._held: list[tuple[RestoreKey, T]] = []
        self._given = 0
        self._words: tuple[int, list[int]] = (-1, [])

    def __next__(self) -> T:
        held = self._held
        while len(held) < self._spec.size:
            try:
                item = next(self._inner)
            except StopIteration:
                break
            held.append((self._inner.key, item))
        if not held:
            raise StopIteration
        # The last one fills the gap, so that nothing has to be moved.
        chosen = self._word() % len(held)
        held[chosen], held[-1] = held[-1], held[chosen]
        self.key, item = held.pop()
        self._given += 1
        return item

    def _word(self) -> int:
        """Gives the random word of this step; each step has its own."""
        block, place = divmod(self._given, _WORDS)
        if self._words[0] != block:
            self._words = (block, random_words(self._key, block, size=_WORDS).tolist())
        return self._words[1][place]

    def snapshot(self) -> Snapshot:
        held = tuple(key for key, _ in self._held)
        return Snapshot(
            "shuffle_buffer", {"given": self._given, "held": held}, (self._inner.snapshot(),)
        )

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("shuffle_buffer", 1)
        given, held = snapshot.count("given"), snapshot.field("held")
        if not isinstance(held, tuple) or not all(isinstance(key, tuple) for key in held):
            raise StateError(f"'held' of the checkpoint's shuffle_buffer is {held!r:.80}")
        self._inner.restore(snapshot.inner[0])
        try:
            self._held = [(key, self._spec.dataset.restore_sample(key)) for key in held]
        except ValueError as error:
            raise StateError(f"The checkpoint's shuffle_buffer: {error}") from None
        self._given = given
