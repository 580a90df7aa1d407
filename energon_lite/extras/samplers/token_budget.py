"""The batch sampler of samples of similar length with a budget of padded tokens.

Axes: N samples, B batches, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Buckets
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.extras.samplers.epoch_batches import cut_epoch, cut_lists, shuffle_steps
from energon_lite.extras.samplers.epoch_sampler import (
    End,
    EpochSettings,
    Overlong,
    PaddedEpochBatchSampler,
    as_groups,
    as_lengths,
)
from energon_lite.extras.samplers.sample_order import check_sampler


@dataclass(frozen=True, kw_only=True)
class BudgetSettings(Buckets, EpochSettings):
    """The limits of a batch, of which one is set, and what all samplers have."""

    batch_size: int | None = None

    def __post_init__(self) -> None:
        limits = (self.max_tokens, self.batch_size, self.batch_size_fn)
        if (num_limits := sum(limit is not None for limit in limits)) != 1:
            raise TypeError(
                "pass one of max_tokens, batch_size and batch_size_fn, not "
                f"{'several' if num_limits else 'none'}: how large is a batch?"
            )
        super().__post_init__()


class TokenBudgetBatchSampler(PaddedEpochBatchSampler):
    """Makes batches of similar length, each as large as a budget allows, the same on all ranks.

    Samples are read in a shuffled order, `window` at a time; each window is sorted by length and
    cut into batches. What makes no full batch is carried over to the next window. Batches of one
    step, one for each rank, are neighbours by length, so that no rank waits long for another; the
    steps of a window are shuffled. Pass one of `max_tokens`, `batch_size` and `batch_size_fn`:

        sampler = TokenBudgetBatchSampler(lengths, max_tokens=16_384)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)

    Call `set_epoch` before each epoch, as for `DistributedSampler`.

    Args:
        lengths: shape (N,); tokens of each sample, at least 1.
        max_tokens: tokens of a padded batch at most: its samples times its longest.
        batch_size: samples of a batch.
        batch_size_fn: returns the number of samples of a batch whose longest has the length that it
            is called with, rounded up to `align`; below 1 if there can be no such sample. It is
            called once for each length there is, and must return the same on all ranks.
        window: samples that are read for each window; more leave less padding. With `shuffle` at
            most half of them all, or samples would meet the same others in every epoch.
        boundary_key: N keys, any hashable values; samples of different keys never share a batch.
        align: the longest sample of a batch is padded to a multiple of this.
        overlong: what becomes of samples that are too long for any batch: "error"; "drop"; or
            "alone", each in a batch by itself that is too large. `num_overlong` counts them.
        shuffle: whether samples are shuffled before they are read, and steps in each window.
        seed: another value yields other epochs.
        drop_last: whether samples are dropped that make no full batch at the end of the epoch.
        end: how ranks get equally many batches: "split" cuts a few in parts, so that every sample
            comes once, and is as "pad" with `drop_last` or too few samples; "pad" repeats some from
            the start of the epoch, fewer than there are ranks; "drop" drops some. `num_repeated`
            and `num_dropped` count their samples.
        rank: index of this data-parallel process, passed together with `world_size`. By default as
            in `torch.distributed`.
        world_size: number of data-parallel processes.
        sampler: refused. Lightning puts one here; the error names the remedy.

    Raises:
        TypeError: None or several of the three are passed; or an argument is not an integer, or a
            key not hashable.
        ValueError: There are no lengths; one is below 1, or too long; there are not N keys; or a
            setting is out of range. Iteration and `len()` raise it, too, if there is no batch.

    Example:
        >>> sampler = TokenBudgetBatchSampler([9, 2, 8, 3, 1], max_tokens=18, shuffle=False)
        >>> list(sampler)
        [[0, 2], [3, 1, 4]]
    """

    _name, _unit, _fills_batches = "token_budget", "batches", False
    _saved = (
        "max_tokens", "batch_size", "limits", "window", "boundary_key", "align", "overlong",
        "drop_last",
    )  # fmt: skip

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
        check_sampler(sampler, has_own_order=True)
        self.settings: BudgetSettings = BudgetSettings(
            max_tokens=max_tokens, batch_size=batch_size, batch_size_fn=batch_size_fn,
            window=window, align=align, overlong=overlong, shuffle=shuffle, seed=seed, end=end,
        )  # fmt: skip
        lengths_N = as_lengths(lengths)
        self.align = align
        self.limits = self.settings.list_sizes(lengths_N, batch_size)
        self.boundary_key: Int64Array | None = None
        if boundary_key is not None:
            self.boundary_key = as_groups("boundary_key", boundary_key, len(lengths_N))
        super().__init__(
            lengths_N, None, batch_size if drop_last else None, drop_last, self.settings
        )
        self._set_place(rank, world_size)

    def _too_long(self, lengths_NR: Int64Array) -> BoolArray:  # noqa: ARG002
        return self.limits < 1  # without another call of `batch_size_fn`

    def plan(self, order_N: Int64Array, epoch: int) -> Lists:
        """Returns the batches of an epoch: step after step, one for each rank."""
        window, is_shuffled = self.settings.window, self.settings.shuffle
        if is_shuffled:
            window = min(window, -(-len(order_N) // 2))
        keys = self.boundary_key
        batches, windows_B = cut_epoch(
            order_N, self.lengths, np.maximum(self.limits, 1),
            np.zeros_like(self.lengths) if keys is None else keys, window=window,
            drop_last=bool(self.drop_last),
        )  # fmt: skip
        cut = cut_lists(batches, self.layout.multiple)
        # A part is of the window of the batch that it was cut from.
        windows_B = windows_B[np.searchsorted(batches.offsets, cut.offsets[:-1], "right") - 1]
        if not is_shuffled:
            return cut
        key = key_of("samplers.token_budget", self.settings.seed)
        return cut.reordered(shuffle_steps(windows_B, self.layout.num_ranks, key, epoch))
