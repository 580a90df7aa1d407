"""Batches of one group and of like lengths, planned by a length index before anything is read.

Axes: U units, S streams, G samples of a step, that is of a batch of each stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self

from energon_lite.batching.length_windows import number_groups, sort_places
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import TOKENS, ModalitySplit, plain
from energon_lite.batching.steps import deal, step_groups
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.topology import Stream
from energon_lite.stages.batching import check_batch_size
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.modality.shares import group_of_source
from energon_lite.stages.planned.lists import PlannedLists
from energon_lite.stages.planned.order import Refs
from energon_lite.stages.planned.reading import PlannedLengths
from energon_lite.stages.planned.window import (
    AGAIN,
    WHOLE,
    Arranged,
    LengthsOf,
    Notes,
    Planner,
    Units,
)

# Windows of the commonest group in a plan: so that those of the others are as large.
_WINDOWS_PER_PLAN = 16


class PlannedBatches(PlannedLists):
    """Lists of samples of one group and of like lengths, of which all streams have alike ones.

    Each stream makes the plan of all: samples of each group, window by window, are sorted by length
    and cut into steps (`buckets.steps.step_groups`), whose samples are dealt to the streams in
    turn; the steps of a plan are shuffled. What fills no step waits for the next plan.

    State, Length: those of `PlannedLists`.
    Keys: `("batch", slot, key, key, ...)`; that of a sample given before, which fills a list up, is
    `("given again", number, key)`.

    Args:
        dataset: the samples, measured; each stage works on single samples, or on their order.
        split: groups and windows; names the index.
        batch_size: samples of a list.
        seed: of the run.

    Raises:
        ValueError: The order is not known before reading; or `group_by="modality"`, and the index
            has tokens only.
        FileNotFoundError: A source has no such index.
    """

    kind: ClassVar[str] = "batch"

    def __init__(
        self, dataset: MeasureDataset[Any], split: ModalitySplit, batch_size: int, seed: int = 0
    ) -> None:
        self.split = split
        self.batch_size = check_batch_size(batch_size)
        self.seed = seed
        measured = PlannedLengths(
            str(split.lengths), (TOKENS,), split.group_by == "modality", _tokens_of
        )
        super().__init__(dataset, measured, is_shared=True)
        self.source_groups = [
            group_of_source(split, name) if split.follows_from_source else None
            for name in self.plannable.sources
        ]

    def own_traits(self, below: Traits) -> Traits:
        """Adds lockstep: streams share the plan."""
        return dataclasses.replace(super().own_traits(below), lockstep=True)

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns the same over another dataset."""
        (dataset,) = children
        measured: Any = dataset
        return type(self)(measured, self.split, self.batch_size, self.seed)

    def planner(self, stream: Stream) -> BatchPlanner:
        """Returns what plans a stream's lists."""
        names = list(self.plannable.sources)
        return BatchPlanner(self, names, self.lengths, stream)

    @cached_property
    def samples_per_list(self) -> float:
        """How many samples a list has."""
        return float(self.batch_size)

    @property
    def window(self) -> int:
        """Samples of each stream that are planned together."""
        return _WINDOWS_PER_PLAN * self.split.window * self.batch_size

    def config(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a list."""
        return {
            "stage": "plan_batches",
            "batch_size": self.batch_size,
            **self.split.config(),
            "groups": [plain(group) for group in self.source_groups],
            "lengths": self.digest,
            "seed_offset": self.seed,
            "of": self.dataset.config(),
        }


def _tokens_of(length: Any) -> int:
    return int(length[TOKENS] if isinstance(length, dict) else length)


class BatchPlanner(Planner):
    """Plans the lists of one stream, with those of all others.

    Args:
        spec: the settings.
        names: of the sources.
        lengths: opens their lengths.
        stream: whose lists are planned.
    """

    def __init__(
        self, spec: PlannedBatches, names: list[str], lengths: LengthsOf, stream: Stream
    ) -> None:
        super().__init__(names, lengths, spec.window, stream)
        self._split = spec.split
        self._index = str(spec.split.lengths)
        self._step_size = spec.batch_size * stream.num_streams
        self._key = key_of("planned_batches", spec.seed, stream.num_streams, stream.pass_index)
        self._source_groups = number_groups(spec.source_groups)

    def _units(
        self, refs: Refs, lengths: Int64Array, carried: Sequence[RestoreKey], notes: Notes
    ) -> Units:
        del carried  # they are whole samples, as all others
        for i in np.flatnonzero(lengths[:, 0] < 1).tolist():
            self._without_length(self._key_of(refs, i), self._index, notes)
        numbers = np.flatnonzero(lengths[:, 0] > 0)
        nothing = np.full(len(numbers), WHOLE)
        return Units(numbers, nothing, nothing, lengths[numbers])

    def _arranged(
        self, refs: Refs, units: Units, num_carried: int, number: int, is_last: bool
    ) -> Arranged:
        del num_carried
        tokens = units.lengths[:, 0]
        groups: Any = self._source_groups[refs.sources[units.refs]]
        if self._split.group_by == "modality":
            groups = (units.lengths[:, 1:] > 0).any(axis=1).astype(np.int64)
        # The last of each group fill no step; in the next plan they are the first.
        found = step_groups(
            np.arange(len(tokens)), tokens, groups,
            step_size=self._step_size, window=self._split.window, end="drop", least_windows=1,
        )  # fmt: skip
        order = self._order(tokens[found.indices[:, 0]], number)
        rows = list(found.indices[order])
        is_left = np.ones(len(tokens), dtype=bool)
        is_left[found.indices] = False
        waiting = np.flatnonzero(is_left)
        if is_last and self._split.end != "drop":
            for group in np.unique(groups[waiting]).tolist():
                rest = waiting[groups[waiting] == group]
                if self._split.end == "pad":
                    own = np.flatnonzero(groups == group)
                    units, again = _given_again(units, own, self._step_size - len(rest))
                    rest = np.concatenate([rest, again])
                rows.append(rest[sort_places(-units.lengths[rest, 0])])
            waiting = waiting[:0]
        lists = list(self._dealt(rows))
        offsets = np.cumsum([0, *map(len, lists)]).astype(np.int64)
        packs = Lists(np.concatenate([waiting[:0], *lists]), offsets)
        sizes = np.array([len(row) for row in rows], dtype=np.int64)
        num_lists = (sizes[:, None] > np.arange(self._stream.num_streams)).sum(axis=0)
        return Arranged(units, packs, np.zeros(len(packs)), waiting, num_lists)

    def _order(self, longest: Int64Array, number: int) -> list[int]:
        """Returns an order of steps: at random, or for the first plan from long to short."""
        if self._split.longest_first and not number:
            order: list[int] = np.argsort(-longest, kind="stable").tolist()
            return order
        words = random_words(self._key, number, size=len(longest))
        shuffled: list[int] = np.argsort(words, kind="stable").tolist()
        return shuffled

    def _dealt(self, rows: list[Int64Array]) -> Iterator[Int64Array]:
        """Yields this stream's part of each step: every S-th, so that all have like lengths."""
        for row in rows:
            own = deal(row, self._stream.index, self._stream.num_streams)
            if len(own):
                yield own


def _given_again(units: Units, own: Int64Array, num: int) -> tuple[Units, Int64Array]:
    """Adds repetitions of a group's units, in turn from the first on; gives their numbers, too."""
    which = np.resize(own, num)
    added = Units(units.refs[which], np.full(num, AGAIN), np.arange(num), units.lengths[which])
    joined = Units(*(np.concatenate(pair) for pair in zip(units, added, strict=True)))
    return joined, len(units.refs) + np.arange(num)
