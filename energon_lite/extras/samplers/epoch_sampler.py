"""The base of the batch samplers: an epoch is planned for all ranks, and each yields its part.

A plan is a sequence of lists of samples. In each *row* every rank has one list, neighbours in the
plan; a batch has one list or several, of consecutive rows.

Axes: N samples, P lists, R ranks, T rows, S steps.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from hashlib import blake2b
from itertools import chain
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import LengthRules, aligned, number_groups
from energon_lite.batching.sizes import as_integers
from energon_lite.core.arguments import at_least
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of
from energon_lite.core.state import MAX_COUNT, config_differences
from energon_lite.core.topology import MAX_STREAMS, WorkerConfig
from energon_lite.extras.samplers.sample_order import (
    EpochSampler,
    check_seeded,
    epoch_of,
    find_shard,
    is_unseeded,
    needs_fixed_size,
    order_of,
    warn_of_copies,
)
from energon_lite.order.permutation import Permutation

F = TypeVar("F", bound=Callable[..., None])
Overlong = Literal["error", "drop", "alone"]
End = Literal["split", "pad", "drop"]

# The counts of a state, each with its lowest and highest value.
_COUNTS = {
    "epoch": (0, MAX_COUNT),
    "position": (0, MAX_COUNT),
    "num_ranks": (1, MAX_STREAMS),
    "multiple": (1, MAX_COUNT),
}


@dataclass(frozen=True, kw_only=True)
class EpochSettings(LengthRules):
    """The settings on which an epoch depends, in all samplers.

    Args:
        seed: with the epoch, it fixes what is shuffled.
        shuffle: whether samples are shuffled before they are planned.
        end: how all ranks get equally many lists. "split" cuts a few lists in parts; "pad" repeats
            lists from the start of the epoch; "drop" drops some.
    """

    seed: int = field(default=0, metadata={"least": -inf})
    shuffle: bool = True
    end: End = "split"


class Layout(NamedTuple):
    """The ranks that an epoch is planned for, which stay the same until it ends.

    Attributes:
        num_ranks: ranks that have a list in each row.
        multiple: the number of lists is made a multiple of this, if there are enough samples.
    """

    num_ranks: int
    multiple: int


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The lists of an epoch in their order, and what they were made of.

    Attributes:
        layout: the ranks that it was planned for.
        lists: P lists of sample indices.
        num_samples: samples to be yielded, without overlong ones that are dropped.
        num_overlong: overlong samples of the epoch, dropped or not.
        order_digest: of the order of a user's sampler; None without one.
    """

    layout: Layout
    lists: Lists
    num_samples: int
    num_overlong: int
    order_digest: str | None


@dataclass
class Iteration:
    """The position of one iteration; an abandoned one has no effect on the next.

    Attributes:
        first: lists of the plan that were done before.
        end: lists that are done after it.
        step_size: lists in the batches of all ranks.
        max_batches: batches of each rank.
        num_batches: those that were yielded.
    """

    first: int
    end: int
    step_size: int
    max_batches: int
    num_batches: int = 0


