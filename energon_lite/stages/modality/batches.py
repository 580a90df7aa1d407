"""Batches of one group, such as a modality, that is the same on all ranks at the same step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from energon_lite.batching.group_schedule import GroupSchedule
from energon_lite.batching.rules import ModalitySplit, plain
from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.keys import GIVEN_AGAIN, whole
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import DEFAULT_FAILURE_TOLERANCE, SKIPPED, UserFunction
from energon_lite.stages.batching import check_batch_size
from energon_lite.stages.collect import ListDataset, check_replayable
from energon_lite.stages.grouping import Grouping
from energon_lite.stages.map import FunctionConfig, MapDataset, as_user_function
from energon_lite.stages.measuring import MeasureCursor, MeasureDataset, tokens_of
from energon_lite.stages.modality.planned_batches import PlannedBatches
from energon_lite.stages.modality.shares import check_sources, group_of_source, shares_of
from energon_lite.stages.modality.windows import GroupWindows, Held, SplitFields
from energon_lite.stages.overlong import left_out, name_of

T = TypeVar("T")

_STAGE = "modality_batch"


class ModalityLists(ListDataset[list[Any]]):
    """Lists of samples of one group and of like lengths; the group is a function of the cycle.

    Each stream sorts windows of each group by length, cuts them into lists and gives these in an
    order of places that is the same in all streams: at one step ranks have lists of one group and
    of like lengths. While a window is given the next one is read, so that reading is even.

    A list that a batch function fails on is replaced by another of the same group.

    State: of each group the restore keys of the samples held, and for each its length and when it
    is given. After a resume a sample is made again when it leaves.
    Length: as if there was one group; with several, each may leave a list that is not full.
    Keys: `("batch", slot, key, key, ...)`; that of a sample given before, which fills a list up, is
    `("given again", number, key)`.

    Args:
        dataset: the samples, measured; they must be replayable, as those held are saved as keys.
        split: the groups, their shares and windows.
        batch_size: samples of a list.
        seed: of the run.

    Raises:
        ValueError: There are no shares, or they do not fit the sources; says which.
    """

    def __init__(
        self, dataset: MeasureDataset[Any], split: ModalitySplit, batch_size: int, seed: int = 0
    ) -> None:
        super().__init__(dataset.nested())
        self.holds_back = True
        check_replayable(dataset, "Batches of one group")
        self.split = split
        self.batch_size = check_batch_size(batch_size)
        self.seed = seed
        found = dict(split.shares) if split.shares is not None else shares_of(self.dataset, split)
        # In an order that does not depend on how the dict was written.
        self.groups: list[Any] = sorted(found, key=repr)
        self.shares = [float(found[group]) for group in self.groups]
        self.length_function: UserFunction = dataset.function
        group_by = "source" if split.follows_from_source else split.group_by
        self.grouping = Grouping(group_by, seed, self.worker_config)
        self.group_function = self.grouping.function
        check_sources(self.dataset, split, self.groups)

    def own_traits(self, below: Traits) -> Traits:
        """Adds lockstep: ranks share the cycles."""
        return dataclasses.replace(super().own_traits(below), lockstep=True)

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Any:
        """Returns this stage over other samples, with their shares."""
        (dataset,) = children
        measured: Any = dataset
        return type(self)(measured, self.split, self.batch_size, self.seed)

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        inner: Any = self.dataset.cursor(stream)
        return _SplitCursor(self, inner, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the lists as if all samples were of one group."""
        num_samples = self.dataset.num_items(stream)
        whole = num_samples // self.batch_size
        return whole if self.split.end == "drop" else -(-num_samples // self.batch_size)

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of so many lists; what is read ahead is not among them."""
        return self.dataset.expected(num_items * self.batch_size)

    def restore_member(self, key: RestoreKey) -> Any:
        """Makes one sample of a list again."""
        return self.dataset.restore_sample(whole(key))

    def config(self) -> dict[str, JSON]:
        """Returns groups and windows, and shares where they are not those of the blend below.

        What becomes of a surplus may change in a run.
        """
        shares: JSON = None if self.split.shares is None else list(self.shares)
        return {
            "stage": _STAGE,
            "batch_size": self.batch_size,
            "groups": [plain(group) for group in self.groups],
            "shares": shares,
            **self.split.config(),
            "seed_offset": self.seed,
            "of": self.dataset.config(),
        }


class _SplitCursor(Cursor[list[Any]]):
    def __init__(self, spec: ModalityLists, inner: MeasureCursor[Any], stream: Stream) -> None:
        self._spec = spec
        self._inner = inner
        self._stream = stream
        self._schedule = GroupSchedule(spec.shares, spec.seed, stream.pass_index)
        self._limits = spec.split.surplus_limits(spec.shares, spec.batch_size)
        self._numbers = {group: number for number, group in enumerate(spec.groups)}
        self._group_of = spec.grouping.run()
        self._fills_up = spec.split.end == "pad" and not spec.endless
        self._groups = self._fresh_groups()
        self._num_again = 0
        self._has_ended = False
        self._again = Again(spec.restore_member)

    def _fresh_groups(self) -> list[GroupWindows]:
        spec, longest_first = self._spec, self._spec.split.longest_first
        # The same in all streams: so they have like lengths at the same cycle.
        seed = key_of(_STAGE, spec.seed, self._stream.num_streams, self._stream.pass_index)
        return [
            GroupWindows(spec.batch_size, longest_first, window, key_of(seed, number))
            for number, window in enumerate(spec.split.windows(spec.shares))
        ]

    def __next__(self) -> list[Any]:
        batch_index = current_context().batch_index
        wanted = self._schedule.group(batch_index // self._stream.num_streams)
        batch = self._next_list(wanted)
        self.key = ("batch", batch_index, *(held.key for held in batch))
        again = self._again
        return [again(key) if sample is SKIPPED else sample for key, sample, _ in batch]

    def _next_list(self, wanted: int) -> list[Held]:
        group = self._groups[wanted]
        while not self._has_ended and len(group.waiting) < group.num_wanted:
            self._read()
        for found in self._that_have_some(group):
            if not found.batches:
                found.begin_window()
            if found.batches:
                return self._noted(found, found.take())
            if self._spec.split.end != "drop":
                return self._noted(found, self._filled_up(found, found.take_waiting()))
            if found is group:
                break
        for group in self._groups:
            self._leave_out(group)
        raise StopIteration

    def _that_have_some(self, wanted: GroupWindows) -> Iterator[GroupWindows]:
        """Yields the group that is due; at the end of the data, those that may stand in for it."""
        if wanted.num_held or (self._spec.split.end == "drop" and wanted.has_come):
            yield wanted
        if self._has_ended:
            yield from (group for group in self._groups if group.num_held)

    def _noted(self, group: GroupWindows, batch: list[Held]) -> list[Held]:
        if self._fills_up:
            group.given = [held._replace(key=whole(held.key), sample=SKIPPED) for held in batch]
        return batch

    def _filled_up(self, group: GroupWindows, rest: list[Held]) -> list[Held]:
        """Adds samples given before, or if there are none those of the list itself."""
        if not self._fills_up:
            return rest
        missing = self._spec.batch_size - len(rest)
        for held in itertools.islice(itertools.cycle(group.given or list(rest)), missing):
            key = (GIVEN_AGAIN, self._num_again, held.key)
            rest.append(Held(key, SKIPPED, held.length))
            self._num_again += 1
        return rest

    def _read(self) -> None:
        """Puts the next sample to its group."""
        inner = self._inner
        try:
            sample = next(inner)
        except StopIteration:
            self._has_ended = True
            return
        key = inner.key
        found = self._group_of(key, sample)
        if found is SKIPPED:
            return
        if isinstance(self._spec.split.group_by, Mapping):
            found = group_of_source(self._spec.split, found)
        number = self._numbers.get(found)
        if number is None:
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"group_by gave {found!r:.80}, which shares does not have; it has "
                f"{', '.join(map(repr, self._spec.groups))}. Add the group and its part of the "
                "batches, or raise SkipSample for such samples",
            )
        group = self._groups[number]
        group.num_seen += 1
        if len(group.waiting) >= self._limits[number]:
            self._too_many(group, key, sample, found)
            return
        group.add(Held(key, sample, self._length(inner.length)))

    def _length(self, length: Any) -> int:
        return length if type(length) is int else tokens_of(length, self._spec.length_function)

    def _too_many(self, group: GroupWindows, key: RestoreKey, sample: Any, found: Any) -> None:
        """Leaves out a sample of a group of which more come than its share takes.

        Raises:
            FatalSampleError: Too many were.
        """
        spec, groups = self._spec, self._groups
        group.num_surplus += 1
        if group.num_surplus <= spec.split.max_surplus * group.num_seen:
            left_out(key, sample, f"more of group {found!r} than its share takes", _STAGE)
            return
        total = sum(each.num_seen for each in groups)
        seen = {
            name: round(each.num_seen / total, 4)
            for name, each in zip(spec.groups, groups, strict=True)
        }
        shares = {
            name: round(share / sum(spec.shares), 4)
            for name, share in zip(spec.groups, spec.shares, strict=True)
        }
        raise FatalSampleError.from_sample_key(
            name_of(key, sample),
            f"stream {self._stream.index} holds {group.num_held:,} samples of group {found!r} that "
            f"its share does not take: shares={shares!r:.200}, but of the {total:,} samples up to "
            f"here {seen!r:.200}. Give the shares that the data have; or go on from the last "
            f"checkpoint with a max_surplus above {spec.split.max_surplus}, the part of a group's "
            "samples that may be left out",
        )

    def _leave_out(self, group: GroupWindows) -> None:
        """Counts what is left of a group."""
        batches = [group.take() for _ in range(len(group.batches))]
        for held in itertools.chain(*batches, group.take_waiting()):
            left_out(held.key, held.sample, "left over at the end of the data", _STAGE)

    def snapshot(self) -> Snapshot:
        counts = {"ended": int(self._has_ended), "repeated": self._num_again}
        fields: Any = SplitFields(counts, tuple([group.state() for group in self._groups]))
        return Snapshot(_STAGE, fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect(_STAGE, 1)
        groups = self._fresh_groups()
        try:
            for group, state in zip(groups, snapshot.field("groups"), strict=True):
                group.restore(*state)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"The checkpoint's stage 'modality_batch' is damaged: {error}"
            ) from error
        num_again, has_ended = snapshot.count("repeated"), bool(snapshot.count("ended"))
        self._inner.restore(snapshot.inner[0])
        self._groups, self._num_again, self._has_ended = groups, num_again, has_ended
        held = (keys for _, keys, *_ in snapshot.field("groups"))
        self._again = Again(self._spec.restore_member, held)


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
        sample_length: gives a sample's tokens, or a dict with an entry "tokens".
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
                "windows are sorted by length: give sample_length, a function that gives a "
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
