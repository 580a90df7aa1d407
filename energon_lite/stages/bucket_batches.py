"""Batches of samples of similar lengths, as large as a budget of padded tokens allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from energon_lite.batching.buckets import BucketCollector
from energon_lite.batching.rules import Buckets
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import DEFAULT_FAILURE_TOLERANCE, UserFunction
from energon_lite.stages.batching import check_batch_size
from energon_lite.stages.collect import CollectCursor
from energon_lite.stages.map import FunctionConfig, MapDataset, as_user_function
from energon_lite.stages.token_lengths import MeasureDataset, MeasuredLists

T = TypeVar("T")


class BucketLists(MeasuredLists):
    """Lists of samples of similar lengths, chosen by a `BucketCollector`.

    State, Keys: those of `CollectDataset`.
    Length: that below over the batch size, rounded up; with a budget at most that below.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        buckets: how large lists are.
        batch_size: samples of a list at most; needed if `buckets` does not say more.
        drop_last: whether samples that make no full list at the end of the data are dropped.
        seed: of the run.

    Raises:
        ValueError: Nothing limits the size of a list; or samples cannot be re-created.
    """

    def __init__(
        self,
        dataset: MeasureDataset[Any],
        buckets: Buckets,
        batch_size: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size is None and not buckets.has_budget:
            raise ValueError(
                "batch_size=None, and Buckets has neither max_tokens nor batch_size_fn; give one"
            )
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self.buckets = buckets
        self.drop_last = drop_last
        self.samples_per_list = 1 if buckets.has_budget else self.batch_size or 1
        settings = {
            "max_tokens": buckets.max_tokens,
            "batch_size_fn": "function" if buckets.batch_size_fn else None,
            "batch_size": self.batch_size,
            "window": buckets.window,
            "align": buckets.align,
            "overlong": buckets.overlong,
            "longest_first": buckets.longest_first,
            "batch_drop_last": drop_last,
            "seed_offset": seed,
        }
        what = "Batches of similar lengths"
        super().__init__(dataset, "bucket_batch", buckets, settings, what, seed)

    def collector(self, stream: Stream, cursor: CollectCursor) -> BucketCollector:
        """Returns what chooses the lists of a stream."""
        # The same in all streams: where their windows have equally many lists, as with a fixed
        # number of samples, ranks get lists of similar lengths at the same step.
        key = key_of("bucket_batches", self.seed, stream.num_streams, stream.pass_index)
        return BucketCollector(self.buckets, self.batch_size, self.drop_last, key)


class BucketBatchDataset(MapDataset[T]):
    """Batches of samples of similar lengths, of one group each.

    State, Length, Keys: those of `BucketLists`.

    Args:
        dataset: the samples; must be replayable, as a window of them is buffered.
        buckets: how large batches are.
        batcher: makes a batch of a list of samples.
        sample_length: returns a sample's tokens, or a dict of lengths with an entry "tokens".
        batch_size: samples of a batch at most; needed if `buckets` does not say more.
        batcher_stateless: as in `BatchDataset`.
        batcher_config: as `map_fn_config` of `MapDataset`.
        drop_last: whether samples that make no full batch at the end of the data are dropped.
        failure_tolerance: failures in a row that end the run; 0 for any number.
        worker_config: by default that of the dataset.

    Raises:
        ValueError: Nothing limits the size of a batch; or samples cannot be re-created.
    """

    config_name: ClassVar[str] = "batcher_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buckets: Buckets,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        sample_length: Callable[[Any], Any] | UserFunction,
        batch_size: int | None = None,
        batcher_stateless: bool | None = None,
        batcher_config: FunctionConfig = None,
        drop_last: bool = False,
        failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        length = as_user_function(sample_length, "sample_length", config)
        measured = MeasureDataset(dataset, length, buckets)
        super().__init__(
            BucketLists(
                measured, buckets, batch_size, drop_last, config.seed_offset if config else 0
            ),
            batcher,
            stateless_map_fn=batcher_stateless,
            map_fn_config=batcher_config,
            failure_tolerance=failure_tolerance,
            worker_config=config,
        )
