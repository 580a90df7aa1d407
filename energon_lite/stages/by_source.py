"""Samples in an order of several sources, under the stages that belong to their source only."""

from __future__ import annotations

from typing import Any, TypeVar

from energon_lite.core.dataset import AnyDataset, Cursor
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.stage import Stage, StageCursor
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.sources.reading import ReadCursor
from energon_lite.sources.refs import RefOrder
from energon_lite.sources.source import WebdatasetSource

T = TypeVar("T")


class GivenDataset(Stage[T]):
    """A dataset of which the one cursor is given, in place of the dataset below.

    State, Length, Keys: those of the cursor.

    Args:
        dataset: what it stands for.
        own: the cursor.
    """

    def __init__(self, dataset: AnyDataset, own: Cursor[T]) -> None:
        super().__init__(dataset)
        self.own = own

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns the cursor."""
        del stream
        return self.own


def in_order(dataset: AnyDataset, order: RefOrder, stream: Stream) -> AnyDataset:
    """Returns a pipeline of stages that work on single samples, over samples in another order."""
    if isinstance(dataset, WebdatasetSource) or not dataset.traits.per_item:
        return GivenDataset(dataset, by_source(dataset, ReadCursor(order, stream), stream))
    return dataset.with_children([in_order(dataset.children[0], order, stream)])


def by_source(dataset: AnyDataset, samples: Cursor[Any], stream: Stream) -> Cursor[Any]:
    """Returns a cursor of samples, each given to the stages that are over its source only.

    Args:
        dataset: the sources, under such stages, and stages that choose which sample is next.
        samples: the samples of the sources.
        stream: the stream.
    """
    given = GivenDataset(dataset, _GivenCursor())
    branches = _over_sources(dataset, given)
    if all(branch is given for branch in branches.values()):
        return samples
    return _BySourceCursor(given, branches, samples, stream)


def _over_sources(dataset: AnyDataset, given: AnyDataset) -> dict[str, AnyDataset]:
    """Returns the stages over each source, by its name, with `given` in its place."""
    if isinstance(dataset, WebdatasetSource):
        return {dataset.name: given}
    below = [pair for child in dataset.children for pair in _over_sources(child, given).items()]
    is_own = dataset.traits.per_item
    return {name: dataset.with_children([own]) if is_own else own for name, own in below}


class _GivenCursor(Cursor[Any]):
    """Returns the sample that it is given, once."""

    sample: Any = SKIPPED

    def __next__(self) -> Any:
        sample, self.sample = self.sample, SKIPPED
        if sample is SKIPPED:
            raise StopIteration
        return sample

    def snapshot(self) -> Snapshot:
        raise NotImplementedError("samples are given without a place")

    def restore(self, snapshot: Snapshot) -> None:
        self.snapshot()


class _BySourceCursor(StageCursor[Any]):
    """A place among samples that the stages over their source made."""

    key: RestoreKey = ()
    __next__ = Cursor.__next__

    def __init__(
        self, given: AnyDataset, branches: dict[str, Any], inner: Cursor[Any], stream: Stream
    ) -> None:
        super().__init__(given, inner)
        self._branches, self._stream = branches, stream
        self._cursors: dict[str, Cursor[Any]] = {}

    def take(self, n: int) -> tuple[list[Any] | Columns, list[RestoreKey]]:
        """Returns some of the next items; the stages get their samples in their order."""
        found, keys = self.inner.take(n)
        given, cursors, made, own_keys = self.spec.own, self._cursors, list[Any](), []
        for key, sample in zip(keys, samples_of(found), strict=True):
            cursor = cursors.get(key[0])
            if cursor is None:
                cursor = cursors[key[0]] = self._branches[key[0]].cursor(self._stream)
            given.sample, given.key = sample, key
            item = next(cursor, SKIPPED)
            if item is not SKIPPED:
                made.append(item)
                own_keys.append(cursor.key)
        self.key = own_keys[-1] if own_keys else self.key
        return made, own_keys
