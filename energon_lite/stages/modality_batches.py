"""Batches of one group, such as a modality, that is the same on all ranks at the same step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from typing_extensions import Unpack

from energon_lite.batching.modality import Groups, ModalityCollector
from energon_lite.batching.modality_steps import ModalitySteps
from energon_lite.batching.rules import ModalitySplit, is_group, plain
from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction
from energon_lite.stages.batching import (
    BatcherDataset,
    BatcherKeywords,
    check_batch_size,
    function_of,
)
from energon_lite.stages.blend import BlendDataset
from energon_lite.stages.collect import CollectCursor, name_of
from energon_lite.stages.planned import PlannedDataset
from energon_lite.stages.token_lengths import MeasureDataset, MeasuredLists

T = TypeVar("T")

# Windows of the commonest group in a plan: so that those of the others are as large.
_WINDOWS_PER_PLAN = 16


class ModalityLists(MeasuredLists):
    """Lists of samples of one group and of similar lengths, chosen by a `ModalityCollector`.

    The group is a function of the cycle. A list that a batch function fails on is replaced by
    another one of the same group.

    State, Keys: those of `CollectDataset`.
    Length: that below over the batch size, and one for the rest of each group if that is kept.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        split: the groups, their shares and windows.
        batch_size: samples of a list.

    Raises:
        ValueError: There are no shares, or they do not fit the sources, which are named.
    """

    name, what = "modality_batch", "Batches of one group"

    def __init__(self, dataset: MeasureDataset[Any], split: ModalitySplit, batch_size: int) -> None:
        self.split = split
        self.batch_size = self.samples_per_list = check_batch_size(batch_size)
        found = dict(split.shares) if split.shares is not None else shares_of(dataset, split)
        # In an order that does not depend on how the dict was written.
        names = sorted(found, key=repr)
        self.groups = Groups(names, [float(found[group]) for group in names])
        super().__init__(dataset, split)
        self.groups_from_start, self.most_groups = range(len(names)), len(names)
        self.drops_lists = split.end == "drop"
        check_sources(dataset, split, names)
        self._numbers = {group: number for number, group in enumerate(names)}
        if isinstance(split.group_by, Mapping):
            own = self._numbers
            self._numbers = {n: own[group] for n, group in split.group_by.items() if group in own}

    def own_settings(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a list."""
        return {
            **super().own_settings(),
            "batch_size": self.batch_size,
            "groups": [plain(group) for group in self.groups.names],
            "shares": None if self.split.shares is None else list(self.groups.shares),
            **self.split.config(),
            "seed_offset": self.run_seed,
        }

    def own_traits(self, below: Traits) -> Traits:
        """Adds lockstep: ranks share the cycles."""
        return dataclasses.replace(super().own_traits(below), lockstep=True)

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Any:
        """Returns this stage over other samples, with their shares."""
        (dataset,) = children
        measured: Any = dataset
        return type(self)(measured, self.split, self.batch_size)

    def collector(self, stream: Stream, cursor: CollectCursor) -> ModalityCollector:
        """Returns what chooses the lists of a stream."""
        return ModalityCollector(
            self.split, self.groups, self.batch_size, self.run_seed, stream, is_endless=self.endless
        )

    def group_number(self, key: RestoreKey, sample: Any, group: Any) -> int:
        """Returns the number of a group, of those that have a share."""
        number = self._numbers.get(group)
        if number is None:
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"group_by returned {group!r:.80}, which shares does not have; it has "
                f"{', '.join(map(repr, self.groups.names))}. Add the group and its part of the "
                "batches, or raise SkipSample for such samples",
            )
        return number


