"""Where a pass ends: virtual epochs and limits.

Both end a pass in the *loader*, after so many items of its rank; what a stream holds stays as it
is, so that the order does not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset, WrapperDataset
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.topology import Stream

T = TypeVar("T")


class _PassEnd(WrapperDataset[T]):
    def __init__(self, dataset: SavableDataset[T], length: int) -> None:
        super().__init__(dataset)
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        if dataset.pass_length is not None:
            raise ValueError("The pass is ended below already; give one virtual epoch or limit.")
        self.length = length

    @property
    def pass_length(self) -> int | None:
        """Items of a rank in a pass."""
        return self.length

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives the cursor of the dataset below."""
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
    """

    @property
    def training(self) -> bool:
        """Always: the next pass goes on."""
        return True


class LimitDataset(_PassEnd[T]):
    """Ends each pass after at most `length` items per rank.

    State: none.
    Length: at most `length`.
    Keys: as below.
    """


def limited(dataset: SavableDataset[Any], limit: int | None) -> SavableDataset[Any]:
    """Wraps a dataset in a `LimitDataset` for a positive limit; 0 and None are no limit."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit} is negative; 0 or None for no limit")
    return LimitDataset(dataset, limit) if limit else dataset
