"""The batch sampler: packs of `energon_lite.samplers`' plans, rank by rank and batch by batch."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from energon_lite.core.errors import StateError, did_you_mean
from energon_lite.core.state import config_differences
from energon_lite.core.topology import WorkerConfig
from energon_lite.samplers.plan import (
    Algorithm,
    Deal,
    End,
    EpochPlan,
    Overlong,
    PackSettings,
    check_choice,
    deal_packs,
    digest,
    order_of,
    plan_epoch,
)

Int64Array = npt.NDArray[np.int64]

# Arguments of axolotl's that say how its packing is computed, not what comes out.
_WITHOUT_EFFECT = (
    "group_size", "mp_start_method", "num_count_samples", "num_processes",
    "packing_efficiency_estimate", "safe_mode",
)  # fmt: skip
_FORMAT, _VERSION = "energon_lite.multipack", 1


class MultipackBatchSampler(BatchSampler):
    """Puts samples into packs and packs into batches, the same on all ranks of a run.

    A batch is a list of packs, a pack a list of sample indices, as with axolotl's class of this
    name. There are two ways to call it:

        MultipackBatchSampler(lengths, capacity, batch_size)
        MultipackBatchSampler(sampler=RandomSampler(dataset), lengths=lengths, batch_size=4,
                              batch_max_len=2048, drop_last=True)  # axolotl's

    In the first, each epoch has an order of its own, fixed by `seed` and epoch, and each rank gets
    its part. In the second, the order is that of `sampler`, drawn once for each epoch, at the first
    `len()` or iteration; all batches come on every rank, since accelerate (or the Trainer of
    transformers) deals them to ranks; `sampler` must give the same order on each, and is named: the
    first argument is always `lengths`.

    Call `set_epoch` before each epoch, as for `DistributedSampler`. `DataLoader(dataset,
    batch_sampler=...)` calls `dataset[pack]` for each pack of a batch, with a list of indices.

    Args:
        lengths: shape (N,); tokens of each sample, at least 1.
        capacity: tokens a pack can hold.
        batch_size: packs in a batch.
        algorithm: "best" takes the fewest packs of several methods, and stops at 0.1 % above the
            least possible; the others are functions of `energon_lite.packing`. By default "best",
            with `sampler` "first_fit".
        max_samples: samples in a pack at most; None for any number, with `sampler` 200.
        align: lengths are rounded up to a multiple of this.
        overlong: what becomes of samples above the capacity: "error"; "drop"; or "alone", each in
            a pack of its own that is too large. `num_overlong` counts them.
        seed: another value gives other epochs.
        shuffle: whether samples are shuffled before packing, and packs after it. Samples whose
            length nobody shares may meet the same others again, but with "first_fit" and
            "sequential". With `sampler` packs alone are shuffled, and not if they are "sequential".
            Without, sorted packing gives long samples first.
        drop_last: whether a last batch of fewer packs is left out. By default it is with `sampler`.
        end: how ranks get equally many packs in the last step: "pad" repeats some from the start of
            the epoch, fewer than there are ranks; "drop" leaves some out. `num_repeated` and
            `num_dropped` count their samples.
        rank: index of this data-parallel process, given together with `world_size`. By default as
            `torch.distributed` says, with `sampler` 0 of 1.
        world_size: number of data-parallel processes; 1 where accelerate deals batches to ranks.
        flatten: whether a batch is one list of indices, without bounds of packs.
        sampler: gives the order of samples, or of some of them.
        batch_max_len: another name of `capacity`.
        bin_size: another name of `max_samples`.
        sequential: the same as `algorithm="sequential"`.
        **unused: axolotl's `group_size`, `num_processes`, `mp_start_method`, `num_count_samples`,
            `packing_efficiency_estimate` and `safe_mode`, which have no effect.

    Attributes:
        epoch: as `set_epoch` or `load_state_dict` left it.

    Raises:
        TypeError: An argument is missing, given twice, unknown, or not an integer.
        ValueError: There are no lengths; one is below 1, or too long; a setting is out of range.
            Iteration and `len()` raise it, too, if no batch can be made of the packs there are.

    Example:
        >>> sampler = MultipackBatchSampler([6, 5, 4, 3, 2], capacity=10, batch_size=2)
        >>> len(sampler), sampler.efficiency()
        (1, 1.0)
    """

    _plan: EpochPlan | None
    _progress: _Progress | None

    def __init__(
        self,
        lengths: npt.ArrayLike,
        capacity: int | None = None,
        batch_size: int = 1,
        *,
        algorithm: Algorithm | None = None,
        max_samples: int | None = None,
        align: int = 1,
        overlong: Overlong = "error",
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        end: End = "pad",
        rank: int | None = None,
        world_size: int | None = None,
        flatten: bool = False,
        sampler: Iterable[int] | None = None,
        batch_max_len: int | None = None,
        bin_size: int | None = None,
        sequential: bool = False,
        **unused: Any,
    ) -> None:
        _check_arguments(unused, lengths, sampler)
        if sequential and algorithm not in (None, "sequential"):
            raise ValueError(f"sequential=True contradicts algorithm={algorithm!r}; give one.")
        check_choice("end", end, get_args(End))
        has_sampler = sampler is not None
        if algorithm is None:
            algorithm = "first_fit" if has_sampler else "best"
        algorithm = "sequential" if sequential else algorithm
        capacity = _either("capacity", capacity, "batch_max_len", batch_max_len)
        if capacity is None:
            raise TypeError("capacity is missing: how many tokens can a pack hold?")
        if max_samples is None and bin_size is None and has_sampler:
            max_samples = 200
        if shuffle is None:
            shuffle = not has_sampler or algorithm != "sequential"
        self.settings = PackSettings(
            capacity, algorithm, _either("max_samples", max_samples, "bin_size", bin_size),
            _integer("align", align), overlong, _integer("seed", seed), shuffle,
        )  # fmt: skip
        self.lengths = self.settings.check(lengths)
        order = range(len(self.lengths)) if sampler is None else sampler
        super().__init__(order, batch_size, has_sampler if drop_last is None else drop_last)
        self.end = end
        self.flatten = flatten
        self.rank, self.world_size = _place(rank, world_size, has_sampler)
        self._has_sampler = has_sampler
        self._enter(epoch=0, first=0, saved_order=None)

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch; its number fixes order and packs.

        The epoch that the sampler is in already stays as it is: one that was resumed in its middle
        goes on there. A `sampler` with a method `set_epoch` is told.

        Raises:
            ValueError: `epoch` is negative.
        """
        epoch = _integer("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch={epoch} is negative; epochs count from 0.")
        if epoch != self.epoch:
            self._enter(epoch, first=0, saved_order=None)
        self._tell_sampler()

    def __len__(self) -> int:
        """Gives how many batches the next iteration yields: as many on each rank."""
        return self._deal().num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's batches of the epoch, or of the rest of it after `load_state_dict`."""
        # As a generator, it does nothing before the first batch is wanted: DataLoader with workers
        # makes two iterators, and uses one.
        packs, progress = self._planned().packs, _Progress(self._deal())
        self._progress = progress
        for batch_index in range(progress.deal.num_batches):
            progress.num_batches = batch_index + 1
            start, size = progress.deal.place(batch_index, self.rank)
            batch = [packs[i % len(packs)].tolist() for i in range(start, start + size)]
            yield [index for pack in batch for index in pack] if self.flatten else batch
        if self._progress is progress:
            self._first = 0

    @property
    def num_overlong(self) -> int:
        """How many samples of this epoch are longer than a pack: left out, or alone in one."""
        return self._planned().num_overlong

    @property
    def num_repeated(self) -> int:
        """How many samples are given twice, over all ranks, so that each gets as many packs.

        After `load_state_dict`, of the rest of the epoch; so with `num_dropped` and `efficiency`.
        """
        deal = self._deal()
        return self._num_samples(np.arange(deal.num_packs, deal.end) % deal.num_packs)

    @property
    def num_dropped(self) -> int:
        """How many samples are left out with packs that make no batch, by `end` or `drop_last`."""
        deal = self._deal()
        return self._num_samples(np.arange(deal.end, deal.num_packs))

    def efficiency(self) -> float:
        """Gives the share of packs' room that is filled, in 0..1, of all that all ranks give.

        Padding by `align` counts as empty, a pack above the capacity as full. 1 if nothing is left.
        """
        deal = self._deal()
        given = np.arange(deal.first, deal.end) % deal.num_packs
        sizes = self._planned().packs.sizes(self.lengths)[given]
        room = np.maximum(sizes, self.settings.capacity).sum()
        return float(sizes.sum() / room) if room else 1.0

    def gather_efficiency(self) -> float:
        """Gives `efficiency()`, which is of all ranks already; a name of axolotl's."""
        return self.efficiency()

    def state_dict(self, batches_given: int | None = None) -> dict[str, Any]:
        """Says where the epoch stands, as plain JSON. The state of one rank is that of all.

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
        progress = self._progress or _Progress(self._deal())
        given = progress.num_batches
        if batches_given is not None:
            given, most = _integer("batches_given", batches_given), progress.deal.num_batches
            if not 0 <= given <= most:
                raise ValueError(
                    f"batches_given={given} is not in 0..{most}, the batches of this iteration. "
                    "After a resume, count anew."
                )
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "epoch": self.epoch,
            "packs_given": progress.deal.packs_after(given),
            "order": self._planned().order_digest,
            "config": self._config,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on in the middle of an epoch: the next iteration gives the packs not given before.

        `batch_size`, `end`, `drop_last` and the number of ranks may differ from those of the run
        that saved. `len()` counts what is left, until that has been given or another epoch begins:

            sampler.load_state_dict(state)
            for epoch in range(sampler.epoch, num_epochs):
                sampler.set_epoch(epoch)
                for batch in loader:
                    ...

        A `sampler` must give the order that it gave: seed it by the epoch. If it does not, `len()`
        and iteration raise `StateError`.

        Raises:
            StateError: This is no state of such a sampler; or it is one of other lengths or
                settings, which are named.
        """
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise StateError(f"{str(state)[:80]!r} is not the state of a MultipackBatchSampler.")
        if (version := state.get("version")) != _VERSION:
            raise StateError(f"The state has version {version!r}; this code reads {_VERSION}.")
        epoch, first = state.get("epoch"), state.get("packs_given")
        if not (isinstance(epoch, int) and isinstance(first, int) and min(epoch, first) >= 0):
            raise StateError(
                f"The state has epoch={epoch!r} and packs_given={first!r}, which are no counts; it "
                "was edited or damaged."
            )
        if found := config_differences(state.get("config") or {}, self._config):
            raise StateError("; ".join(found) + ". Make the sampler as it was when it saved.")
        self._enter(epoch, first, state.get("order"))
        self._tell_sampler()

    @cached_property
    def _config(self) -> dict[str, Any]:
        """What another run must have in common to go on where this one stopped."""
        return {
            "num_samples": len(self.lengths),
            "lengths": digest(self.lengths),
            "has_sampler": self._has_sampler,
            **asdict(self.settings),
        }

    def _enter(self, epoch: int, first: int, saved_order: str | None) -> None:
        self.epoch = epoch
        self._first = first  # packs of the epoch that were given by the run that saved
        self._saved_order = saved_order
        self._plan = self._progress = None

    def _tell_sampler(self) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)

    def _planned(self) -> EpochPlan:
        if self._plan is None:
            order = order_of(self.sampler, len(self.lengths)) if self._has_sampler else None
            plan = plan_epoch(self.lengths, order, self.settings, self.epoch)
            if self._saved_order not in (None, plan.order_digest):
                raise StateError(
                    f"sampler gives another order in epoch {self.epoch} than when the state was "
                    "saved: which samples are left, nobody knows. Seed it by the epoch, or give "
                    "lengths without sampler."
                )
            if self._first > len(plan.packs):
                raise StateError(
                    f"The state has {self._first:,} packs given of {len(plan.packs):,}; it was "
                    "edited or damaged."
                )
            self._plan = plan
        return self._plan

    def _deal(self) -> Deal:
        return deal_packs(
            len(self._planned().packs), self._first, self.batch_size, self.world_size,
            drop_last=self.drop_last, end=self.end,
        )  # fmt: skip

    def _num_samples(self, places: Int64Array) -> int:
        return int(np.diff(self._planned().packs.offsets)[places].sum())