class EpochBatchSampler(BatchSampler):
    """A batch sampler that plans each epoch, the same on all ranks, and yields a rank's part.

    Each rank gets the same number of batches. Where accelerate shards batches among its processes,
    `len()` and iteration are those of all ranks in turn: what accelerate keeps for a process are
    then exactly the batches of its rank.

    A subclass has `plan`, and calls `__init__`.

    Args:
        lengths: shape (N,), or (N, R) of several resources; of all samples.
        order: a sampler of the user's; None for all samples by seed and epoch.
        batch_size: lists of a batch, as `torch.utils.data.BatchSampler`; None if there is one.
        drop_last: whether the end of the epoch is dropped instead of a smaller batch.
        settings: the settings, and the rules for lengths.

    Attributes:
        epoch: as `set_epoch` or `load_state_dict` set it.
        settings: as they were checked.
        rank: index of this data-parallel process.
        world_size: number of data-parallel processes.
    """

    _name: ClassVar[str]  # of states and seeds
    _unit: ClassVar[str]  # what a list of the plan is
    _saved: ClassVar[tuple[str, ...]]  # attributes and settings that the plan depends on
    _is_nested: bool = False  # whether a batch keeps its lists apart
    _fills_batches: ClassVar[bool] = True  # with lists; else a list is a batch, and may be smaller
    _is_sharded: bool = False  # whether accelerate was seen to shard the batches
    _is_split: bool = False  # whether accelerate cuts batches, all of which must be full then

    def __init__(
        self, lengths: Int64Array, order: Iterable[int] | None, batch_size: int | None,
        drop_last: bool, settings: EpochSettings,
    ) -> None:  # fmt: skip
        self.lengths, self.settings, self.end = lengths, settings, settings.end
        rows = lengths.reshape(len(lengths), -1)
        self._is_overlong = self._too_long(rows)
        if settings.overlong == "error" and self._is_overlong.any():
            raise ValueError(self._overlong_text())
        self._has_order = order is not None
        super().__init__(range(len(rows)) if order is None else order, 1, bool(drop_last))
        # None where sizes differ: with a size, accelerate would lose batches of another.
        self._batch_size = None if batch_size is None else at_least("batch_size", batch_size)
        self._enter(0)

    def _too_long(self, lengths_NR: Int64Array) -> BoolArray:
        """Returns which samples are overlong; shape (N,)."""
        return self.settings.too_long(lengths_NR)

    def _overlong_text(self) -> str:
        """Describes the first overlong sample, and the remedies."""
        first, num = int(self._is_overlong.argmax()), int(self._is_overlong.sum())
        return (
            f"Sample {first}: {self.settings.excess(np.atleast_1d(self.lengths[first]).tolist())}, "
            f"and so are {num - 1:,} after it. Truncate or split such samples, raise the limit, or "
            "use overlong='drop' or overlong='alone'."
        )

    @abstractmethod
    def plan(self, order_N: Int64Array, epoch: int) -> Lists:
        """Returns the lists of an epoch, from all samples in the order in which they are read.

        `self.layout` has the ranks; `self.permutation` shuffles.
        """

    # The place of this process.

    def _set_place(
        self, rank: int | None, world_size: int | None, name: str = "world_size"
    ) -> None:
        """Sets rank and world size: as passed, or 0 of 1 with a user's order, or torch's.

        Raises:
            TypeError: Only one of the two is passed.
            ValueError: There is no such rank; or the order differs between ranks.
        """
        if (rank is None) != (world_size is None):
            raise TypeError(f"rank={rank} and {name}={world_size}: pass both, or none.")
        # Then they are those of torch.distributed, which may be initialised later.
        self._is_assumed = rank is None and not self._has_order
        world_size = at_least(name, 1 if world_size is None else world_size, -inf)
        rank = 0 if rank is None else rank
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
        self.rank, self.world_size = config.rank, config.world_size  # both checked
        self._is_placed = self.world_size > 1
        check_seeded(self._unseeded, self.world_size)
        if self._is_assumed:
            with suppress(ValueError):  # `_ranks` raises it, if there is no process group by then
                self.rank, self.world_size = _rank_and_world_size()

    def _ranks(self) -> Sequence[int]:
        """Returns the ranks whose batches are wanted: this one, or all if accelerate shards them.

        Raises:
            ValueError: Rank and world size were passed, and accelerate shards this rank's part.
        """
        if (epoch := epoch_of(self._order)) not in (None, self.epoch):
            self._enter(epoch)  # the epoch was set of the user's sampler only
        shard = find_shard()
        if shard is None or shard.world_size == 1:
            if self._is_assumed and not self._is_sharded:
                self._move(*_rank_and_world_size())
            return [self.rank]
        if self._is_placed:
            raise ValueError(
                f"accelerate shards the batches of {type(self).__name__} to {shard.world_size} "
                f"processes, but with rank={self.rank} and world_size={self.world_size} it yields "
                "those of one rank only: the others' would be lost. Omit rank and world size, or "
                "do not pass the loader to Accelerator.prepare()."
            )
        self._is_sharded, self._is_split = True, shard.splits
        self._move(*((0, 1) if shard.splits else (shard.rank, shard.world_size)))
        return range(self.world_size)

    def _move(self, rank: int, world_size: int) -> None:
        """Sets a place that may differ from that when the sampler was made."""
        self.rank, self.world_size = rank, world_size

    # Attributes that others read and set.

    @property
    def batch_size(self) -> Any:
        """Samples or packs of a batch; None if they differ, and for accelerate."""
        return None if needs_fixed_size() else self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int | None) -> None:
        self._batch_size = batch_size

    @property
    def sampler(self) -> Iterable[int]:
        """The order of samples, as torch's `BatchSampler` has it; its `set_epoch` is this one's."""
        return self._sampler

    @sampler.setter
    def sampler(self, order: Iterable[int]) -> None:
        # An unseeded RandomSampler is not wrapped: accelerate finds it, and puts a seeded one here;
        # or a generator into it, which differs between processes.
        self._order, self._unseeded = order, order if is_unseeded(order) else None
        is_wrapped = self._unseeded is None
        self._sampler = EpochSampler(order, self.set_epoch) if is_wrapped else order
        self._plan: EpochPlan | None = None

    # The plan of the epoch.

    def _enter(self, epoch: int, state: Mapping[str, Any] | None = None) -> None:
        """Discards the plan; the epoch begins, or resumes from a state that was checked."""
        self.epoch = epoch
        self._first: int = state["position"] if state else 0
        self._saved_order: str | None = state.get("order") if state else None
        self._saved_layout = Layout(state["num_ranks"], state["multiple"]) if state else None
        self._iteration: Iteration | None = None
        self._plan = None

    @property
    def layout(self) -> Layout:
        """The ranks that the epoch is planned for: those of the run that began it."""
        if self._saved_layout is not None:
            return self._saved_layout
        is_full = self._is_split or (self.drop_last and self._fills_batches)
        is_cut = self.end == "split" and (self._fills_batches or not self.drop_last)
        lists_per_rank = self._lists_per_batch if is_full else 1
        return Layout(self.world_size, self.world_size * lists_per_rank if is_cut else 1)

    @property
    def _lists_per_batch(self) -> int:
        return (self._batch_size or 1) if self._fills_batches else 1

    def permutation(self, num: int, epoch: int, number: int) -> Int64Array:
        """Returns a permutation of 0..num-1, the same on all ranks; `number` is the use of it."""
        key = key_of(f"samplers.{self._name}", self.settings.seed)
        return Permutation(num, key, epoch, number)(np.arange(num))

    def _planned(self) -> EpochPlan:
        """Returns the plan of the epoch.

        Raises:
            ValueError: All samples are dropped.
            StateError: The state was saved with another order, or has a position that is not there.
        """
        if self._plan is not None and self._plan.layout == self.layout:
            return self._plan
        num, order_digest = len(self.lengths), None
        if self._has_order:
            check_seeded(self._unseeded, self.world_size)
            order_N = order_of(self._order, num)
            order_digest = _plain_value(order_N)
        else:
            is_shuffled = self.settings.shuffle
            order_N = self.permutation(num, self.epoch, 0) if is_shuffled else np.arange(num)
        if self._saved_order not in (None, order_digest):
            raise StateError(
                f"sampler has another order in epoch {self.epoch} than when the state was saved, "
                "so that the samples that are left are unknown. Seed it by the epoch, or pass "
                "lengths without sampler."
            )
        is_overlong_N = self._is_overlong[order_N]
        num_overlong = int(is_overlong_N.sum())
        if self.settings.overlong == "drop":
            order_N = order_N[~is_overlong_N]
        if not len(order_N):
            raise ValueError(
                f"Epoch {self.epoch} has no sample: overlong='drop' drops all {num_overlong:,}. "
                f"{self._overlong_text()}"
            )
        lists = self.plan(order_N, self.epoch)
        if self._first > len(lists):
            raise StateError(
                f"The state is at position {self._first:,} of {len(lists):,} {self._unit}; it was "
                "edited or is corrupt."
            )
        self._plan = EpochPlan(self.layout, lists, len(order_N), num_overlong, order_digest)
        return self._plan

    def _rows(self) -> Int64Array:
        """Returns the lists that are left, shape (T, R); from P on, they are 0, 1, ... again.

        Raises:
            ValueError: No rank gets any, of a whole epoch.
        """
        num_lists, fills = len(self._planned().lists), self.drop_last and self._fills_batches
        row_size = self.world_size * (self._lists_per_batch if fills else 1)
        num_left = num_lists - self._first
        num_left += -(num_left % row_size) if fills or self.end == "drop" else -num_left % row_size
        if num_left == 0 and self._first == 0:
            raise ValueError(
                f"An epoch of {len(self.lengths):,} samples yields no batch: they make "
                f"{num_lists:,} {self._unit}, and a step takes {row_size:,} (batch_size="
                f"{self._batch_size}, world_size={self.world_size}, drop_last={self.drop_last}, "
                f"end={self.end!r}). Use drop_last=False and end='pad', smaller batches, or fewer "
                "ranks."
            )
        return np.arange(self._first, self._first + num_left).reshape(-1, self.world_size)

    def _begin(self) -> Iteration:
        """Returns an iteration at its beginning."""
        rows, per_batch = self._rows(), self._lists_per_batch
        end = min(self._first + rows.size, len(self._planned().lists))
        return Iteration(self._first, end, per_batch * self.world_size, -(-len(rows) // per_batch))

    # Counts of the epoch.

    @property
    def num_overlong(self) -> int:
        """The number of samples of this epoch that are too long: dropped, or each in its list."""
        return self._planned().num_overlong

    @property
    def num_repeated(self) -> int:
        """The number of samples yielded again, over all ranks, so that all get as many.

        After `load_state_dict`, of the rest of the epoch; so with `num_dropped`.
        """
        plan, rows = self._planned(), self._rows().ravel()
        sizes_P = np.diff(plan.lists.offsets)
        wrapped = int(sizes_P[rows[rows >= len(plan.lists)] % len(plan.lists)].sum())
        indices = plan.lists.indices
        if len(indices) <= plan.num_samples:
            return wrapped
        # The plan has samples several times; all but the first time are repetitions.
        firsts = np.full(len(self.lengths), -1)
        firsts[indices[::-1]] = np.arange(len(indices))[::-1]
        is_repeated = firsts[indices] != np.arange(len(indices))
        return int(is_repeated[plan.lists.offsets[self._first] :].sum())

    @property
    def num_dropped(self) -> int:
        """The number of samples dropped as they fill no list or no batch (`end`, `drop_last`)."""
        plan = self._planned()
        unplanned = max(plan.num_samples - len(plan.lists.indices), 0)
        offsets = plan.lists.offsets
        return unplanned + int(offsets[-1] - offsets[self._begin().end])

    # Iteration, and its state.

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch; its number fixes order and batches.

        The current epoch is not begun again: one that was resumed in its middle continues there. A
        `sampler` that has a method `set_epoch` gets the number, too.

        Raises:
            ValueError: `epoch` is negative.
        """
        epoch = at_least("epoch", epoch, 0)
        if epoch != self.epoch:
            self._enter(epoch)
        if hasattr(self._order, "set_epoch"):
            self._order.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns how many batches the next iteration yields: the same number on each rank."""
        ranks = self._ranks()
        return self._begin().max_batches * len(ranks)

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's batches of the epoch, or of the rest of it after `load_state_dict`."""
        # As a generator, it does nothing before the first batch is wanted: DataLoader with workers
        # makes two iterators, and uses one.
        ranks = self._ranks()
        iteration = self._iteration = self._begin()
        if self._has_order and not self._is_placed and not self._is_sharded:
            _, world_size = _rank_and_world_size()
            check_seeded(self._unseeded, world_size)
            warn_of_copies(world_size)
        for number, batch in enumerate(self._batches(ranks)):
            iteration.num_batches = number // len(ranks) + 1
            yield batch
        if self._iteration is iteration:
            self._first = 0

    def _batches(self, ranks: Sequence[int]) -> Iterator[list[Any]]:
        """Yields the batches of each step for `ranks` in turn, by the plan that there is now."""
        lists, size = self._planned().lists, self._lists_per_batch
        rows, has_singles = self._rows() % max(len(lists), 1), len(lists) == len(lists.indices)
        for start in range(0, len(rows), size):
            for rank in ranks:
                numbers = rows[start : start + size, rank]
                if has_singles and not self._is_nested:
                    yield lists.indices[numbers].tolist()
                    continue
                batch = [lists[i].tolist() for i in numbers.tolist()]
                if not self._is_nested:
                    batch = batch[0] if len(batch) == 1 else list(chain.from_iterable(batch))
                yield batch

    @cached_property
    def _config(self) -> dict[str, Any]:
        """The settings that another run must share to resume where this one stopped."""
        values = vars(self.settings) | vars(self)
        names = ("lengths", "seed", "shuffle", *self._saved)
        config = {name: _plain_value(values[name]) for name in names}
        return {"num_samples": len(self.lengths), "has_sampler": self._has_order, **config}

    def state_dict(self, batches_given: int | None = None) -> dict[str, Any]:
        """Returns the position in the epoch, JSON-serialisable, and the same on all ranks.

        A `DataLoader` with workers asks for batches before training uses them, of which the sampler
        does not know. Count them in the loop over the loader:

            for i, batch in enumerate(loader):
                ...
                state = sampler.state_dict(batches_given=i + 1)

        Args:
            batches_given: batches that this rank has used, of the iteration begun last; after a
                resume, since then. By default those that the sampler yielded.

        Raises:
            ValueError: There are fewer batches.
        """
        iteration = self._iteration or self._begin()
        num_batches = iteration.num_batches
        if batches_given is not None:
            num_batches = at_least("batches_given", batches_given, -inf)
        if not 0 <= num_batches <= iteration.max_batches:
            raise ValueError(
                f"batches_given={num_batches} is not in 0..{iteration.max_batches}, the batches of "
                "this iteration. After a resume, count from 0."
            )
        plan = self._planned()
        return {
            "format": f"energon_lite.{self._name}",
            "version": 2,
            "epoch": self.epoch,
            "position": min(iteration.first + num_batches * iteration.step_size, iteration.end),
            **plan.layout._asdict(),
            "order": plan.order_digest,
            "config": self._config,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes in the middle of an epoch: the next iteration yields what was not yielded before.

        The number of ranks, `end` and (of packs) `batch_size` and `drop_last` may differ from those
        of the run that saved. `len()` counts what is left, until that has been yielded or another
        epoch begins:

            sampler.load_state_dict(state)
            for epoch in range(sampler.epoch, num_epochs):
                sampler.set_epoch(epoch)
                for batch in loader:
                    ...

        A user's `sampler` must have the same order again: seed it by the epoch. If it has not,
        `len()` and iteration raise `StateError`.

        Raises:
            StateError: The state belongs to another sampler, or to other lengths or settings
                (listed).
        """
        if not isinstance(state, Mapping) or state.get("format") != f"energon_lite.{self._name}":
            raise StateError(f"{str(state)[:80]!r} is not the state of a {type(self).__name__}.")
        if state.get("version") != 2:
            raise StateError(f"The state has version {state.get('version')!r}; this code reads 2.")
        for name, (least, most) in _COUNTS.items():
            value = state.get(name)
            if type(value) is not int or not least <= value <= most:
                raise StateError(
                    f"The state has {name}={value!r:.80}, which is not a number in {least}.."
                    f"{most:,}; it was edited or is corrupt."
                )
        if found := config_differences(state.get("config") or {}, self._config):
            raise StateError("; ".join(found) + ". Make the sampler as it was when it saved.")
        self._enter(state["epoch"], state)
        self.set_epoch(self.epoch)


class PaddedEpochBatchSampler(EpochBatchSampler):
    """One whose batches are padded to their longest sample, rounded up to `align`."""

    align: int = 1

    def _sizes(self) -> tuple[Int64Array, Int64Array]:
        """Returns the tokens of each batch that is left, and those with padding; shape (S, R)."""
        lists = self._planned().lists
        rows_SBR = self._rows().reshape(-1, self._lists_per_batch, self.world_size)
        rows_SBR %= max(len(lists), 1)
        longest_P = np.maximum.reduceat(self.lengths[lists.indices], lists.offsets[:-1])
        counts_SR = np.diff(lists.offsets)[rows_SBR].sum(1)
        areas_SR = aligned(longest_P, self.align)[rows_SBR].max(1) * counts_SR
        return lists.sizes(self.lengths)[rows_SBR].sum(1), areas_SR

    def efficiency(self) -> float:
        """Returns the share of tokens in what all ranks compute or wait, in 0..1.

        Each batch is padded to its longest sample, and all ranks take as long as the one with the
        most padded tokens. After `load_state_dict`, of the rest of the epoch; 1 if nothing is left.
        """
        tokens_SR, areas_SR = self._sizes()
        room = areas_SR.max(1).sum() * self.world_size
        return float(tokens_SR.sum() / room) if room else 1.0

    def padding(self) -> float:
        """Returns the share of padding in all batches, in 0..1, of the same as `efficiency()`."""
        tokens_SR, areas_SR = self._sizes()
        area = areas_SR.sum()
        return float(1 - tokens_SR.sum() / area) if area else 0.0


def also_called(*names: str) -> Callable[[F], F]:
    """Lets `__init__` take the positional arguments of another library's class, too.

    A call is the other class's if it fits the order of its arguments and not of ours:
    `Ours(sampler, lengths=[...])` has `lengths` twice where `lengths` is our first argument.

    Args:
        names: the other's arguments in their order, each by our name of it.
    """

    def decorate(init: F) -> F:
        signature = inspect.signature(init)

        @wraps(init)
        def called(self: Any, *args: Any, **settings: Any) -> None:
            theirs = dict(zip(names, args, strict=False))
            if len(args) <= len(names) and not theirs.keys() & settings.keys():
                try:
                    signature.bind(self, *args, **settings)
                except TypeError:
                    args, settings = (), theirs | settings
            init(self, *args, **settings)

        return called  # type: ignore[return-value]

    return decorate


def _rank_and_world_size() -> tuple[int, int]:
    """Returns rank and world size as torch.distributed and the environment have them."""
    config = WorkerConfig.default_worker_config(num_workers=0)
    return config.rank, config.world_size


def either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Returns an argument that has two names."""
    if value is not None and other is not None:
        raise TypeError(f"{name}={value} and {other_name}={other} mean the same; pass one.")
    return value if other is None else at_least(other_name, other, -inf)


def as_lengths(lengths: npt.ArrayLike, least: int = 1, num_resources: int = 1) -> Int64Array:
    """Returns lengths as integers, shape (N,), or (N, R) with several resources.

    Raises:
        TypeError: They are not integers.
        ValueError: There are none, the shape is another, or one is below `least`; of several
            resources, one is negative or all of a sample are.
    """
    array = as_integers("lengths", lengths)
    if array.size == 0:
        raise ValueError("lengths is empty: there are no samples to make batches of.")
    shape = "(N,)" if num_resources == 1 else f"(N, {num_resources})"
    if array.shape[1:] != (() if num_resources == 1 else (num_resources,)):
        raise ValueError(f"lengths must have shape {shape}, but has {array.shape}")
    rows = array.reshape(len(array), -1)
    is_low = (rows < 0).any(axis=1) | (rows.max(axis=1) < least)
    if is_low.any():
        index = int(is_low.argmax())
        raise ValueError(f"Sample {index} has length {array[index].tolist()}, below {least}.")
    return array.astype(np.int64)


def as_groups(name: str, keys: Iterable[Hashable], num_samples: int) -> Int64Array:
    """Returns the number of each sample's group, shape (N,).

    Raises:
        TypeError: A key is not hashable.
        ValueError: There is not one for each sample.
    """
    groups_N = number_groups(keys)
    if len(groups_N) != num_samples:
        raise ValueError(f"{name} has {len(groups_N):,} entries, but lengths {num_samples:,}")
    return groups_N


def _plain_value(value: Any) -> Any:
    """Returns a setting for a state: arrays by their digest, what JSON does not have as text."""
    if isinstance(value, np.ndarray):
        return blake2b(value.astype("<i8").tobytes(), digest_size=16).hexdigest()
    if isinstance(value, Mapping):
        return {name: int(number) for name, number in value.items()}
    if isinstance(value, np.integer | int):
        return value if isinstance(value, bool) else int(value)
    return value if isinstance(value, str | None) else str(value)
