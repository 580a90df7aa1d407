"""The batch sampler: packs of `energon_lite.samplers`' plans, rank by rank and batch by batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import product
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError, did_you_mean
from energon_lite.core.topology import WorkerConfig
from energon_lite.samplers.base import PlannedBatchSampler, as_integer, either
from energon_lite.samplers.base_order import check_replicas, order_of, unseeded_error
from energon_lite.samplers.original_calls import (
    AXOLOTLS_ORDER,
    WITHOUT_EFFECT,
    AxolotlNames,
    also_called,
)
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
    plan_epoch,
)

_log = logging.getLogger(__name__)


class MultipackBatchSampler(PlannedBatchSampler, AxolotlNames):
    """Puts samples into packs and packs into batches, the same on all ranks of a run.

    A batch is a list of packs, a pack a list of sample indices, as with axolotl's class of this
    name. There are two ways to call it:

        MultipackBatchSampler(lengths, capacity, batch_size)
        MultipackBatchSampler(RandomSampler(dataset), lengths=lengths, batch_size=4,
                              batch_max_len=2048, drop_last=True)  # axolotl's

    In the first, each epoch has an order of its own, fixed by `seed` and epoch, and each rank gets
    its part. In the second, the order is that of `sampler`, drawn once for each epoch, at the first
    `len()` or iteration, and must be the same on each rank; all batches come on every rank.
    Where accelerate (or the Trainer of transformers) deals batches to processes, both give each
    process its part.

    Call `set_epoch` before each epoch, as for `DistributedSampler`. `DataLoader(dataset,
    batch_sampler=...)` calls `dataset[pack]` for each pack of a batch, with a list of indices.

    Args:
        lengths: shape (N,); tokens of each sample, at least 1.
        capacity: tokens a pack can hold.
        batch_size: packs in a batch.
        algorithm: "best" takes the fewest packs of several methods, and stops at 0.1 % above the
            least possible; the others are functions of `energon_lite.packing`.
        max_samples: samples in a pack at most; None for any number, with `sampler` 200.
        align: lengths are rounded up to a multiple of this.
        overlong: what becomes of samples above the capacity: "error"; "drop"; or "alone", each in
            a pack of its own that is too large. `num_overlong` counts them.
        seed: another value gives other epochs.
        shuffle: whether samples are shuffled before packing, and packs after it. Samples whose
            length nobody shares may meet the same others again, but with "first_fit" and
            "sequential". With `sampler` packs alone are shuffled, and not if they are "sequential".
            Without, sorted packing gives long samples first.
        drop_last: whether there is no last batch of fewer packs. By default so with `sampler`.
        end: how ranks get equally many packs in the last step: "split" cuts a few packs in parts,
            so that every sample comes once, also with `drop_last`; if there are too few samples
            for that, it is as "pad". "pad" repeats packs from the start of the epoch, fewer than
            there are ranks, or with `drop_last` leaves them out; "drop" leaves some out.
            `num_repeated` and `num_dropped` count their samples.
        rank: index of this data-parallel process, given together with `world_size`. By default as
            `torch.distributed` says, with `sampler` 0 of 1. Leave both out where accelerate deals
            batches to processes.
        world_size: number of data-parallel processes.
        flatten: whether a batch is one list of indices, without bounds of packs.
        sampler: gives the order of samples, or of some of them.
        batch_max_len: another name of `capacity`.
        bin_size: another name of `max_samples`.
        sequential: the same as `algorithm="sequential"`.
        **unused: axolotl's `group_size`, `num_processes`, `mp_start_method`, `num_count_samples`,
            `packing_efficiency_estimate` and `safe_mode`, which have no effect. All of axolotl's
            arguments may be given by position, in its order.

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

    _format = "energon_lite.multipack"
    _unit = "packs"

    @also_called(*AXOLOTLS_ORDER)
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
        end: End = "split",
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
        algorithm = "sequential" if sequential else algorithm or "best"
        capacity = either("capacity", capacity, "batch_max_len", batch_max_len)
        if capacity is None:
            raise TypeError("capacity is missing: how many tokens can a pack hold?")
        if max_samples is None and bin_size is None and has_sampler:
            max_samples = 200
        if shuffle is None:
            shuffle = not has_sampler or algorithm != "sequential"
        self.settings = PackSettings(
            capacity, algorithm, either("max_samples", max_samples, "bin_size", bin_size),
            as_integer("align", align), overlong, as_integer("seed", seed), shuffle,
        )  # fmt: skip
        self.lengths = self.settings.check(lengths)
        order = range(len(self.lengths)) if sampler is None else sampler
        super().__init__(order, batch_size, has_sampler if drop_last is None else drop_last)
        self.end = end
        self.flatten = flatten
        self._has_sampler, self._unused = has_sampler, unused
        self._find_place(rank, world_size, is_alone=has_sampler)
        if self._is_unseeded and self._is_placed:
            raise unseeded_error(sampler, self.world_size)
        self._enter(0, 0, {})

    def _batches(self, dealt: Deal, ranks: Sequence[int]) -> Iterator[list[Any]]:
        self._check_audience()
        packs = self._planned().packs
        for step, rank in product(range(dealt.num_batches), ranks):
            start, size = dealt.place(step, rank)
            batch = [packs[i % len(packs)].tolist() for i in range(start, start + size)]
            yield [index for pack in batch for index in pack] if self.flatten else batch

    @property
    def num_overlong(self) -> int:
        """How many samples of this epoch are longer than a pack: left out, or alone in one."""
        return int(self._planned().num_overlong)

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

    def _sizes_given(self) -> Int64Array:
        deal = self._deal()
        given = np.arange(deal.first, deal.end) % deal.num_packs
        sizes: Int64Array = self._planned().packs.sizes(self.lengths)[given]
        return sizes

    def generate_batches(self, set_stats: bool = False) -> list[list[Any]]:  # noqa: ARG002
        """Returns the batches that an iteration would yield, as axolotl's; counts none as given."""
        return list(self._batches(self._deal(), [self.rank]))

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
        super().load_state_dict(state)

    @cached_property
    def _config(self) -> dict[str, Any]:
        """What another run must have in common to go on where this one stopped."""
        return {
            "num_samples": len(self.lengths),
            "lengths": digest(self.lengths),
            "has_sampler": self._has_sampler,
            **asdict(self.settings),
        }

    def _enter(self, epoch: int, first: int, state: Mapping[str, Any]) -> None:
        super()._enter(epoch, first, state)
        self._saved_order: str | None = state.get("order")

    def _more_state(self) -> dict[str, Any]:
        return super()._more_state() | {"order": self._planned().order_digest}

    def _multiple(self) -> int:
        if self.end != "split":
            return 1
        return self.world_size * (self.batch_size if self.drop_last or self._is_split else 1)

    def _make_plan(self, multiple: int) -> EpochPlan:
        order = None
        if self._has_sampler:
            if self._is_unseeded and self.world_size > 1:
                raise unseeded_error(self._order, self.world_size)
            order = order_of(self._order, len(self.lengths))
        plan = plan_epoch(self.lengths, order, self.settings, self.epoch, multiple)
        if self._saved_order not in (None, plan.order_digest):
            raise StateError(
                f"sampler gives another order in epoch {self.epoch} than when the state was "
                "saved: which samples are left, nobody knows. Seed it by the epoch, or give "
                "lengths without sampler."
            )
        self._check_first(len(plan.packs))
        return plan

    def _deal(self) -> Deal:
        return deal_packs(
            len(self._planned().packs), self._first, self.batch_size, self.world_size,
            drop_last=self.drop_last, end=self.end,
        )  # fmt: skip

    def _check_audience(self) -> None:
        """Warns if all processes are to train on the same batches, as none deals them."""
        if not self._has_sampler or self._is_placed or self._is_dealt:
            return
        world_size = WorkerConfig.default_worker_config(num_workers=0).world_size
        if world_size > 1 and self._is_unseeded:
            raise unseeded_error(self._order, world_size)
        if world_size > 1:
            _log.warning(
                "With sampler= and without rank and world_size, each of %d processes gets all "
                "batches. Pass the loader to Accelerator.prepare(), which deals them, or give rank "
                "and world_size.", world_size,
            )  # fmt: skip

    def _num_samples(self, places: Int64Array) -> int:
        return int(np.diff(self._planned().packs.offsets)[places].sum())


def _check_arguments(unused: dict[str, Any], lengths: object, sampler: object) -> None:
    for name in unused.keys() - set(WITHOUT_EFFECT):
        known = [*inspect.signature(MultipackBatchSampler).parameters][:-1]
        raise TypeError(
            f"MultipackBatchSampler has no argument {name!r}."
            + did_you_mean(name, [*known, *WITHOUT_EFFECT])
        )
    if isinstance(lengths, Sampler):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}. With a sampler, give the arguments of "
            "axolotl's class: sampler, batch_size, batch_max_len, lengths. If Lightning puts it "
            "there, use Trainer(use_distributed_sampler=False)."
        )
    check_replicas(sampler)
