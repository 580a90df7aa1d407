"""The batch sampler of steps in which all samples are of one group, such as a modality.

Axes: N samples, S steps, G samples of a step over all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from energon_lite.batching.length_windows import End, number_groups
from energon_lite.batching.steps import GroupSteps, deal, step_groups
from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of
from energon_lite.order.permutation import Permutation
from energon_lite.samplers.base import (
    PaddedBatchSampler,
    as_integer,
    check_lengths,
    either,
    positive,
)
from energon_lite.samplers.base_order import refuse_sampler
from energon_lite.samplers.original_calls import also_called
from energon_lite.samplers.plan import check_choice, digest


class SplitModalityBatchSampler(PaddedBatchSampler):
    """Makes each step of one group only, and of like lengths, the same on all ranks of a run.

    All ranks together take `global_batch_size` samples in a step, and all of these are of one
    group: with images, say, or only text. So no rank runs the image encoder while another has
    nothing for it. Samples of a group are shuffled, sorted by length within windows of many steps,
    cut into steps, and dealt to ranks in turn: within a step the longest sample of each rank is
    about as long as any other, so that no rank waits for another and little is padded. Then the
    steps are shuffled over the whole epoch.

    It takes the arguments of prismatic's `SplitModalitySampler`, also by position, but yields
    batches; the class of that name yields indices.

        sampler = SplitModalityBatchSampler(dataset.get_modality_lengths(), 128, window=64)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Call `set_epoch` before each epoch, as for `DistributedSampler`.

    Args:
        modality_lengths: N pairs (group, length), where the group is any hashable value, such as
            whether the sample has an image; or with `groups` the lengths, shape (N,). Lengths are
            integers from 0 on. Only how they compare within a group has an effect, but for
            `longest_first`, `efficiency()` and `padding()`, for which image tokens should count.
        global_batch_size: samples of a step over all ranks, G.
        groups: N groups.
        batch_size: samples of a batch, if a step has several on each rank, since gradients are
            accumulated. By default, `global_batch_size / num_replicas`.
        window: steps of a window; more give less padding: 8 leave about 5 %, 64 about 1 %. Windows
            have at most a quarter of a group, or samples would meet the same others in each epoch.
        longest_first: whether the epoch begins with the step that has the longest sample, to find
            out early if memory is enough for it.
        seed: another value gives other epochs.
        end: what becomes of samples of a group that fill no step: "pad" repeats others of the
            group, "drop" leaves them out, other ones in each epoch. `num_repeated` and
            `num_dropped` count them.
        drop_last: True is the same as `end="drop"`.
        rank: index of this data-parallel process, given together with `num_replicas`. By default as
            `torch.distributed` says.
        num_replicas: number of data-parallel processes.
        world_size: another name of `num_replicas`.
        dataset: if given, its length must be N.
        sampler: not taken. Lightning puts one here, and gets an error that says what to do.

    Raises:
        TypeError: An argument is given twice, or not an integer; or a group is not hashable.
        ValueError: There are no lengths; one is negative; numbers of lengths, groups or samples
            differ; `global_batch_size` is not a multiple of the number of ranks, or of it times
            `batch_size`; or another setting is out of range. Iteration and `len()` raise it, too,
            if no group fills a step with `end="drop"`.

    Example:
        >>> lengths = [(True, 9), (True, 3), (False, 5), (True, 8), (True, 2), (False, 4)]
        >>> sampler = SplitModalityBatchSampler(lengths, 2, num_replicas=1, rank=0)
        >>> [[lengths[i] for i in batch] for batch in sampler]
        [[(True, 9), (True, 8)], [(False, 5), (False, 4)], [(True, 3), (True, 2)]]
    """

    _format, _unit = "energon_lite.split_modality", "samples"

    @also_called(
        "dataset", "modality_lengths", "global_batch_size", "num_replicas", "rank", "seed",
        "drop_last",
    )  # fmt: skip
    def __init__(
        self,
        modality_lengths: Sequence[tuple[Hashable, int]] | npt.ArrayLike,
        global_batch_size: int,
        *,
        groups: Iterable[Hashable] | None = None,
        batch_size: int | None = None,
        window: int = 64,
        longest_first: bool = False,
        seed: int = 0,
        end: End | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
        world_size: int | None = None,
        dataset: Sized | None = None,
        sampler: None = None,
    ) -> None:
        refuse_sampler(sampler)
        self.groups, self.lengths = _groups_and_lengths(modality_lengths, groups)
        if dataset is not None and len(dataset) != len(self.lengths):
            raise ValueError(
                f"dataset has {len(dataset):,} samples, but modality_lengths {len(self.lengths):,}"
            )
        if end is not None:
            check_choice("end", end, get_args(End))
        if drop_last and end == "pad":
            raise ValueError("drop_last=True contradicts end='pad'; give one.")
        self.end: End = end or ("drop" if drop_last else "pad")
        self._find_place(
            rank, either("num_replicas", num_replicas, "world_size", world_size),
            name="num_replicas",
        )  # fmt: skip
        self.global_batch_size = positive("global_batch_size", global_batch_size)
        self._is_whole_step = batch_size is None
        if batch_size is None:
            _check_multiple(self.global_batch_size, num_replicas=self.world_size)
            batch_size = self.global_batch_size // self.world_size
        batch_size = positive("batch_size", batch_size)
        _check_multiple(self.global_batch_size, batch_size=batch_size, num_replicas=self.world_size)
        self.window = positive("window", window)
        self.longest_first = bool(longest_first)
        self.seed = as_integer("seed", seed)
        BatchSampler.__init__(self, range(len(self.lengths)), batch_size, self.end == "drop")
        self._enter(0, 0, {})

    @property
    def num_repeated(self) -> int:
        """How many samples are given a second time, over all ranks, to fill steps of their group.

        After `load_state_dict`, of the rest of the epoch.
        """
        return int(self._planned().is_repeat.ravel()[self._deal().first :].sum())

    @property
    def num_dropped(self) -> int:
        """How many samples of the epoch are left out since they fill no step of their group."""
        return int(self._planned().num_dropped)

    def _settle(self, rank: int, world_size: int) -> None:
        if world_size == self.world_size:
            return super()._settle(rank, world_size)
        if self._is_dealt:
            raise ValueError(
                f"accelerate deals whole batches to {world_size} processes, but the sampler was "
                f"made for {self.world_size}, with {self.batch_size} samples in a batch. Make it "
                "after Accelerator() or TrainingArguments; with split_batches=True, give rank=0 "
                "and num_replicas=1."
            )
        if self._is_whole_step:
            _check_multiple(self.global_batch_size, num_replicas=world_size)
            self.batch_size = self.global_batch_size // world_size
        _check_multiple(self.global_batch_size, batch_size=self.batch_size, num_replicas=world_size)
        return super()._settle(rank, world_size)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return {
            "num_samples": len(self.lengths),
            "lengths": digest(self.lengths),
            "groups": digest(self.groups),
            "global_batch_size": self.global_batch_size,
            "window": self.window,
            "longest_first": self.longest_first,
            "seed": self.seed,
            "end": self.end,
        }

    def _make_plan(self, multiple: int) -> GroupSteps:  # noqa: ARG002
        plan = plan_steps(
            self.lengths, self.groups, step_size=self.global_batch_size, window=self.window,
            end=self.end, longest_first=self.longest_first, seed=self.seed, epoch=self.epoch,
        )  # fmt: skip
        if not plan.indices.size:
            raise ValueError(
                f"Of an epoch of {len(self.lengths):,} samples nothing would be given: "
                f"end='drop' leaves out what fills no step of {self.global_batch_size:,} of "
                "one group. Use end='pad', or a smaller global_batch_size."
            )
        self._check_first(plan.indices.size)
        return plan

    def _deal(self) -> Chunks:
        chunks = Chunks(
            self._first, self._planned().indices.size, self.batch_size * self.world_size
        )
        if (chunks.stop - chunks.first) % chunks.size:
            left = -chunks.first % self.global_batch_size
            raise StateError(
                f"The state was saved within a step, of which {left:,} samples are left. These are "
                f"no whole batches of batch_size={self.batch_size} for each of num_replicas="
                f"{self.world_size}. Save after whole steps, or go on as it was when it saved."
            )
        return chunks

    def _batches(self, dealt: Chunks, ranks: Sequence[int]) -> Iterator[list[int]]:
        indices = self._planned().indices.ravel()
        for start, rank in product(range(dealt.first, dealt.stop, dealt.size), ranks):
            yield deal(indices[start : start + dealt.size], rank, self.world_size).tolist()

    def _sizes(self) -> tuple[Int64Array, Int64Array]:
        chunks = self._deal()
        indices = self._planned().indices.ravel()[chunks.first :]
        # Axes: chunks, places in a batch, ranks.
        lengths = self.lengths[indices].reshape(-1, self.batch_size, self.world_size)
        return lengths.sum(1), lengths.max(1, initial=0) * self.batch_size


@dataclass(frozen=True)
class Chunks:
    """Samples of a plan from `first` to `stop`, of which each batch of all ranks takes `size`."""

    first: int
    stop: int
    size: int

    @property
    def num_batches(self) -> int:
        """Batches of each rank."""
        return (self.stop - self.first) // self.size

    def given_after(self, num_batches: int) -> int:
        """Returns the samples of the plan that are done after `num_batches` of each rank."""
        return self.first + num_batches * self.size


def plan_steps(
    lengths_N: Int64Array,
    groups_N: Int64Array,
    *,
    step_size: int,
    window: int,
    end: End,
    longest_first: bool,
    seed: int,
    epoch: int,
) -> GroupSteps:
    """Plans an epoch; see `SplitModalityBatchSampler` and `energon_lite.samplers.windows`."""
    key = key_of("samplers.split_modality", seed)
    num = len(lengths_N)
    order_N = Permutation(num, key, epoch, 0)(np.arange(num))
    steps = step_groups(order_N, lengths_N, groups_N, step_size=step_size, window=window, end=end)
    num_steps = len(steps.indices)
    order_S = Permutation(num_steps, key, epoch, 1)(np.arange(num_steps))
    if longest_first and num_steps:
        # Steps have their longest sample first.
        place = lengths_N[steps.indices[order_S, 0]].argmax()
        order_S[[0, place]] = order_S[[place, 0]]
    return GroupSteps(steps.indices[order_S], steps.is_repeat[order_S], steps.num_dropped)


def _groups_and_lengths(
    modality_lengths: Any, groups: Iterable[Hashable] | None
) -> tuple[Int64Array, Int64Array]:
    if groups is None:
        try:
            if hasattr(modality_lengths, "tolist"):
                modality_lengths = modality_lengths.tolist()
            pairs = [(group, length) for group, length in modality_lengths]
        except (TypeError, ValueError):
            raise TypeError(
                "modality_lengths must be pairs (group, length), or lengths together with groups"
            ) from None
        groups, modality_lengths = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    lengths_N = check_lengths(modality_lengths, least=0)
    groups_N = number_groups(groups)
    if len(groups_N) != len(lengths_N):
        raise ValueError(
            f"groups has {len(groups_N):,} entries, but modality_lengths {len(lengths_N):,}"
        )
    return groups_N, lengths_N


def _check_multiple(global_batch_size: int, **factors: int) -> None:
    product = int(np.prod(list(factors.values())))
    if global_batch_size % product:
        named = " times ".join(f"{name}={value}" for name, value in factors.items())
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of {named}: ranks would get "
            f"different numbers of samples. {global_batch_size - global_batch_size % product} or "
            f"{global_batch_size + -global_batch_size % product} would be one."
        )
