"""Batches of samples of like lengths, as large as a budget of padded tokens allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from energon_lite.batching.key_rows import KEY_COLUMNS, HeldFields, KeyTable, Window, compact
from energon_lite.batching.length_windows import aligned, cut_window
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Buckets
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.keys import leaves
from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import (
    DEFAULT_FAILURE_TOLERANCE,
    SKIPPED,
    UserFunction,
)
from energon_lite.stages.batching import check_batch_size
from energon_lite.stages.collect import ListDataset, check_replayable
from energon_lite.stages.grouping import Grouping
from energon_lite.stages.map import FunctionConfig, MapDataset, as_user_function
from energon_lite.stages.measuring import MeasureCursor, MeasureDataset, tokens_of
from energon_lite.stages.overlong import left_out, name_of

T = TypeVar("T")

# Samples of lists, where a checkpoint says how many they were.
_LARGEST_WINDOW = 1_000_000


class BucketLists(ListDataset[list[Any]]):
    """Lists of samples of like lengths, of one group each.

    Each stream by itself reads a window of samples, sorts it, and cuts it into lists. While it
    gives these, it reads the next window, by as many samples as it gives; what makes no full list
    goes there, too.

    State: restore keys of the samples held, in lists to come or, with lengths, in the next window.
        After a resume a sample is made again when it leaves.
    Length: that below over the batch size, rounded up; with a budget at most that below.
    Keys: `("batch", slot, key, key, ...)`.

    Args:
        dataset: the samples, measured; they must be replayable, as those held are saved as keys.
        buckets: how large lists are.
        batch_size: samples of a list at most; needed if `buckets` does not say more.
        drop_last: whether what makes no full list at the end of the data is left out, counted.
        seed: of the run.

    Raises:
        ValueError: Nothing says how large a list is; or samples cannot be made again.
    """

    def __init__(
        self,
        dataset: MeasureDataset[Any],
        buckets: Buckets,
        batch_size: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset.nested())
        self.holds_back = True
        check_replayable(dataset, "Batches of like lengths")
        if batch_size is None and not buckets.has_budget:
            raise ValueError(
                "batch_size=None, and Buckets has neither max_tokens nor batch_size_fn; give one"
            )
        self.buckets = buckets
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self.drop_last = drop_last
        self.seed = seed
        self.length_function = dataset.function
        self.grouping = Grouping(buckets.group_by, seed, self.worker_config)
        self.group_function = self.grouping.function

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        inner: Any = self.dataset.cursor(stream)
        # The same in all streams: where their windows have equally many lists, as with a fixed
        # number of samples, ranks get lists of like lengths at the same step.
        seed = key_of("bucket_batches", self.seed, stream.num_streams, stream.pass_index)
        return _BucketCursor(self, inner, seed)

    def num_items(self, stream: Stream) -> int:
        """Counts lists of the fixed size; with a budget the samples."""
        num_samples = self.dataset.num_items(stream)
        return -(-num_samples // self._samples_per_item)

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of so many lists, of the fixed size if there is one."""
        return self.dataset.expected(num_items * self._samples_per_item)

    @property
    def _samples_per_item(self) -> int:
        return 1 if self.buckets.has_budget else self.batch_size or 1

    def config(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a list."""
        buckets = self.buckets
        return {
            "stage": "bucket_batch",
            "max_tokens": buckets.max_tokens,
            "batch_size_fn": "function" if buckets.batch_size_fn else None,
            "batch_size": self.batch_size,
            "window": buckets.window,
            "group_by": self.grouping.name,
            "align": buckets.align,
            "overlong": buckets.overlong,
            "longest_first": buckets.longest_first,
            "batch_drop_last": self.drop_last,
            "seed_offset": self.seed,
            "of": self.dataset.config(),
        }


class _BucketCursor(Cursor[list[Any]]):
    def __init__(self, spec: BucketLists, inner: MeasureCursor[Any], seed: int) -> None:
        self._spec = spec
        self._inner = inner
        self._seed = seed
        self._group_of = spec.grouping.run()
        self._has_one_group = spec.grouping.group_by is None
        self._longest = spec.buckets.longest
        self._is_overlong: dict[int, bool] = {}
        self._table = KeyTable()
        self._again = Again(spec.restore_member)
        # Lists to come: from `_place` on, in the order in which they are given.
        self._rows = compact(np.zeros((0, KEY_COLUMNS), np.int64))
        self._samples: list[Any] = []
        self._edges = np.zeros(1, np.int64)
        self._place = 0
        # The window after that.
        self._window = Window()
        self._num_read = 0
        self._num_windows = 0
        self._has_ended = False

    def __next__(self) -> list[Any]:
        """Returns the samples of the next batch."""
        while self._place == len(self._edges) - 1:
            self._read(self._spec.buckets.window)
            if not len(self._window):
                raise StopIteration
            self._cut()
        start, stop = self._edges[self._place : self._place + 2].tolist()
        # By the end of this window, the next one has been read.
        self._read(self._spec.buckets.window * stop // int(self._edges[-1]))
        keys = self._table.release(self._rows[start:stop])
        samples = self._samples[start:stop]
        self._samples[start:stop] = [SKIPPED] * (stop - start)  # free them
        self._place += 1
        self.key = ("batch", current_context().batch_index, *keys)
        again = self._again
        return [
            again(key) if sample is SKIPPED else sample
            for key, sample in zip(keys, samples, strict=True)
        ]

    def _read(self, num: int) -> None:
        """Reads until there are `num` samples of the next window, besides those carried over."""
        inner, window = self._inner, self._window
        while self._num_read < num and not self._has_ended:
            try:
                sample = next(inner)
            except StopIteration:
                self._has_ended = True
                return
            key = inner.key
            length = inner.length if type(inner.length) is int else self._tokens(inner.length)
            if length < 1:
                raise FatalSampleError.from_sample_key(
                    name_of(key, sample),
                    f"sample_length gave {length}; a sample in a batch has at least 1 token. Raise "
                    "SkipSample in encode_sample for empty samples",
                )
            if length > self._longest and self._is_left_out(key, sample, length):
                continue
            group = None if self._has_one_group else self._group_of(key, sample)
            if group is not SKIPPED:
                window.add(self._table.row(key), length, group, sample)
                self._num_read += 1

    def _tokens(self, length: Any) -> int:
        return tokens_of(length, self._spec.length_function)

    def _is_left_out(self, key: RestoreKey, sample: Any, length: int) -> bool:
        """Whether a sample is too long and dropped; counts and refuses such, as asked."""
        buckets = self._spec.buckets
        is_overlong = self._is_overlong.get(length)
        if is_overlong is None:
            is_overlong = bool(buckets.too_long(np.array([[length]]))[0])
            self._is_overlong[length] = is_overlong
        if not is_overlong:
            return False
        padded = f", padded to a multiple of {buckets.align}" if buckets.align > 1 else ""
        limit = f"max_tokens={buckets.max_tokens}" if buckets.max_tokens else "what batch_size_fn"
        limit += " allows" * (buckets.max_tokens is None)
        why = f"its length of {length}{padded} is above {limit}"
        if buckets.overlong == "error":
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"{why}. Shorten it in encode_sample, raise the limit, or set "
                'Buckets(overlong="drop" or "alone")',
            )
        if buckets.overlong == "drop":
            left_out(key, sample, f"too long for a batch: {why}", "batch")
            return True
        current_context().cost(next(leaves(key))[0]).overlong += 1
        return False

    def _cut(self) -> None:
        """Cuts what was read into lists, and begins the next window with what is left over."""
        spec, window = self._spec, self._window
        rows = window.rows()
        lengths = rows[:, KEY_COLUMNS]
        limits = np.maximum(spec.buckets.list_sizes(lengths, spec.batch_size), 1)
        cut = cut_window(
            lengths,
            limits,
            rows[:, -1] if len(window.groups) > 1 else None,
            longest_first=self._num_windows % 2 == 0,
            is_last=self._has_ended and not spec.drop_last,
        )
        batches = cut.batches.reordered(self._order(cut.batches, lengths))
        self._rows = compact(rows[batches.indices, :KEY_COLUMNS])
        self._samples = [window.samples[i] for i in batches.indices.tolist()]
        self._edges, self._place = batches.offsets, 0
        self._window = window.carried(cut.carried)
        self._num_read = 0
        self._num_windows += 1
        if self._has_ended and len(self._window):
            left = self._window
            keys = self._table.release(left.rows()[:, :KEY_COLUMNS])
            for key, sample in zip(keys, left.samples, strict=True):
                left_out(key, sample, "makes no full batch at the end of the data", "batch")
            self._window = Window()

    def _order(self, batches: Lists, lengths: Any) -> Any:
        """Returns an order of batches that is drawn anew for each window."""
        num = len(batches)
        words = random_words(self._seed, self._num_windows, size=num)
        order = np.argsort(words, kind="stable")
        if self._spec.buckets.longest_first and self._num_windows == 0 and num:
            longest = np.maximum.reduceat(lengths[batches.indices], batches.offsets[:-1])
            areas = aligned(longest, self._spec.buckets.align) * np.diff(batches.offsets)
            place = int(np.lexsort((longest, areas))[-1])
            order = np.concatenate([[place], order[order != place]])
        return order

    def snapshot(self) -> Snapshot:
        """Returns what is held, and the place below."""
        given = int(self._edges[self._place])
        fields: Any = HeldFields(
            {
                "windows": self._num_windows,
                "read": self._num_read,
                "size": int(self._edges[-1]) if self._place < len(self._edges) - 1 else 0,
                "ended": int(self._has_ended),
            },
            self._table.frozen(),
            self._rows[given:],
            self._edges[self._place :] - given,
            compact(self._window.rows()),
            tuple(self._window.groups),
        )
        return Snapshot("bucket_batch", fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot."""
        snapshot.expect("bucket_batch", 1)
        counts = [snapshot.count(name) for name in ("windows", "read", "size", "ended")]
        num_windows, num_read, size, has_ended = counts
        table, window = KeyTable(), Window()
        try:
            # Where sources are gone, lists may have become empty.
            lists = [keys for keys in snapshot.field("held") if keys]
            rows = [table.row(_checked(key)) for keys in lists for key in keys]
            for group, keys, lengths in snapshot.field("groups"):
                for key, (length,) in zip(keys, lengths, strict=True):
                    window.add(table.row(_checked(key)), _positive(length), group, SKIPPED)
            if not len(rows) <= size <= _LARGEST_WINDOW + 10 * self._spec.buckets.window:
                raise ValueError(f"{len(rows)} samples of lists are held, of {size}")
        except (TypeError, ValueError, OverflowError) as error:
            raise StateError(
                f"The checkpoint's stage 'bucket_batch' is damaged: {error}"
            ) from error
        self._inner.restore(snapshot.inner[0])
        ends = np.cumsum([len(keys) for keys in lists], dtype=np.int64)
        # What was given of the window is not there any more, but counts for the pace of reading.
        given = size - len(rows)
        self._table, self._window = table, window
        held = (*lists, *(keys for _, keys, _ in snapshot.field("groups")))
        self._again = Again(self._spec.restore_member, held)
        none = (0,) * KEY_COLUMNS
        self._rows = compact(np.array([none] * given + rows, np.int64).reshape(-1, KEY_COLUMNS))
        self._samples = [SKIPPED] * size
        self._edges = np.concatenate([[given], given + ends]).astype(np.int64)
        self._place = 0
        self._num_windows, self._num_read = num_windows, num_read
        self._has_ended = bool(has_ended)


def _checked(key: Any) -> RestoreKey:
    if not isinstance(key, tuple) or not key:
        raise ValueError(f"{key!r:.80} is no restore key")
    return key


def _positive(length: Any) -> int:
    if int(length) < 1:
        raise ValueError(f"{length!r} is no length")
    return int(length)


class BucketBatchDataset(MapDataset[T]):
    """Batches of samples of like lengths, of one group each.

    State, Length, Keys: those of `BucketLists`.

    Args:
        dataset: the samples; must be replayable, as a window of them is held.
        buckets: how large batches are.
        batcher: makes a batch of a list of samples.
        sample_length: gives a sample's tokens, or a dict of lengths with an entry "tokens".
        batch_size: samples of a batch at most; needed if `buckets` does not say more.
        batcher_stateless: as in `BatchDataset`.
        batcher_config: as `map_fn_config` of `MapDataset`.
        drop_last: whether what makes no full batch at the end of the data is left out, counted.
        failure_tolerance: failures in a row that end the run; 0 for any number.
        worker_config: by default that of the dataset.

    Raises:
        ValueError: Nothing says how large a batch is; or samples cannot be made again.
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
        seed = config.seed_offset if config else 0
        measured = MeasureDataset(dataset, length, buckets)
        super().__init__(
            BucketLists(measured, buckets, batch_size, drop_last, seed),
            batcher,
            stateless_map_fn=batcher_stateless,
            map_fn_config=batcher_config,
            failure_tolerance=failure_tolerance,
            worker_config=config,
        )
