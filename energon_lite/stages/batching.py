"""Batches: of fixed size, of one group, and of similar lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, TypeVar

import numpy as np
from typing_extensions import TypedDict, Unpack

from energon_lite.batching.buckets import BucketCollector
from energon_lite.batching.one_by_one import GroupCollector
from energon_lite.batching.rules import Buckets, Default, group_from
from energon_lite.core.dataset import Cursor, SavableDataset, Traits, taken
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.sample_columns import samples_of
from energon_lite.core.seeds import key_of
from energon_lite.core.stage import StageCursor
from energon_lite.core.state import JSON, RestoreKey
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
from energon_lite.stages.token_lengths import MeasureDataset, MeasuredLists

T = TypeVar("T")


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

    Args:
        dataset: the samples.
        batch_size: how many make a list.
        drop_last: whether a last list that is not full is dropped.
        takes_columns: whether lists may be `Columns`.
    """

    name, settings = "batch", ("batch_size", "batch_drop_last")

    def __init__(
        self,
        dataset: SavableDataset[Any],
        batch_size: int,
        drop_last: bool = False,
        takes_columns: bool = False,
    ) -> None:
        super().__init__(dataset.nested())
        self.batch_size = check_batch_size(batch_size)
        self.batch_drop_last = drop_last
        self.takes_columns = takes_columns

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether the samples of a last list are dropped."""
        return dataclasses.replace(below, drops=below.drops or self.batch_drop_last)

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return _BatchCursor(self, inner)

    def num_items(self, stream: Stream) -> int:
        """Counts the batches of a stream's pass."""
        num_samples = self.dataset.num_items(stream)
        if self.endless:  # no batch is a last one
            return stream.part(num_samples / self.batch_size)
        spare = 0 if self.batch_drop_last else self.batch_size - 1
        return (num_samples + spare) // self.batch_size

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of a number of batches."""
        return self.dataset.expected(num_items * self.batch_size)


class _BatchCursor(StageCursor[list[Any]]):
    key: RestoreKey = ()

    def __next__(self) -> list[Any]:
        spec = self.spec
        samples, keys = taken(self.inner, spec.batch_size)
        own_key = ("batch", current_context().batch_index, *keys)
        if not keys or (spec.batch_drop_last and len(keys) < spec.batch_size):
            current_context().release(own_key)
            raise StopIteration
        self.key = own_key
        made: Any = samples if spec.takes_columns else samples_of(samples)
        return made  # type: ignore[no-any-return]


class GroupLists(CollectDataset[list[Any]]):
    """Lists of samples of one group, chosen by a `GroupCollector`.

    State, Keys: those of `CollectDataset`.
    Length: each sample counts as a list, as any may be the only one of its group; with `drop_last`,
        that below over the batch size.

    Args:
        dataset: the samples; they must be replayable.
        criterion: returns (group, batch size of the group or None) for a sample.
        batch_size: size of all batches; None if the criterion returns it.
        drop_last: whether lists that are not full at the end are dropped.
    """

    name, settings = "group_batch", ("batch_size", "batch_drop_last")
    what = "Batches by group"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        criterion: UserFunction,
        batch_size: int | None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset)
        self.criterion = criterion
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self.samples_per_list, self.most_groups = self.batch_size or 0, None
        self.batch_drop_last = self.drops_lists = drop_last

    def collector(self, stream: Stream, cursor: CollectCursor) -> GroupCollector:
        """Returns what chooses the lists of a stream."""
        return GroupCollector(self.batch_drop_last)

    def units(self, inner: Cursor[Any]) -> UnitsOf:
        """Returns what asks the criterion for the group of a sample, and for its size."""
        run, sizes = FunctionRun(self.criterion), dict[Hashable, int]()

        def units(key: RestoreKey, sample: Any) -> Iterable[Unit]:
            found = run.call(key, sample)
            if found is SKIPPED:
                return ()
            group, size = self._checked(found, sample)
            if sizes.setdefault(group, size) != size:
                raise FatalSampleError(
                    f"{self.criterion.where} returns batch size {size} for group {group!r}, and "
                    f"returned {sizes[group]} before; a group has one batch size"
                )
            return ((key, group, (size,)),)

        return units

    def _checked(self, found: Any, sample: Any) -> tuple[Hashable, int]:
        if not isinstance(found, tuple) or len(found) != 2:
            raise FatalSampleError(
                f"{self.criterion.where} returned {found!r:.80}; return (group, batch size or None)"
            )
        group, own = group_from(found[0], sample, self.criterion.where), found[1]
        size = self.batch_size if own is None else own
        if size is None or (own is not None and self.batch_size is not None):
            raise FatalSampleError(
                f"{self.criterion.where} returned batch size {own} for group {group!r} while "
                f"batch_size={self.batch_size}; exactly one of the two must be None"
            )
        if not isinstance(size, (int, np.integer)):
            raise FatalSampleError(
                f"{self.criterion.where} returned batch size {size!r:.80} for group {group!r}; "
                "return an integer"
            )
        return group, check_batch_size(int(size))

    def group_of(self, key: RestoreKey, sample: Any) -> Hashable:
        """Returns the group of a sample again, where a checkpoint could not keep it."""
        return self._checked(self.criterion.call(key, sample), sample)[0]


class BucketLists(MeasuredLists):
    """Lists of samples of similar lengths, chosen by a `BucketCollector`.

    State, Keys: those of `CollectDataset`.
    Length: that below over the batch size, and one for the rest of each group; with a budget, or
        groups by a function, at most that below.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        buckets: how large lists are.
        batch_size: samples of a list at most; needed if `buckets` does not say more.
        drop_last: whether samples that make no full list at the end of the data are dropped.

    Raises:
        ValueError: Nothing limits the size of a list; or samples cannot be re-created.
    """

    name, what = "bucket_batch", "Batches of similar lengths"

    def __init__(
        self,
        dataset: MeasureDataset[Any],
        buckets: Buckets,
        batch_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if batch_size is None and not buckets.has_budget:
            raise ValueError(
                "batch_size=None, and Buckets has neither max_tokens nor batch_size_fn; give one"
            )
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self.buckets = buckets
        self.joins_epochs = not isinstance(buckets.window, Default)
        self.drop_last = self.drops_lists = drop_last
        self.samples_per_list = 0 if buckets.has_budget else self.batch_size or 0
        super().__init__(dataset, buckets)

    def own_settings(self) -> dict[str, JSON]:
        """Returns what decides which samples share a list."""
        names = ("max_tokens", "window", "align", "overlong", "longest_first")
        return {
            **super().own_settings(),
            **{name: getattr(self.buckets, name) for name in names},
            "batch_size_fn": "function" if self.buckets.batch_size_fn else None,
            "batch_size": self.batch_size,
            "batch_drop_last": self.drop_last,
            "joins_epochs": self.joins_epochs,
            "seed_offset": self.run_seed,
        }

    def collector(self, stream: Stream, cursor: CollectCursor) -> BucketCollector:
        """Returns what chooses the lists of a stream."""
        # The same in all streams: where their windows have equally many lists, as with a fixed
        # number of samples, ranks get lists of similar lengths at the same step.
        drops_last = self.drop_last and not self.endless
        key = key_of("bucket_batches", self.run_seed, stream.num_streams, stream.pass_index)
        return BucketCollector(self.buckets, self.batch_size, drops_last, key)


class BatcherKeywords(TypedDict, total=False):
    """Energon's keywords for the function that makes a batch of a list of samples.

    Attributes:
        batcher_stateless: whether its result depends on the samples only; None to see whether
            `@stateless` marks it.
        batcher_config: as `map_fn_config` of `MapDataset`.
        failure_tolerance: failures in a row that end the run, also of the functions that choose
            the samples; 0 for any number.
        worker_config: has seed and error handlers; by default that of the dataset.
    """

    batcher_stateless: bool | None
    batcher_config: FunctionConfig
    failure_tolerance: int
    worker_config: WorkerConfig | None


class BatcherDataset(MapDataset[T]):
    """Makes a batch of each list of samples.

    State, Length, Keys: those of the lists.

    Args:
        lists: lists of samples.
        batcher: makes a batch of a list of samples.
        keywords: see `BatcherKeywords`.

    Raises:
        ValueError: The batcher is a generator function where a list must stay one batch.
    """

    config_name: ClassVar[str] = "batcher_config"
    stays_one: ClassVar[str] = ""

    def __init__(
        self,
        lists: SavableDataset[list[Any]],
        batcher: Callable[[list[Any]], T] | UserFunction,
        **keywords: Unpack[BatcherKeywords],
    ) -> None:
        names = {"batcher_stateless": "stateless_map_fn", "batcher_config": "map_fn_config"}
        settings: dict[str, Any] = {names.get(name, name): own for name, own in keywords.items()}
        super().__init__(lists, batcher, **settings)
        if self.stays_one and self.function.is_generator:
            raise ValueError(f"{self.function.where} is a generator; {self.stays_one}")


def function_of(
    dataset: SavableDataset[Any],
    function: Callable[[Any], Any] | UserFunction,
    name: str,
    keywords: BatcherKeywords,
) -> UserFunction:
    """Returns a function that chooses samples, with the settings of the batcher."""
    if isinstance(function, UserFunction):
        return function
    config = keywords.get("worker_config") or dataset.worker_config
    tolerance = keywords.get("failure_tolerance", DEFAULT_FAILURE_TOLERANCE)
    return as_user_function(function, name, config, failure_tolerance=tolerance)


class BatchDataset(BatcherDataset[T]):
    """Batches of `batch_size` samples that follow each other.

    State, Length, Keys: those of `BatchLists`.

    Args:
        dataset: the samples.
        batch_size: samples of a batch.
        batcher: makes a batch of a list of samples.
        drop_last: whether a last batch that is not full is dropped.
        keywords: see `BatcherKeywords`.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        batch_size: int,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        drop_last: bool = False,
        **keywords: Unpack[BatcherKeywords],
    ) -> None:
        takes_columns = isinstance(batcher, UserFunction) and batcher.takes_columns
        lists = BatchLists(dataset, batch_size, drop_last, takes_columns)
        super().__init__(lists, batcher, **keywords)


