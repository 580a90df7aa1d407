"""Batches of one group, such as a modality, that is the same on all ranks at the same step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from energon_lite.batching.modality import Groups, ModalityCollector
from energon_lite.batching.rules import ModalitySplit, plain
from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import DEFAULT_FAILURE_TOLERANCE, UserFunction
from energon_lite.stages.batching import check_batch_size
from energon_lite.stages.collect import CollectCursor, ListDataset, name_of
from energon_lite.stages.group_shares import check_sources, shares_of
from energon_lite.stages.map import FunctionConfig, MapDataset, as_user_function
from energon_lite.stages.planned_batches import PlannedBatches
from energon_lite.stages.token_lengths import MeasureDataset, MeasuredLists

T = TypeVar("T")


class ModalityLists(MeasuredLists):
    """Lists of samples of one group and of similar lengths, chosen by a `ModalityCollector`.

    The group is a function of the cycle. A list that a batch function fails on is replaced by
    another one of the same group.

    State, Keys: those of `CollectDataset`.
    Length: as if there was one group; with several, each may end with a list that is not full.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        split: the groups, their shares and windows.
        batch_size: samples of a list.
        seed: of the run.

    Raises:
        ValueError: There are no shares, or they do not fit the sources, which are named.
    """

    def __init__(
        self, dataset: MeasureDataset[Any], split: ModalitySplit, batch_size: int, seed: int = 0
    ) -> None:
        self.split = split
        self.batch_size = self.samples_per_list = check_batch_size(batch_size)
        found = dict(split.shares) if split.shares is not None else shares_of(dataset, split)
        # In an order that does not depend on how the dict was written.
        names = sorted(found, key=repr)
        self.groups = Groups(names, [float(found[group]) for group in names])
        settings = {
            "batch_size": batch_size,
            "groups": [plain(group) for group in names],
            "shares": None if split.shares is None else list(self.groups.shares),
            **split.config(),
            "seed_offset": seed,
        }
        super().__init__(dataset, "modality_batch", split, settings, "Batches of one group", seed)
        self.groups_from_start = range(len(names))
        check_sources(dataset, split, names)
        self._numbers = {group: number for number, group in enumerate(names)}
        if isinstance(split.group_by, Mapping):
            own = self._numbers
            self._numbers = {n: own[group] for n, group in split.group_by.items() if group in own}

    def own_traits(self, below: Traits) -> Traits:
        """Adds lockstep: ranks share the cycles."""
        return dataclasses.replace(super().own_traits(below), lockstep=True)

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Any:
        """Returns this stage over other samples, with their shares."""
        (dataset,) = children
        measured: Any = dataset
        return type(self)(measured, self.split, self.batch_size, self.seed)

    def collector(self, stream: Stream, cursor: CollectCursor) -> ModalityCollector:
        """Returns what chooses the lists of a stream."""
        return ModalityCollector(
            self.split, self.groups, self.batch_size, self.seed, stream, is_endless=self.endless
        )

    def num_items(self, stream: Stream) -> int:
        """Counts the lists as if all samples were of one group."""
        num_samples = self.dataset.num_items(stream)
        rounds_down = self.split.end == "drop"
        return num_samples // self.batch_size if rounds_down else super().num_items(stream)

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


class SplitModalityBatchDataset(MapDataset[T]):
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
        batcher_stateless: as in `BatchDataset`.
        batcher_config: as `map_fn_config` of `MapDataset`.
        failure_tolerance: failures in a row that end the run, of either function; 0 for any number.
        worker_config: by default that of the dataset.

    Raises:
        TypeError: `split` is no `ModalitySplit`, or there is no `sample_length`.
        ValueError: A setting is out of range, or something below cannot be run again.
    """

    config_name: ClassVar[str] = "batcher_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        split: ModalitySplit,
        batch_size: int,
        batcher: Callable[[list[Any]], T] | UserFunction,
        *,
        sample_length: Callable[[Any], Any] | UserFunction | None = None,
        batcher_stateless: bool | None = None,
        batcher_config: FunctionConfig = None,
        failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        if not isinstance(split, ModalitySplit):
            raise TypeError(f"split={split!r:.80} must be a ModalitySplit(group_by, shares=...)")
        if sample_length is not None:
            length = as_user_function(
                sample_length, "sample_length", config, failure_tolerance=failure_tolerance
            )
            dataset = MeasureDataset(dataset, length)
        elif not isinstance(dataset, MeasureDataset):
            raise TypeError(
                "windows are sorted by length: pass sample_length, a function that returns a "
                "sample's tokens"
            )
        seed = config.seed_offset if config else 0
        lists: ListDataset[list[Any]] = (
            ModalityLists(dataset, split, batch_size, seed)
            if split.lengths is None
            else PlannedBatches(dataset, split, batch_size, seed)
        )
        super().__init__(
            lists,
            batcher,
            stateless_map_fn=batcher_stateless,
            map_fn_config=batcher_config,
            failure_tolerance=failure_tolerance,
            worker_config=worker_config,
        )
        if self.function.is_generator:
            raise ValueError(
                f"{self.function.where} is a generator; a batch of one group must stay one batch, "
                "or ranks come out of step"
            )