class PlannedBatches(PlannedDataset):
    """Single-group batches of similar length, planned jointly for all streams.

    State, Length: those of `PlannedDataset`.
    Keys: `("batch", slot, key, key, ...)`; that of a repeated sample, which fills a list up, is
    `("repeated", number, key)`.

    Args:
        dataset: the samples, measured; each stage works on single samples, or on their order.
        split: groups and windows; names the index.
        batch_size: samples of a list.

    Raises:
        ValueError: The order is not known before reading; or `group_by="modality"`, and the index
            has tokens only.
        FileNotFoundError: A source has no such index.
    """

    name = "plan_batches"

    def __init__(self, dataset: MeasureDataset[Any], split: ModalitySplit, batch_size: int) -> None:
        self.split = split
        self.batch_size = check_batch_size(batch_size)
        super().__init__(dataset, split, is_shared=True)

    def set_order(self) -> None:
        """Looks at the datasets below, and at the groups of their sources."""
        super().set_order()
        split = self.split
        self.source_groups = [
            group_of_source(split, name) if split.follows_from_source else None
            for name in self.webdatasets
        ]

    def own_traits(self, below: Traits) -> Traits:
        """Adds lockstep: streams share the plan."""
        return dataclasses.replace(super().own_traits(below), lockstep=True)

    def collector(self, stream: Stream) -> ModalitySteps:
        """Returns what chooses the lists of a stream."""
        num_streams = stream.num_streams
        window = _WINDOWS_PER_PLAN * self.split.window * self.batch_size * num_streams
        key = key_of("planned_batches", self.run_seed, num_streams, stream.pass_index)
        return ModalitySteps(self.split, self.batch_size, window, stream.index, num_streams, key)

    @property
    def samples_per_list(self) -> float:
        """The number of samples of a list."""
        return float(self.batch_size)

    def own_settings(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a list."""
        return {
            "batch_size": self.batch_size,
            **self.split.config(),
            "groups": [plain(group) for group in self.source_groups],
            "seed_offset": self.run_seed,
            **super().own_settings(),
        }


class SplitModalityBatchDataset(BatcherDataset[T]):
    """Batches of samples of one group, the same group on all ranks at the same step.

    The world size must divide the number of streams; the loader refuses others.

    State, Length, Keys: those of `ModalityLists`; with `lengths`, of `PlannedBatches`.

    Args:
        dataset: the encoded samples; must be replayable, but with `lengths`. Measured ones are
            taken as they are.
        split: the groups, their shares and windows.
        batch_size: samples of a batch.
        batcher: makes a batch of a list of samples; no generator function.
        sample_length: returns a sample's tokens, or a dict with an entry "tokens".
        keywords: see `BatcherKeywords`.

    Raises:
        TypeError: `split` is no `ModalitySplit`, or there is no `sample_length`.
        ValueError: A setting is out of range, or something below cannot be run again.
    """

    stays_one = "a batch of one group must stay one batch, or ranks come out of step"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        split: ModalitySplit,
        batch_size: int,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        sample_length: Callable[[Any], Any] | UserFunction | None = None,
        **keywords: Unpack[BatcherKeywords],
    ) -> None:
        if not isinstance(split, ModalitySplit):
            raise TypeError(f"split={split!r:.80} must be a ModalitySplit(group_by, shares=...)")
        if sample_length is not None:
            length = function_of(dataset, sample_length, "sample_length", keywords)
            dataset = MeasureDataset(dataset, length, None, keywords.get("worker_config"))
        elif not isinstance(dataset, MeasureDataset):
            raise TypeError(
                "windows are sorted by length: pass sample_length, a function that returns a "
                "sample's tokens"
            )
        lists = ModalityLists if split.lengths is None else PlannedBatches
        super().__init__(lists(dataset, split, batch_size), batcher, **keywords)


def shares_of(dataset: SavableDataset[Any], split: ModalitySplit) -> dict[Any, float]:
    """Adds up the weights of a blend by group.

    Raises:
        ValueError: They are not known, or change.
    """
    way_out = "Give ModalitySplit the parts of the batches, as shares={group: part, ...}"
    if dataset.traits.unit == "tokens":
        raise ValueError(
            "the blend's weights are shares of tokens, and batches are of samples: how many "
            f"samples a group has is not known before they are read. {way_out}"
        )
    if _has_schedule(dataset):
        raise ValueError(
            "a weight of the blend follows a schedule, and which group a step has must be known "
            f"from its number alone. {way_out} that stay the same"
        )
    by_source = dataset.expected(1.0)
    found: dict[Any, float] = {}
    for facts in dataset.sources():
        if not by_source.get(facts.name):
            raise ValueError(f"the share of source {facts.name!r} is not known. {way_out}")
        group = group_of_source(split, facts.name)
        found[group] = found.get(group, 0.0) + by_source[facts.name]
    return found


def group_of_source(split: ModalitySplit, name: str) -> Any:
    """Returns the group of a source: its name, or its entry in a dict `group_by`.

    Raises:
        ValueError: The dict has no group for it, or none that a checkpoint can keep.
    """
    if not isinstance(split.group_by, Mapping):
        return name
    if name not in split.group_by:
        raise ValueError(
            f"group_by has no group for source {name!r}; it names "
            f"{', '.join(map(repr, split.group_by))}. Add {name!r}"
        )
    group = split.group_by[name]
    if not is_group(group):
        raise ValueError(
            f"group_by[{name!r}]={group!r:.80} is no group; make it a text, number, bool, None or "
            "a tuple of these"
        )
    return group


def _has_schedule(dataset: SavableDataset[Any]) -> bool:
    if isinstance(dataset, BlendDataset) and not dataset.weights.is_constant:
        return True
    return any(map(_has_schedule, dataset.children))


def check_sources(dataset: SavableDataset[Any], split: ModalitySplit, groups: list[Any]) -> None:
    """Refuses sources whose group has no share, before one of their samples is read.

    Raises:
        ValueError: There is one; names it.
    """
    if not split.follows_from_source:
        return
    for facts in dataset.sources():
        group = group_of_source(split, facts.name)
        if group not in groups:
            raise ValueError(
                f"shares has no entry for group {group!r} of source {facts.name!r}; it has "
                f"{', '.join(map(repr, groups))}. Add its part of the batches"
            )