class GroupBatchDataset(BatcherDataset[T]):
    """Batches of samples of one group.

    State, Length, Keys: those of `GroupLists`.

    Args:
        dataset: the samples; must be replayable.
        fixed_batch_size: samples of a batch; None if `sample_group_key` returns it.
        sample_group_key: returns (group, batch size or None) for a sample.
        batcher: makes a batch of a list of samples; no generator function.
        drop_last: whether groups that are not full at the end are dropped.
        keywords: see `BatcherKeywords`.
    """

    stays_one = "with groups `batch` must not be"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        fixed_batch_size: int | None,
        sample_group_key: Callable[[Any], tuple[Hashable, int | None]] | UserFunction,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        drop_last: bool = False,
        **keywords: Unpack[BatcherKeywords],
    ) -> None:
        criterion = function_of(dataset, sample_group_key, "batch_group_criterion", keywords)
        lists = GroupLists(dataset, criterion, fixed_batch_size, drop_last)
        super().__init__(lists, batcher, **keywords)


class BucketBatchDataset(BatcherDataset[T]):
    """Batches of samples of similar lengths, of one group each.

    State, Length, Keys: those of `BucketLists`.

    Args:
        dataset: the samples; must be replayable, as a window of them is buffered.
        buckets: how large batches are.
        batcher: makes a batch of a list of samples.
        sample_length: returns a sample's tokens, or a dict of lengths with an entry "tokens".
        batch_size: samples of a batch at most; needed if `buckets` does not say more.
        drop_last: whether samples that make no full batch at the end of the data are dropped.
        keywords: see `BatcherKeywords`.

    Raises:
        ValueError: The size of a batch is not defined; or samples cannot be re-created.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buckets: Buckets,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        sample_length: Callable[[Any], Any] | UserFunction,
        batch_size: int | None = None,
        drop_last: bool = False,
        **keywords: Unpack[BatcherKeywords],
    ) -> None:
        length = function_of(dataset, sample_length, "sample_length", keywords)
        measured = MeasureDataset(dataset, length, buckets, keywords.get("worker_config"))
        lists = BucketLists(measured, buckets, batch_size, drop_last)
        super().__init__(lists, batcher, **keywords)
