"""What the samples are, and where one stream stands in them: the two types of every stage.

A `SavableDataset` is immutable, picklable and cheap to send to a worker. A `Cursor` is one
stream's place in it. The six laws that bind them are written down in docs/architecture.md and
tested by `energon_lite.testing.check_dataset`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from energon_lite.core.activity import DEFAULT_MAX_SKIP_RATE, Activity, set_activity
from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import RankSlots, Stream, WorkerConfig

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Cursor(Iterator[T_co], ABC):
    """Where one stream stands in a dataset.

    Attributes:
        key: the restore key of the item that `next` gave last.
    """

    key: RestoreKey

    @abstractmethod
    def __next__(self) -> T_co:
        """Gives the next item."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Gives the place between two items, as a cheap value."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot of an equal dataset and stream.

        Raises:
            StateError: The snapshot is of another kind of stage.
        """

    def take(self, n: int) -> tuple[list[T_co], list[RestoreKey]]:
        """Gives the next `n` items, or what is left, and their restore keys."""
        items: list[T_co] = []
        keys: list[RestoreKey] = []
        with suppress(StopIteration):
            for _ in range(n):
                items.append(next(self))
                keys.append(self.key)
        return items, keys

    def skip(self, n: int) -> None:
        """Passes over `n` items."""
        for _ in range(n):
            next(self)


class SavableDataset(ABC, Generic[T_co]):
    """What the samples are; iterating changes nothing in it."""

    worker_config: WorkerConfig | None = None

    @abstractmethod
    def cursor(self, stream: Stream) -> Cursor[T_co]:
        """Gives a fresh cursor at the start of a stream."""

    @abstractmethod
    def config(self) -> dict[str, JSON]:
        """Gives the settings that decide the content."""

    @abstractmethod
    def restore_sample(self, restore_key: RestoreKey) -> T_co:
        """Makes the item again that carried `restore_key`.

        Raises:
            ValueError: The key is not one of this dataset.
        """

    @abstractmethod
    def num_items(self, stream: Stream) -> int:
        """Counts the items of a stream's pass (of its first epoch, if it is endless).

        Samples that are skipped or expanded while reading are not foreseen.
        """

    @property
    @abstractmethod
    def training(self) -> bool:
        """Whether a new `iter` of a loader goes on (training) or starts afresh (validation)."""

    @property
    @abstractmethod
    def endless(self) -> bool:
        """Whether a pass has no end."""

    def can_restore_sample(self) -> bool:
        """Whether `restore_sample` gives equal items: every stage is replayable."""
        return True

    @property
    def pass_length(self) -> int | None:
        """How many items each rank gives before a loader ends a pass early; None for all."""
        return None

    def __len__(self) -> int:
        """Counts the items of this rank in a pass (an epoch, if endless), before any skipping."""
        return count_rank_items(self, self.worker_config)

    def __iter__(self) -> Iterator[T_co]:
        """Iterates the whole dataset as one stream, without a loader."""
        run = StreamRun(self, Stream(0, 1))
        given = 0
        while self.pass_length is None or given < self.pass_length:
            try:
                item = next(run)
            except StopIteration:
                return
            given += 1
            yield item


class WrapperDataset(SavableDataset[T_co]):
    """A dataset over one other; by default everything is as in that."""

    def __init__(self, dataset: SavableDataset[Any]) -> None:
        self.dataset = dataset
        self.worker_config = dataset.worker_config

    @property
    def training(self) -> bool:
        """As the dataset below."""
        return self.dataset.training

    @property
    def endless(self) -> bool:
        """As the dataset below."""
        return self.dataset.endless

    @property
    def pass_length(self) -> int | None:
        """As the dataset below."""
        return self.dataset.pass_length

    def can_restore_sample(self) -> bool:
        """As the dataset below."""
        return self.dataset.can_restore_sample()

    def num_items(self, stream: Stream) -> int:
        """As the dataset below."""
        return self.dataset.num_items(stream)


def count_rank_items(dataset: SavableDataset[Any], config: WorkerConfig | None) -> int:
    """Counts what a rank gives in a pass, or in an epoch of an endless one."""
    config = config or WorkerConfig(rank=0, world_size=1, num_workers=0)
    if dataset.pass_length is not None and dataset.training:
        return dataset.pass_length
    slots = RankSlots(0, config.rank, config.world_size, config.default_num_streams)
    total = 0
    for first, index in enumerate(slots.streams()):
        items = dataset.num_items(Stream(index, slots.num_streams))
        # The rank gives batch k of the stream for k = start, start + stride, ...
        start = slots.slot(first) // slots.num_streams
        total += max(0, -(-(items - start) // slots.stride))
    return total if dataset.pass_length is None else min(total, dataset.pass_length)


@contextmanager
def activity_of(activity: Activity) -> Iterator[None]:
    """Makes `activity` the thread's current one for a `with` block."""
    before = set_activity(activity)
    try:
        yield
    finally:
        set_activity(before)


class StreamRun(Iterator[T]):
    """Drives one stream of a pipeline: numbers its items and collects what it left out.

    State: number of items given, and how far failures stand above their rate.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        stream: Stream,
        max_skip_rate: float = DEFAULT_MAX_SKIP_RATE,
    ) -> None:
        self.stream = stream
        self.activity = Activity(stream, max_skip_rate)
        self.num_given = 0
        self._dataset = dataset
        self._cursor = dataset.cursor(stream)

    @property
    def key(self) -> RestoreKey:
        """The restore key of the item given last."""
        return self._cursor.key

    def __next__(self) -> T:
        """Gives the stream's next item."""
        activity = self.activity
        activity.batch_index = self.num_given * self.stream.num_streams + self.stream.index
        before = set_activity(activity)
        try:
            item = next(self._cursor)
        finally:
            set_activity(before)
        activity.gave_item()
        self.num_given += 1
        return item

    def snapshot(self) -> Snapshot:
        """Gives the place between two items."""
        fields: dict[str, Any] = {"items": self.num_given}
        if self.activity.fill:
            fields["failures"] = self.activity.fill
            fields["last_failure"] = self.activity.last_draw
        return Snapshot("stream", fields, (self._cursor.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot; if that fails, everything is as before."""
        snapshot.expect("stream", 1)
        num_given = snapshot.count("items")
        fill = snapshot.fields.get("failures", 0.0)
        if not isinstance(fill, (int, float)) or fill < 0:
            raise StateError(f"The checkpoint's stream has failures={fill!r}, which is no number.")
        last_draw = snapshot.count("last_failure") if "last_failure" in snapshot.fields else 0
        activity = Activity(self.stream, self.activity.max_skip_rate)
        cursor = self._dataset.cursor(self.stream)
        with activity_of(activity):
            activity.batch_index = num_given * self.stream.num_streams + self.stream.index
            cursor.restore(snapshot.inner[0])
        # What is left out while samples are made again was counted when it was left out first.
        activity.take_records()
        activity.fill, activity.last_draw = float(fill), last_draw
        self.activity, self.num_given, self._cursor = activity, num_given, cursor

    def skip(self, n: int) -> None:
        """Passes over `n` items; what was left out meanwhile is another rank's to count."""
        for _ in range(n):
            next(self)
        self.activity.take_records()
