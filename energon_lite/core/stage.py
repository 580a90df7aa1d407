"""Stages: a dataset over one other, with settings and state that are declared instead of coded.

A stage is a description (`Stage`) and a place in it (`StageCursor`). Its configuration, snapshots,
the refusal of other states, replay and statistics need no code. Two examples:
docs/reference/writing_stages.md.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from typing_extensions import Self

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.state import JSON, Kind, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig

T = TypeVar("T")


class Stage(SavableDataset[T]):
    """A dataset over one other. By default it returns the items of that as they are.

    A subclass defines its items in `open`, and whatever else differs from below: `num_items`
    where items are added or dropped, `restore_sample` where items or their keys are changed,
    `own_traits` where more than the items is other than below.

    Attributes:
        name: of the stage in configurations and states; "" where it changes no item, and a run may
            resume with and without it.
        settings: names of the attributes that decide the items; a checkpoint with others is
            refused.
        dataset: the dataset below.
    """

    name: str = ""
    settings: tuple[str, ...] = ()
    dataset: SavableDataset[Any]

    def __init__(
        self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None = None
    ) -> None:
        if type(self).__iter__ is not SavableDataset.__iter__:
            raise TypeError(
                f"{type(self).__name__} defines __iter__, which no loader calls here; define "
                "open(inner, stream), which returns a cursor (docs/reference/writing_stages.md)"
            )
        self.dataset = dataset
        self.worker_config = worker_config or dataset.worker_config

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor over a fresh one of the dataset below."""
        del stream
        return inner

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return self.open(self.dataset.cursor(stream), stream)

    def own_settings(self) -> dict[str, JSON]:
        """Returns what decides the items, besides the dataset below."""
        return {setting: getattr(self, setting) for setting in self.settings}

    def config(self) -> dict[str, JSON]:
        """Returns the settings, and those of the dataset below."""
        below = self.dataset.config()
        return {"stage": self.name, **self.own_settings(), "of": below} if self.name else below

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the item of the dataset below."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def num_items(self, stream: Stream) -> int:
        """Counts as many items as below."""
        return self.dataset.num_items(stream)

    @property
    def children(self) -> tuple[SavableDataset[Any], ...]:
        """The one dataset below."""
        return (self.dataset,)

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns this dataset over another one."""
        (dataset,) = children
        other = copy.copy(self)
        other.dataset = dataset
        return other

    def nested(self) -> SavableDataset[Any]:
        """Returns this dataset as a part of another one."""
        super().nested()
        below = self.dataset.nested()
        return self if below is self.dataset else self.with_children((below,))

    def expected(self, num_items: float) -> dict[str, float]:
        """Returns those of the dataset below."""
        return self.dataset.expected(num_items)


class PerItemStage(Stage[T]):
    """A stage that makes each item of one item below, or drops it; by default it passes all on."""

    def own_traits(self, below: Traits) -> Traits:
        """Adds that lists may be planned over it."""
        return dataclasses.replace(below, per_item=True)


class StageCursor(Cursor[T]):
    """A place in a stage: the places of the cursors below and the attributes named in `saved`.

    Attributes:
        saved: the attributes that are the state, with what they are; they start at their kind's
            value, are written into snapshots, and are checked and set by `restore`.
        spec: the stage.
        cursors: the cursors below; none where their places are not saved.
        inner: the first of them.
        key: by default the restore key of the item that `inner` returned last.
    """

    saved: ClassVar[Mapping[str, Kind]] = {}
    inner: Cursor[Any]

    def __init__(self, spec: Any, *cursors: Cursor[Any]) -> None:
        self.spec = spec
        self.cursors = cursors
        if cursors:
            self.inner = cursors[0]
        self._has_fields = bool(self.saved) or type(self).fields is not StageCursor.fields
        for name, kind in self.saved.items():
            setattr(self, name, kind.start)

    @property
    def key(self) -> RestoreKey:  # type: ignore[override]
        """The restore key of the item that was returned last."""
        return self.inner.key

    def __next__(self) -> T:
        """Returns the next item below."""
        item: T = next(self.inner)
        return item

    def fields(self) -> dict[str, Any]:
        """Returns the saved attributes."""
        return {name: getattr(self, name) for name in self.saved}

    def places(self) -> Sequence[Snapshot]:
        """Returns the snapshots below that belong to the saved attributes."""
        return tuple([cursor.snapshot() for cursor in self.cursors])

    def snapshot(self) -> Snapshot:
        """Returns the saved attributes and the places below."""
        fields = self.fields() if self._has_fields else {}
        if not fields and len(self.cursors) == 1:
            return self.inner.snapshot()
        return Snapshot(self.spec.name, fields, self.places(), self.spec.labels)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot.

        Raises:
            StateError: It is of another stage, or a field is not what it was declared to be.
        """
        if not self.fields() and len(self.cursors) == 1:
            self.inner.restore(snapshot)
            return
        snapshot.expect(self.spec.name, len(self.cursors))
        self.set_fields(snapshot)
        for cursor, inner in zip(self.cursors, snapshot.below(self.spec.labels), strict=True):
            cursor.restore(inner)

    def set_fields(self, snapshot: Snapshot) -> None:
        """Sets the saved attributes, if all of them are what they were declared to be."""
        for name, value in snapshot.checked(self.saved).items():
            setattr(self, name, value)
