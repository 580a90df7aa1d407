"""Where a pass ends: virtual epochs and limits.

At the top of a pipeline both end a pass in the *loader*, after so many items of its rank; what a
stream holds stays as it is, so that the order does not depend on the number of ranks. Below a
blend, a concatenation or a batch, no loader sees them: there each stream gets its part of the
items, and the world size of the `WorkerConfig` they were built with counts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import StateError
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.stages.concat import RepeatDataset

T = TypeVar("T")


class _PassEnd(Stage[T]):
    goes_on = True

    def __init__(
        self, dataset: SavableDataset[T], length: int, worker_config: WorkerConfig | None = None
    ) -> None:
        super().__init__(dataset)
        self.worker_config = worker_config or self.worker_config
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        if dataset.pass_length is not None:
            raise ValueError("The pass is ended below already; give one virtual epoch or limit.")
        self.length = length

    def own_traits(self, below: Traits) -> Traits:
        """Adds the end of passes."""
        return dataclasses.replace(below, pass_length=self.length, ordering=True)

    def nested(self) -> SavableDataset[T]:
        """Returns the stretches of the dataset below that each stream gives in its passes."""
        ranks = self.worker_config.world_size if self.worker_config else 1
        return StretchDataset(self.dataset.nested(), self.length * ranks, self.goes_on)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns the cursor of the dataset below."""
        cursor: Cursor[T] = self.dataset.cursor(stream)
        return cursor

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """As below: a length changes no stream, so a run may go on with another."""
        return self.dataset.config()


class EpochizeDataset(_PassEnd[T]):
    """Ends each pass after `length` items per rank; the next pass goes on from there.

    State: none; the loader's state has the place in the virtual epoch.
    Length: `length`.
    Keys: as below.

    Args:
        dataset: the items.
        length: items of each rank in a pass.
        worker_config: by default that of the dataset.
    """

    def own_traits(self, below: Traits) -> Traits:
        """Adds that the next pass continues."""
        return dataclasses.replace(super().own_traits(below), training=True)


class LimitDataset(_PassEnd[T]):
    """Ends each pass after at most `length` items per rank.

    State: none.
    Length: at most `length`.
    Keys: as below.

    Args:
        dataset: the items.
        length: items of each rank in a pass.
        reset_after_epoch: accepted for Energon's signature; a validation pass always starts anew.
        worker_config: by default that of the dataset.
    """

    goes_on = False

    def __init__(
        self,
        dataset: SavableDataset[T],
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        del reset_after_epoch
        super().__init__(dataset, length, worker_config=worker_config)


class StretchDataset(Stage[T]):
    """Passes of so many items over all streams.

    Each is the start of a pass below, or the next stretch of what never ends.

    State: items given in this pass, and the place below.
    Length: a stream's part of `total`.
    Keys: as below.

    Args:
        dataset: the items.
        total: items of a pass over all streams.
        goes_on: whether a pass goes on where the last one ended, also over finite data.
    """

    def __init__(self, dataset: SavableDataset[T], total: int, goes_on: bool) -> None:
        if goes_on and not dataset.endless:
            dataset = RepeatDataset(dataset)
        super().__init__(dataset)
        self.total = total

    def own_traits(self, below: Traits) -> Traits:
        """Never endless: that is the point of it."""
        return dataclasses.replace(below, endless=False, each_once=False, ordering=True)

    def first(self, stream: Stream) -> int:
        """Counts a stream's items of earlier passes; what does not go up in streams moves on."""
        turn = stream.num_streams - 1 - stream.index
        return (stream.pass_index * self.total + turn) // stream.num_streams

    def length(self, stream: Stream) -> int:
        """Returns a stream's part of the items.

        Example:
            Of 4 items, streams 0, 1, 2 have 2 1 1 in pass 0, 1 1 2 in pass 1, 1 2 1 in pass 2.
        """
        after = replace(stream, pass_index=stream.pass_index + 1)
        return self.first(after) - self.first(stream)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _StretchCursor(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts a stream's part, or what there is below."""
        if self.dataset.endless:
            return self.length(stream)
        return min(self.length(stream), self.dataset.num_items(stream))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """Returns the items of a pass, since they decide here what a stream holds."""
        return {"stage": "stretch", "items": self.total, "of": self.dataset.config()}


class _StretchCursor(Cursor[T]):
    def __init__(self, spec: StretchDataset[T], stream: Stream) -> None:
        self._stream = stream
        self._length = spec.length(stream)
        self._given = 0
        self._longest_skip = self._to_skip = 0
        if spec.dataset.endless:
            self._longest_skip = self._to_skip = spec.first(stream)
            stream = Stream(stream.index, stream.num_streams, share=stream.share)
        self._inner: Cursor[T] = spec.dataset.cursor(stream)

    def __next__(self) -> T:
        if self._given >= self._length:
            raise StopIteration
        if self._to_skip:
            self._skip_earlier_passes()
        item = next(self._inner)
        self._given += 1
        self.key = self._inner.key
        return item

    def _skip_earlier_passes(self) -> None:
        with context_or(self._stream).uncounted():  # those passes counted it
            self._inner.skip(self._to_skip)
        self._to_skip = 0

    def snapshot(self) -> Snapshot:
        fields = {"given": self._given, "to_skip": self._to_skip}
        return Snapshot("stretch", fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("stretch", 1)
        given, to_skip = snapshot.count("given"), snapshot.count("to_skip")
        if given > self._length or to_skip > self._longest_skip:
            raise StateError(
                f"The checkpoint's stretch of {self._length} items has given={given} and "
                f"to_skip={to_skip}; it was edited or damaged."
            )
        self._inner.restore(snapshot.inner[0])
        self._given, self._to_skip = given, to_skip


def virtual_epochs(dataset: SavableDataset[Any], length: int) -> SavableDataset[Any]:
    """Wraps a dataset in an `EpochizeDataset` for a positive length; 0 is no end."""
    if length < 0:
        raise ValueError(f"virtual_epoch_length={length} is negative; 0 for no end")
    return EpochizeDataset(dataset, length) if length else dataset


def limited(dataset: SavableDataset[Any], limit: int | None) -> SavableDataset[Any]:
    """Wraps a dataset in a `LimitDataset` for a positive limit; 0 and None are no limit."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit} is negative; 0 or None for no limit")
    return LimitDataset(dataset, limit) if limit else dataset
