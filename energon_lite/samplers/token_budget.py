"""The batch sampler of like lengths with a budget of padded tokens.

Axes: N samples, B batches, S steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from energon_lite.batching.length_windows import (
    aligned,
    limits_of_budget,
    limits_of_function,
    number_groups,
)
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.order.permutation import Permutation
from energon_lite.samplers.base import (
    PaddedBatchSampler,
    as_integer,
    check_lengths,
    positive,
)
from energon_lite.samplers.base_order import refuse_sampler
from energon_lite.samplers.plan import Deal, End, check_choice, cut_packs, deal_packs, digest
from energon_lite.samplers.windows import cut_epoch, shuffle_steps

Overlong = Literal["error", "drop", "alone"]


class TokenBudgetBatchSampler(PaddedBatchSampler):
    """Makes batches of like lengths, each as large as a budget allows, the same on all ranks.

    Samples are read in a shuffled order, `window` at a time; each window is sorted by length and
    cut into batches. What makes no full batch goes to the next window. Batches of one step, one for
    each rank, are neighbours by length, so that no rank waits long for another; the steps of a
    window are shuffled. Give one of `max_tokens`, `batch_size` and `batch_size_fn`:

        sampler = TokenBudgetBatchSampler(lengths, max_tokens=16_384)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)

    Call `set_epoch` before each epoch, as for `DistributedSampler`.

    Args:
        lengths: shape (N,); tokens of each sample, at least 1.
        max_tokens: tokens of a padded batch at most: its samples times its longest.
        batch_size: samples of a batch.
        batch_size_fn: gives the number of samples of a batch whose longest has the length that it
            is called with, rounded up to `align`; below 1 if there can be no such sample. It is
            called once for each length there is, and must give the same on all ranks.
        window: samples that are read for each window; more give less padding. With `shuffle` at
            most half of them all, or samples would meet the same others in every epoch.
        boundary_key: N keys, any hashable values; samples of different keys never share a batch.
        align: the longest sample of a batch is padded to a multiple of this.
        overlong: what becomes of samples that are too long for any batch: "error"; "drop"; or
            "alone", each in a batch of its own that is too large. `num_overlong` counts them.
        shuffle: whether samples are shuffled before they are read, and steps in each window.
        seed: another value gives other epochs.
        drop_last: whether samples are left out that make no full batch at the end of the epoch.
        end: how ranks get equally many batches: "split" cuts a few in parts, so that every sample
            comes once, and is as "pad" with `drop_last` or too few samples; "pad" repeats some from
            the start of the epoch, fewer than there are ranks; "drop" leaves some out.
            `num_repeated` and `num_dropped` count their samples.
        rank: index of this data-parallel process, given together with `world_size`. By default as
            `torch.distributed` says.
        world_size: number of data-parallel processes.
        sampler: not taken. Lightning puts one here, and gets an error that says what to do.

    Raises:
        TypeError: None or several of the three are given; or an argument is not an integer, or a
            key not hashable.
        ValueError: There are no lengths; one is below 1, or too long; there are not N keys; or a
            setting is out of range. Iteration and `len()` raise it, too, if no batch can be given.

    Example:
        >>> sampler = TokenBudgetBatchSampler([9, 2, 8, 3, 1], max_tokens=18, shuffle=False)
        >>> list(sampler)
        [[0, 2], [3, 1, 4]]
    """

    _format, _unit = "energon_lite.token_budget", "batches"

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        batch_size_fn: Callable[[int], int] | None = None,
        window: int = 10_000,
        boundary_key: Iterable[Hashable] | None = None,
        align: int = 1,
        overlong: Overlong = "error",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        end: End = "split",
        rank: int | None = None,
        world_size: int | None = None,
        sampler: None = None,
    ) -> None:
        refuse_sampler(sampler)
        check_choice("overlong", overlong, get_args(Overlong))
        check_choice("end", end, get_args(End))
        self.lengths = check_lengths(lengths, least=1)
        self.align = positive("align", align)
        self.limits = _limits(
            aligned(self.lengths, self.align), max_tokens, batch_size, batch_size_fn
        )
        if overlong == "error":
            _check_limits(self.lengths, self.limits, max_tokens, self.align)
        self.groups = None if boundary_key is None else number_groups(boundary_key)
        if self.groups is not None and len(self.groups) != len(self.lengths):
            raise ValueError(
                f"boundary_key has {len(self.groups):,} entries, but lengths {len(self.lengths):,}"
            )
        self.window = positive("window", window)
        self.overlong: Overlong = overlong
        self.shuffle = bool(shuffle)
        self.seed = as_integer("seed", seed)
        self.end: End = end
        self._find_place(rank, world_size)
        self.max_tokens = None if max_tokens is None else int(max_tokens)
        self.num_samples = None if batch_size is None else int(batch_size)
        # What is needed of torch's __init__, which wants a batch_size in any case. Where it is
        # None, accelerate knows that batches have different sizes: those of another it would lose.
        self.sampler = range(len(self.lengths))
        self.drop_last = bool(drop_last)
        self.batch_size = self.num_samples if self.drop_last else None
        self._enter(0, 0, {})

    @property
    def num_overlong(self) -> int:
        """How many samples are too long for any batch: left out, or alone in one."""
        return int((self.limits < 1).sum())

    @property
    def _cuts(self) -> bool:
        return self.end == "split" and not self.drop_last

    @property
    def num_repeated(self) -> int:
        """How many samples are given twice, over all ranks, so that each gets as many batches.

        After `load_state_dict`, of the rest of the epoch; so with `num_dropped`.
        """
        deal = self._deal()
        return self._num_samples(np.arange(deal.num_packs, deal.end) % deal.num_packs)

    @property
    def num_dropped(self) -> int:
        """How many samples are left out by `drop_last` or `end`."""
        deal = self._deal()
        at_end = self._num_samples(np.arange(deal.end, deal.num_packs))
        return int(self._planned().num_dropped) + at_end

    def _multiple(self) -> int:
        # Batches that are a step together are so wherever the epoch is finished.
        return self.world_size

    @cached_property
    def _config(self) -> dict[str, Any]:
        return {
            "num_samples": len(self.lengths),
            "lengths": digest(self.lengths),
            "max_tokens": self.max_tokens,
            "batch_size": self.num_samples,
            "align": self.align,
            "limits": digest(self.limits),
            "boundary_key": None if self.groups is None else digest(self.groups),
            "window": self.window,
            "overlong": self.overlong,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def _make_plan(self, multiple: int) -> BudgetPlan:
        plan = plan_batches(
            self.lengths, self.limits, self.groups, window=self.window,
            drop_overlong=self.overlong == "drop", shuffle=self.shuffle, drop_last=self.drop_last,
            cuts=self._cuts, world_size=multiple, seed=self.seed, epoch=self.epoch,
        )  # fmt: skip
        _check_batches(len(plan.batches), self)
        self._check_first(len(plan.batches))
        return plan

    def _deal(self) -> Deal:
        num_batches = len(self._planned().batches)
        return deal_packs(
            num_batches, self._first, 1, self.world_size, drop_last=False, end=self.end
        )

    def _batches(self, dealt: Deal, ranks: Sequence[int]) -> Iterator[list[int]]:
        batches = self._planned().batches
        for step, rank in product(range(dealt.num_batches), ranks):
            place, _ = dealt.place(step, rank)
            yield batches[place % len(batches)].tolist()

    def _num_samples(self, places: Int64Array) -> int:
        return int(np.diff(self._planned().batches.offsets)[places].sum())

    def _sizes(self) -> tuple[Int64Array, Int64Array]:
        deal, batches = self._deal(), self._planned().batches
        given = np.arange(deal.first, deal.end) % len(batches)
        starts, counts = batches.offsets[:-1], np.diff(batches.offsets)
        lengths = self.lengths[batches.indices]
        longest = aligned(np.maximum.reduceat(lengths, starts), self.align)
        shape = (-1, self.world_size)
        tokens, areas = np.add.reduceat(lengths, starts), counts * longest
        return tokens[given].reshape(shape), areas[given].reshape(shape)


@dataclass(frozen=True, eq=False)
class BudgetPlan:
    """The batches of an epoch, in the order in which they are given.

    Attributes:
        batches: B batches of sample indices; step after step, one for each rank.
        num_dropped: samples that are left out because they make no full batch.
    """

    batches: Lists
    num_dropped: int


def plan_batches(
    lengths_N: Int64Array,
    limits_N: Int64Array,
    groups_N: Int64Array | None,
    *,
    window: int,
    drop_overlong: bool,
    shuffle: bool,
    drop_last: bool,
    cuts: bool,
    world_size: int,
    seed: int,
    epoch: int,
) -> BudgetPlan:
    """Plans an epoch; see `TokenBudgetBatchSampler` and `energon_lite.samplers.windows`."""
    key = key_of("samplers.token_budget", seed)
    order = np.arange(len(lengths_N))
    if shuffle:
        order = Permutation(len(order), key, epoch, 0)(order)
    if drop_overlong:
        order = order[limits_N[order] > 0]
    if shuffle:
        window = min(window, max(1, -(-len(order) // 2)))
    cut = cut_epoch(
        order, lengths_N, np.maximum(limits_N, 1), groups_N, window=window, drop_last=drop_last
    )
    batches, windows = cut.batches, cut.windows
    if cuts:
        batches = cut_packs(batches, world_size)
        # A part is of the window of the batch that it was cut from.
        windows = windows[np.searchsorted(cut.batches.offsets, batches.offsets[:-1], "right") - 1]
    if shuffle:
        batches = batches.reordered(shuffle_steps(windows, world_size, key, epoch))
    return BudgetPlan(batches, cut.num_dropped)


def _limits(
    lengths_N: Int64Array,
    max_tokens: int | None,
    batch_size: int | None,
    batch_size_fn: Callable[[int], int] | None,
) -> Int64Array:
    given = [value for value in (max_tokens, batch_size, batch_size_fn) if value is not None]
    if len(given) != 1:
        raise TypeError(
            "give one of max_tokens, batch_size and batch_size_fn, not "
            f"{'several' if given else 'none'}: how large is a batch?"
        )
    if max_tokens is not None:
        return limits_of_budget(lengths_N, positive("max_tokens", max_tokens))
    if batch_size is not None:
        return np.full(len(lengths_N), positive("batch_size", batch_size))
    if not callable(batch_size_fn):
        raise TypeError(f"batch_size_fn={batch_size_fn!r} is no function of a length")
    return limits_of_function(lengths_N, batch_size_fn)


def _check_limits(
    lengths_N: Int64Array, limits_N: Int64Array, max_tokens: int | None, align: int
) -> None:
    is_long = limits_N < 1
    if not is_long.any():
        return
    index = int(is_long.argmax())
    padded = f" (padded to a multiple of {align})" if align > 1 else ""
    why = (
        f"above max_tokens={max_tokens}{padded}"
        if max_tokens is not None
        else f"for which batch_size_fn gives no batch{padded}"
    )
    raise ValueError(
        f"Sample {index} has length {lengths_N[index]}, {why}, as have {int(is_long.sum()) - 1:,} "
        "after it. Truncate or split such samples, allow for them, or use overlong='drop' or "
        "overlong='alone'."
    )


def _check_batches(num_batches: int, sampler: TokenBudgetBatchSampler) -> None:
    why = ""
    if num_batches == 0 and sampler.overlong == "drop" and sampler.num_overlong:
        why = f"overlong='drop' leaves out {sampler.num_overlong:,}"
        why += ", and drop_last=True the rest." if sampler.drop_last else ", which is all."
    elif num_batches == 0:
        why = "drop_last=True leaves out what makes no full batch. Use drop_last=False."
    elif num_batches < sampler.world_size and sampler.end == "drop" and not sampler._first:
        why = (
            f"end='drop' leaves out batches, of which there are {num_batches:,}, if there is not "
            f"one for each of world_size={sampler.world_size}. Use end='pad', or fewer ranks."
        )
    if why:
        raise ValueError(
            f"Of an epoch of {len(sampler.lengths):,} samples nothing would be given: {why}"
        )
