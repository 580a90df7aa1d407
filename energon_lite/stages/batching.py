"""Several samples in one item: fixed batches, and batches of one group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context, replaying
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import (
    DEFAULT_FAILURE_TOLERANCE,
    SKIPPED,
    FunctionRun,
    UserFunction,
)
from energon_lite.stages.map import FunctionConfig, MapDataset, as_user_function

T = TypeVar("T")

GroupKey = Callable[[Any], tuple[Hashable, "int | None"]]


def check_batch_size(batch_size: int) -> int:
    """Returns a batch size of at least 1.

    Raises:
        ValueError: It is smaller.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1, or None for no batches")
    return batch_size


class Collected(Stage[list[Any]]):
    """Lists of samples; what makes one item of each is a `MapDataset` above.

    Args:
        dataset: the samples.
        holding_back: what holds samples back, for the error if they cannot be made again.

    Attributes:
        kind: what the samples are made into, the first entry of a list's restore key.

    Raises:
        ValueError: Samples are held back that cannot be made again.
    """

    kind: ClassVar[str] = "batch"
    drop_last = False

    def __init__(self, dataset: SavableDataset[Any], holding_back: str = "") -> None:
        super().__init__(dataset.nested())
        self.holds_back = bool(holding_back)
        if holding_back and not dataset.can_restore_sample():
            raise ValueError(
                f"{holding_back} hold samples back, and these are saved as restore keys; but a "
                "hook below is not marked as repeatable. Put @stateless on encode_sample / "
                "preencode_sample / postencode_sample (with restore_seeds=True, or sample_rng(), "
                "if it is random)."
            )

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether the samples of a last list are dropped."""
        return dataclasses.replace(below, drops=below.drops or self.drop_last)

    def restore_sample(self, restore_key: RestoreKey) -> list[Any]:
        """Makes the samples of a list again."""
        if len(restore_key) < 3 or restore_key[0] != self.kind:
            raise ValueError(f"{restore_key!r} is not the restore key of a {self.kind}")
        with replaying() as context:
            context.batch_index = restore_key[1]
            return list(map(Again(self.restore_member, restore_key[2:]), restore_key[2:]))

    def restore_member(self, key: RestoreKey) -> Any:
        """Makes one sample of a list again."""
        return self.dataset.restore_sample(key)


class BatchLists(Collected):
    """Lists of `batch_size` samples that follow each other.

    State: none of its own.
    Length: that below over the batch size, rounded up (down with `drop_last`).
    Keys: `("batch", slot, key, key, ...)`.
    """

    def __init__(
        self, dataset: SavableDataset[Any], batch_size: int, drop_last: bool = False
    ) -> None:
        super().__init__(dataset)
        self.batch_size = check_batch_size(batch_size)
        self.drop_last = drop_last

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return _BatchCursor(self.dataset.cursor(stream), self.batch_size, self.drop_last)

    def num_items(self, stream: Stream) -> int:
        """Counts the batches of a stream's pass."""
        num_samples = self.dataset.num_items(stream)
        whole = num_samples // self.batch_size
        return whole if self.drop_last else whole + (num_samples % self.batch_size > 0)

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of so many batches."""
        return self.dataset.expected(num_items * self.batch_size)

    def config(self) -> dict[str, JSON]:
        """Returns batch size and the handling of the last batch."""
        return {
            "stage": "batch",
            "batch_size": self.batch_size,
            "batch_drop_last": self.drop_last,
            "of": self.dataset.config(),
        }


class _BatchCursor(Cursor[list[Any]]):
    def __init__(self, inner: Cursor[Any], batch_size: int, drop_last: bool) -> None:
        self._inner = inner
        self._batch_size = batch_size
        self._drop_last = drop_last

    def __next__(self) -> list[Any]:
        samples, keys = self._inner.take(self._batch_size)
        if not samples or (self._drop_last and len(samples) < self._batch_size):
            raise StopIteration
        self.key = ("batch", current_context().batch_index, *keys)
        return samples

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._inner.restore(snapshot)


class GroupLists(Collected):
    """Lists of samples of one group: one bucket per group, given when it is full.

    State: the restore keys of the samples in the buckets.
    Length: as if there was one group; with several, each may leave a list that is not full.
    Keys: `("batch", slot, key, key, ...)`.

    Args:
        dataset: the samples; they must be replayable, since buckets are saved as restore keys.
        criterion: gives (group, batch size of the group or None) for a sample.
        batch_size: size of all batches; None if the criterion gives it.
        drop_last: whether buckets that are not full at the end are left out.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        criterion: UserFunction,
        batch_size: int | None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, "Batches by group")
        self.criterion = criterion
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self.drop_last = drop_last

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return _GroupCursor(self, self.dataset.cursor(stream))

    def num_items(self, stream: Stream) -> int:
        """Counts the batches as if all samples were of one group of the fixed size."""
        num_samples = self.dataset.num_items(stream)
        return -(-num_samples // self.batch_size) if self.batch_size else num_samples

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of so many batches, of the fixed size if there is one."""
        return self.dataset.expected(num_items * (self.batch_size or 1))

    def config(self) -> dict[str, JSON]:
        """Returns batch size and the handling of the last batches."""
        return {
            "stage": "group_batch",
            "batch_size": self.batch_size,
            "batch_drop_last": self.drop_last,
            "of": self.dataset.config(),
        }


class _Bucket:
    __slots__ = ("keys", "samples", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.samples: list[Any] = []
        self.keys: list[RestoreKey] = []


class _GroupCursor(Cursor[list[Any]]):
    def __init__(self, spec: GroupLists, inner: Cursor[Any]) -> None:
        self._spec = spec
        self._inner = inner
        self._run = FunctionRun(spec.criterion)
        self._buckets: dict[Hashable, _Bucket] = {}

    def __next__(self) -> list[Any]:
        for sample in self._inner:
            found = self._run.call(self._inner.key, sample)
            if found is SKIPPED:
                continue
            bucket = self._put(found, sample, self._inner.key)
            if len(bucket.samples) == bucket.size:
                return self._give(found[0])
        if self._spec.drop_last or not self._buckets:
            self._buckets.clear()
            raise StopIteration
        return self._give(next(iter(self._buckets)))

    def _put(self, found: Any, sample: Any, key: RestoreKey) -> _Bucket:
        group, size = self._checked(found)
        bucket = self._buckets.get(group)
        if bucket is None:
            bucket = self._buckets[group] = _Bucket(size)
        elif bucket.size != size:
            raise FatalSampleError(
                f"{self._spec.criterion.where} gives batch size {size} for group {group!r}, "
                f"and gave {bucket.size} before; a group has one batch size"
            )
        bucket.samples.append(sample)
        bucket.keys.append(key)
        return bucket

    def _checked(self, found: Any) -> tuple[Hashable, int]:
        fixed = self._spec.batch_size
        if not isinstance(found, tuple) or len(found) != 2:
            raise FatalSampleError(
                f"{self._spec.criterion.where} gave {found!r}; "
                "return (group key, batch size or None)"
            )
        group, own = found
        size = fixed if own is None else own
        if size is None or (own is not None and fixed is not None):
            raise FatalSampleError(
                f"{self._spec.criterion.where} gave batch size {own} for group {group!r} while "
                f"batch_size={fixed}; exactly one of the two must be None"
            )
        return group, check_batch_size(size)

    def _give(self, group: Hashable) -> list[Any]:
        bucket = self._buckets.pop(group)
        self.key = ("batch", current_context().batch_index, *bucket.keys)
        return bucket.samples

    def snapshot(self) -> Snapshot:
        held = tuple(tuple(bucket.keys) for bucket in self._buckets.values())
        return Snapshot("group_batch", {"held": held}, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("group_batch", 1)
        held = snapshot.field("held")
        if not isinstance(held, tuple):
            raise StateError(f"'held' of the checkpoint's group_batch is {held!r}, not a list")
        self._inner.restore(snapshot.inner[0])
        self._buckets = {}
        again = Again(self._spec.dataset.restore_sample, held)
        for key in (key for keys in held for key in keys):
            sample = again(key)
            self._put(self._spec.criterion.call(key, sample), sample, key)


class BatchDataset(MapDataset[T]):
    """Batches of `batch_size` samples that follow each other.

    State, Length, Keys: those of `BatchLists`.

    Args:
        dataset: the samples.
        batch_size: samples of a batch.
        batcher: makes a batch of a list of samples.
        batcher_stateless: whether its result depends on the samples only; None to see whether
            `@stateless` marks it.
        batcher_config: as `map_fn_config` of `MapDataset`.
        drop_last: whether a last batch that is not full is left out.
        failure_tolerance: failures in a row that end the run; 0 for any number.
        worker_config: by default that of the dataset.
    """

    config_name: ClassVar[str] = "batcher_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        batch_size: int,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        batcher_stateless: bool | None = None,
        batcher_config: FunctionConfig = None,
        drop_last: bool = False,
        failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(
            BatchLists(dataset, batch_size, drop_last),
            batcher,
            stateless_map_fn=batcher_stateless,
            map_fn_config=batcher_config,
            failure_tolerance=failure_tolerance,
            worker_config=worker_config,
        )


class GroupBatchDataset(MapDataset[T]):
    """Batches of samples of one group.

    State, Length, Keys: those of `GroupLists`.

    Args:
        dataset: the samples; must be replayable.
        fixed_batch_size: samples of a batch; None if `sample_group_key` gives them.
        sample_group_key: gives (group, batch size or None) for a sample.
        batcher: makes a batch of a list of samples; no generator function.
        batcher_stateless: as in `BatchDataset`.
        batcher_config: as `map_fn_config` of `MapDataset`.
        drop_last: whether groups that are not full at the end are left out.
        failure_tolerance: failures in a row that end the run, of either function; 0 for any number.
        worker_config: by default that of the dataset.
    """

    config_name: ClassVar[str] = "batcher_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        fixed_batch_size: int | None,
        sample_group_key: GroupKey | UserFunction,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        batcher_stateless: bool | None = None,
        batcher_config: FunctionConfig = None,
        drop_last: bool = False,
        failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        if not isinstance(sample_group_key, UserFunction):
            sample_group_key = as_user_function(
                sample_group_key,
                "batch_group_criterion",
                worker_config or dataset.worker_config,
                failure_tolerance=failure_tolerance,
            )
        super().__init__(
            GroupLists(dataset, sample_group_key, fixed_batch_size, drop_last),
            batcher,
            stateless_map_fn=batcher_stateless,
            map_fn_config=batcher_config,
            failure_tolerance=failure_tolerance,
            worker_config=worker_config,
        )
        if self.function.is_generator:
            raise ValueError(f"{self.function.where} is a generator; with groups `batch` must not")
