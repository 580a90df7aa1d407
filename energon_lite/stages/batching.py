"""Several samples in one item: fixed batches, and batches of one group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, TypeVar

from energon_lite.batching.one_by_one import GroupCollector
from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import (
    DEFAULT_FAILURE_TOLERANCE,
    SKIPPED,
    FunctionRun,
    UserFunction,
)
from energon_lite.stages.collect import CollectCursor, CollectDataset, ListDataset, Unit, UnitsOf
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


class BatchLists(ListDataset[list[Any]]):
    """Lists of `batch_size` samples that follow each other.

    State: none.
    Length: that below over the batch size, rounded up (down with `drop_last`).
    Keys: `("batch", slot, key, key, ...)`.
    """

    def __init__(
        self, dataset: SavableDataset[Any], batch_size: int, drop_last: bool = False
    ) -> None:
        super().__init__(dataset.nested())
        self.batch_size = check_batch_size(batch_size)
        self.drop_last = drop_last

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether the samples of a last list are dropped."""
        return dataclasses.replace(below, drops=below.drops or self.drop_last)

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return _BatchCursor(self.dataset.cursor(stream), self.batch_size, self.drop_last)

    def num_items(self, stream: Stream) -> int:
        """Counts the batches of a stream's pass."""
        num_samples = self.dataset.num_items(stream)
        whole = num_samples // self.batch_size
        return whole if self.drop_last else whole + (num_samples % self.batch_size > 0)

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of `num_items` batches, by source."""
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


class GroupLists(CollectDataset[list[Any]]):
    """Lists of samples of one group, chosen by a `GroupCollector`.

    State, Keys: those of `CollectDataset`.
    Length: as if there was one group; with several, each may end with a list that is not full.

    Args:
        dataset: the samples; they must be replayable.
        criterion: returns (group, batch size of the group or None) for a sample.
        batch_size: size of all batches; None if the criterion returns it.
        drop_last: whether lists that are not full at the end are dropped.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        criterion: UserFunction,
        batch_size: int | None,
        drop_last: bool = False,
    ) -> None:
        settings = {"batch_size": batch_size, "batch_drop_last": drop_last}
        super().__init__(dataset, "group_batch", settings, "Batches by group")
        self.criterion = criterion
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self.samples_per_list = self.batch_size or 1
        self.drop_last = drop_last

    def collector(self, stream: Stream, cursor: CollectCursor) -> GroupCollector:
        """Returns what chooses the lists of a stream."""
        return GroupCollector(self.drop_last)

    def units(self, inner: Cursor[Any]) -> UnitsOf:
        """Returns what asks the criterion for the group of a sample, and for its size."""
        run, sizes = FunctionRun(self.criterion), dict[Hashable, int]()

        def units(key: RestoreKey, sample: Any) -> Iterable[Unit]:
            found = run.call(key, sample)
            if found is SKIPPED:
                return ()
            group, size = self._checked(found)
            if sizes.setdefault(group, size) != size:
                raise FatalSampleError(
                    f"{self.criterion.where} returns batch size {size} for group {group!r}, and "
                    f"returned {sizes[group]} before; a group has one batch size"
                )
            return ((key, group, (size,)),)

        return units

    def _checked(self, found: Any) -> tuple[Hashable, int]:
        if not isinstance(found, tuple) or len(found) != 2:
            raise FatalSampleError(
                f"{self.criterion.where} returned {found!r}; return (group key, batch size or None)"
            )
        group, own = found
        size = self.batch_size if own is None else own
        if size is None or (own is not None and self.batch_size is not None):
            raise FatalSampleError(
                f"{self.criterion.where} returned batch size {own} for group {group!r} while "
                f"batch_size={self.batch_size}; exactly one of the two must be None"
            )
        return group, check_batch_size(size)

    def group_of(self, key: RestoreKey, sample: Any) -> Hashable:
        """Returns the group of a sample again, where a checkpoint could not keep it."""
        return self._checked(self.criterion.call(key, sample))[0]


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
        drop_last: whether a last batch that is not full is dropped.
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
        fixed_batch_size: samples of a batch; None if `sample_group_key` returns their number.
        sample_group_key: returns (group, batch size or None) for a sample.
        batcher: makes a batch of a list of samples; no generator function.
        batcher_stateless: as in `BatchDataset`.
        batcher_config: as `map_fn_config` of `MapDataset`.
        drop_last: whether groups that are not full at the end are dropped.
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