@dataclass
class _Progress:
    """What an iteration has given. Each has its own, so that an abandoned one does not count."""

    deal: Deal
    num_batches: int = 0


def _either(name: str, value: int | None, other_name: str, other: int | None) -> int | None:
    if value is not None and other is not None:
        raise TypeError(f"{name}={value} and {other_name}={other} mean the same; give one.")
    if value is None:
        name, value = other_name, other
    return None if value is None else _integer(name, value)


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None


def _check_arguments(unused: dict[str, Any], lengths: object, sampler: object) -> None:
    for name in unused.keys() - set(_WITHOUT_EFFECT):
        known = [*inspect.signature(MultipackBatchSampler).parameters][:-1]
        raise TypeError(
            f"MultipackBatchSampler has no argument {name!r}."
            + did_you_mean(name, [*known, *_WITHOUT_EFFECT])
        )
    if isinstance(lengths, Sampler):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}. Name the arguments as for axolotl's class: "
            "sampler=..., lengths=..., batch_size=..., batch_max_len=..."
        )
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise TypeError(
            f"sampler gives each of {sampler.num_replicas} ranks samples of its own, of which they "
            "would make different numbers of packs. Leave it out: ranks get parts of one plan."
        )


def _place(rank: int | None, world_size: int | None, is_alone: bool) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise TypeError(f"rank={rank} and world_size={world_size}: give both, or none.")
    if rank is not None and world_size is not None:
        place = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
    elif is_alone:
        return 0, 1
    else:
        place = WorkerConfig.default_worker_config(num_workers=0)
    return place.rank, place.world_size
