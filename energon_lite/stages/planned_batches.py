"""Batches of one group and of similar lengths, planned by a length index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from typing_extensions import Self

from energon_lite.batching.modality_steps import ModalitySteps
from energon_lite.batching.rules import ModalitySplit, plain
from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON
from energon_lite.core.topology import Stream
from energon_lite.stages.batching import check_batch_size
from energon_lite.stages.group_shares import group_of_source
from energon_lite.stages.planned import PlannedDataset
from energon_lite.stages.token_lengths import MeasureDataset

# Windows of the commonest group in a plan: so that those of the others are as large.
_WINDOWS_PER_PLAN = 16


class PlannedBatches(PlannedDataset):
    """Single-group batches of similar length, planned jointly for all streams.

    State, Length: those of `PlannedDataset`.
    Keys: `("batch", slot, key, key, ...)`; that of a repeated sample, which fills a list up, is
    `("repeated", number, key)`.

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

    def __init__(
        self, dataset: MeasureDataset[Any], split: ModalitySplit, batch_size: int, seed: int = 0
    ) -> None:
        self.split = split
        self.batch_size = check_batch_size(batch_size)
        self.seed = seed
        super().__init__(dataset, "plan_batches", split, is_shared=True)
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

    def collector(self, stream: Stream) -> ModalitySteps:
        """Returns what chooses the lists of a stream."""
        num_streams = stream.num_streams
        window = _WINDOWS_PER_PLAN * self.split.window * self.batch_size * num_streams
        key = key_of("planned_batches", self.seed, num_streams, stream.pass_index)
        return ModalitySteps(self.split, self.batch_size, window, stream.index, num_streams, key)

    @cached_property
    def samples_per_list(self) -> float:
        """How many samples a list has."""
        return float(self.batch_size)

    def own_settings(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a list."""
        return {
            "batch_size": self.batch_size,
            **self.split.config(),
            "groups": [plain(group) for group in self.source_groups],
            "seed_offset": self.seed,
        }
