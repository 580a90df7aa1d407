"""What the batch samplers share: ranks, epochs, their length, and a state to resume from."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from energon_lite.batching.length_windows import padded_share, useful_share
from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError
from energon_lite.core.state import config_differences
from energon_lite.core.topology import WorkerConfig
from energon_lite.samplers.base_order import EpochSampler, is_unseeded, own_epoch
from energon_lite.samplers.dealers import find_dealer, is_asked_for_size


class Dealt(Protocol):
    """How the rest of an epoch is dealt to ranks."""

    @property
    def num_batches(self) -> int:
        """Batches of each rank."""

    def given_after(self, num_batches: int) -> int:
        """Returns how much of the epoch is done when each rank has given so many batches."""


@dataclass
class Progress:
    """What an iteration has given. Each has its own, so that an abandoned one does not count."""

    dealt: Dealt
    num_batches: int = 0


class PlannedBatchSampler(BatchSampler):
    """A batch sampler that plans each epoch, the same on all ranks, and gives a rank its part.

    Where accelerate deals batches to its processes, `len()` and iteration are those of all ranks
    in turn: what accelerate keeps for a process are then exactly the batches of its rank.

    A subclass calls `_find_place` and `_enter`, names its state, and says how an epoch is dealt
    (`_deal`) and which batches come of it (`_batches`).

    Attributes:
        epoch: as `set_epoch` or `load_state_dict` left it.
        rank: index of this data-parallel process.
        world_size: number of data-parallel processes.
    """

    epoch: int
    rank: int
    world_size: int
    _format: ClassVar[str]
    _version: ClassVar[int] = 1
    _unit: ClassVar[str]  # what the state counts: a plan is a sequence of these

    _order: Iterable[int]  # of the user's
    _is_unseeded: bool  # whether that is drawn from torch's global generator
    _is_placed: bool  # whether rank and world size were given
    _is_assumed: bool  # whether they are those of torch.distributed, which may be initialised later
    _is_dealt: bool = False  # whether accelerate was seen to deal what comes
    _is_split: bool = False  # whether it cuts batches, of which all must be full
    _batch_size: int | None
    _first: int  # units of the epoch that were given by the run that saved
    _progress: Progress | None

    @abstractmethod
    def _make_plan(self, multiple: int) -> Any:
        """Plans the epoch, of a multiple of so many units if that can be.

        Raises:
            ValueError: Nothing would be given.
            StateError: The state has more units given than there are.
        """

    def _multiple(self) -> int:
        """Returns of what the number of units is to be a multiple, so that ranks get as many."""
        return 1

    @abstractmethod
    def _deal(self) -> Dealt:
        """Deals what is left of the epoch; plans it if that has not been done."""

    @abstractmethod
    def _batches(self, dealt: Any, ranks: Sequence[int]) -> Iterator[Any]:
        """Yields the batches of each step for `ranks` in turn, by the plan that there is now."""

    @property
    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """What another run must have in common to go on where this one stopped."""

    def _enter(self, epoch: int, first: int, state: Mapping[str, Any]) -> None:
        """Forgets the plan, and begins at unit `first`; `state` is empty, or what was saved."""
        self.epoch = epoch
        self._first = first
        self._progress = None
        # The rest of an epoch is given by the plan that it began with, on whatever ranks.
        self._planned_for: int | None = state.get("planned_for")
        self._plan: tuple[int, Any] | None = None
        if self._planned_for is not None and not (
            isinstance(self._planned_for, int) and self._planned_for > 0
        ):
            raise StateError(
                f"The state has planned_for={self._planned_for!r}, which is no number of ranks; it "
                "was edited or damaged."
            )

    def _planned(self) -> Any:
        """Returns the plan of the epoch."""
        multiple = self._planned_for or self._multiple()
        if self._plan is None or self._plan[0] != multiple:
            self._plan = multiple, self._make_plan(multiple)
        return self._plan[1]

    def _more_state(self) -> dict[str, Any]:
        return {"planned_for": self._planned_for or self._multiple()}

    def _find_place(
        self, rank: int | None, world_size: int | None, *, is_alone: bool = False,
        name: str = "world_size",
    ) -> None:  # fmt: skip
        """Sets rank and world size: as given, or 0 of 1 if alone, or those of torch.distributed.

        Raises:
            TypeError: Only one of the two is given.
            ValueError: There is no such rank.
        """
        if (rank is None) != (world_size is None):
            raise TypeError(f"rank={rank} and {name}={world_size}: give both, or none.")
        self._is_placed = world_size is not None and world_size > 1
        self._is_assumed = rank is None and not is_alone
        if rank is not None and world_size is not None:
            WorkerConfig(rank=rank, world_size=world_size, num_workers=0)  # refuses what cannot be
            self.rank, self.world_size = rank, world_size
        else:
            self.rank, self.world_size = 0, 1
        if self._is_assumed:
            with suppress(ValueError):  # `_ranks` raises it, if there is no process group by then
                place = WorkerConfig.default_worker_config(num_workers=0)
                self.rank, self.world_size = place.rank, place.world_size

    def _ranks(self) -> Sequence[int]:
        """Returns the ranks whose batches are wanted: this one, or all if accelerate deals them.

        Raises:
            ValueError: Rank and world size were given, and accelerate deals this rank's part again.
        """
        if (epoch := own_epoch(self._order)) not in (None, self.epoch):
            self._enter(epoch, 0, {})  # others have told the sampler only
        dealer = find_dealer()
        if dealer is None or dealer.world_size == 1:
            if self._is_assumed and not self._is_dealt:
                place = WorkerConfig.default_worker_config(num_workers=0)
                self._settle(place.rank, place.world_size)
            return [self.rank]
        name = type(self).__name__
        if self._is_placed:
            raise ValueError(
                f"accelerate deals the batches of {name} to {dealer.world_size} processes, but "
                f"with rank={self.rank} and world_size={self.world_size} it yields those of one "
                "rank only: the others' would be lost. Leave out rank and world size, or do not "
                "pass the loader to Accelerator.prepare()."
            )
        self._is_dealt, self._is_split = True, dealer.splits
        self._settle(*((0, 1) if dealer.splits else (dealer.rank, dealer.world_size)))
        return range(self.world_size)

    def _settle(self, rank: int, world_size: int) -> None:
        """Takes a place that may be another than when the sampler was made."""
        self.rank, self.world_size = rank, world_size

    @property
    def batch_size(self) -> Any:
        """Samples or packs of a batch; None if they differ, and for accelerate."""
        return None if is_asked_for_size() else self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int | None) -> None:
        self._batch_size = batch_size

    @property
    def sampler(self) -> Iterable[int]:
        """The order of samples, as torch's `BatchSampler` has it; its `set_epoch` is this one's."""
        return self._sampler

    @sampler.setter
    def sampler(self, order: Iterable[int]) -> None:
        # Unwrapped, an unseeded RandomSampler is found by accelerate, which puts a seeded one here.
        self._order, self._is_unseeded = order, is_unseeded(order)
        self._sampler = order if self._is_unseeded else EpochSampler(order, self.set_epoch)
        self._plan = None

    def _tell_epoch(self) -> None:
        """Passes the epoch to the user's sampler if it has `set_epoch`."""
        if hasattr(self._order, "set_epoch"):
            self._order.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch; its number fixes order and batches.

        The epoch that the sampler is in already stays as it is: one that was resumed in its middle
        goes on there. A `sampler` that gives the order is told, if it has a method `set_epoch`.

        Raises:
            ValueError: `epoch` is negative.
        """
        epoch = as_integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch={epoch} is negative; epochs count from 0.")
        if epoch != self.epoch:
            self._enter(epoch, 0, {})
        self._tell_epoch()

    def __len__(self) -> int:
        """Returns how many batches the next iteration yields: the same number on each rank."""
        ranks = self._ranks()
        return self._deal().num_batches * len(ranks)

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's batches of the epoch, or of the rest of it after `load_state_dict`."""
        # As a generator, it does nothing before the first batch is wanted: DataLoader with workers
        # makes two iterators, and uses one.
        ranks = self._ranks()
        progress = Progress(self._deal())
        self._progress = progress
        for number, batch in enumerate(self._batches(progress.dealt, ranks)):
            progress.num_batches = number // len(ranks) + 1
            yield batch
        if self._progress is progress:
            self._first = 0

    def state_dict(self, batches_given: int | None = None) -> dict[str, Any]:
        """Returns the position in the epoch as JSON. It is identical on all ranks.

        A `DataLoader` with workers asks for batches before training wants them; the sampler knows
        of the former only. Count in the loop over the loader, and tell:

            for i, batch in enumerate(loader):
                ...
                state = sampler.state_dict(batches_given=i + 1)

        Args:
            batches_given: batches that this rank has used, of the iteration begun last; after a
                resume, since then. By default those that the sampler yielded.

        Raises:
            ValueError: There are not so many batches.
        """
        progress = self._progress or Progress(self._deal())
        given = progress.num_batches
        if batches_given is not None:
            given, most = as_integer("batches_given", batches_given), progress.dealt.num_batches
            if not 0 <= given <= most:
                raise ValueError(
                    f"batches_given={given} is not in 0..{most}, the batches of this iteration. "
                    "After a resume, count anew."
                )
        return {
            "format": self._format,
            "version": self._version,
            "epoch": self.epoch,
            f"{self._unit}_given": progress.dealt.given_after(given),
            **self._more_state(),
            "config": self._config,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on in the middle of an epoch: the next iteration gives what was not given before.

        The number of ranks may differ from that of the run that saved. `len()` counts what is left,
        until that has been given or another epoch begins:

            sampler.load_state_dict(state)
            for epoch in range(sampler.epoch, num_epochs):
                sampler.set_epoch(epoch)
                for batch in loader:
                    ...

        Raises:
            StateError: This is no state of such a sampler; or it is one of other lengths or
                settings, which are named.
        """
        name = type(self).__name__
        if not isinstance(state, Mapping) or state.get("format") != self._format:
            raise StateError(f"{str(state)[:80]!r} is not the state of a {name}.")
        if (version := state.get("version")) != self._version:
            raise StateError(f"The state has version {version!r}; this code reads {self._version}.")
        epoch, first = state.get("epoch"), state.get(f"{self._unit}_given")
        if not (isinstance(epoch, int) and isinstance(first, int) and min(epoch, first) >= 0):
            raise StateError(
                f"The state has epoch={epoch!r} and {self._unit}_given={first!r}, which are no "
                "counts; it was edited or damaged."
            )
        if found := config_differences(state.get("config") or {}, self._config):
            raise StateError("; ".join(found) + ". Make the sampler as it was when it saved.")
        self._enter(epoch, first, state)
        self._tell_epoch()

    def _check_first(self, num_units: int) -> None:
        """Refuses a state with more units than the epoch has."""
        if self._first > num_units:
            raise StateError(
                f"The state has {self._first:,} {self._unit} given of {num_units:,}; it was "
                "edited or damaged."
            )


class PaddedBatchSampler(PlannedBatchSampler):
    """One whose batches are padded to their longest sample."""

    @abstractmethod
    def _sizes(self) -> tuple[Int64Array, Int64Array]:
        """Returns the tokens of each batch that is left, and those with padding; shape (S, R)."""

    def efficiency(self) -> float:
        """Returns the share of tokens in what all ranks work or wait, in 0..1.

        Each batch is padded to its longest sample, and all ranks take as long as the one with the
        most padded tokens. After `load_state_dict`, of the rest of the epoch; 1 if nothing is left.
        """
        return useful_share(*self._sizes())

    def padding(self) -> float:
        """Returns the share of padding in all batches, in 0..1, of the same as `efficiency()`."""
        return padded_share(*self._sizes())


def as_integer(name: str, value: int) -> int:
    """Refuses what is no integer, with a `TypeError`."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None


def positive(name: str, value: int) -> int:
    """Refuses what is no integer above 0, with a `TypeError` or a `ValueError`."""
    if (number := as_integer(name, value)) < 1:
        raise ValueError(f"{name}={number} must be at least 1")
    return number


def either(name: str, value: int | None, other_name: str, other: int | None) -> int | None:
    """Returns an argument that has two names."""
    if value is not None and other is not None:
        raise TypeError(f"{name}={value} and {other_name}={other} mean the same; give one.")
    if value is None:
        name, value = other_name, other
    return None if value is None else as_integer(name, value)


def check_lengths(lengths: npt.ArrayLike, *, least: int) -> Int64Array:
    """Returns lengths as an array of shape (N,).

    Raises:
        TypeError: Not integers.
        ValueError: There are none, the shape is another, or one is below `least`.
    """
    array = np.asarray(lengths)
    if array.size == 0:
        raise ValueError("lengths is empty: there are no samples to make batches of.")
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths must be integers, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"lengths must have shape (N,), but has {array.shape}")
    is_low = array < least
    if is_low.any():
        index = int(is_low.argmax())
        raise ValueError(f"Sample {index} has length {array[index]}, below {least}.")
    return array.astype(np.int64)
