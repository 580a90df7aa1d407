"""The batch sampler of packs: samples share packs, and packs batches.

Axes: N samples, R resources, P packs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

# By way of the package, which imports a packer, and with it numba, when it is first used.
from energon_lite import packing as packers
from energon_lite.batching.balance_orders import NO_PACK, balanced_steps
from energon_lite.batching.costs import CostModel
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Algorithm, Packing
from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import did_you_mean
from energon_lite.core.seeds import key_of
from energon_lite.extras.samplers.epoch_batches import cut_lists
from energon_lite.extras.samplers.epoch_sampler import (
    End,
    EpochBatchSampler,
    EpochSettings,
    Overlong,
    also_called,
    as_lengths,
    either,
)
from energon_lite.extras.samplers.sample_order import check_sampler

# One pack in a thousand is not worth the seconds that the search for it would take in each epoch.
_TOLERANCE = 0.001
# Arguments of axolotl's that set how its packing is computed, not its result, and their defaults.
_IGNORED: dict[str, Any] = {
    "group_size": 100_000, "mp_start_method": "fork", "num_count_samples": 4,
    "num_processes": None, "packing_efficiency_estimate": 1.0, "safe_mode": True,
}  # fmt: skip
_PACKERS = {"best": "pack_best", "streaming": "pack_stream"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackSettings(Packing, EpochSettings):
    """A sampler of packs: what a sampler can do of a task encoder's packing."""

    algorithm: Algorithm = "best"
    overlong: Overlong = "error"
    balance: Literal["global_window"] | None = None
    lengths: str | None = "all"  # which a global window needs, and samplers have


class MultipackBatchSampler(EpochBatchSampler):
    """Puts samples into packs and packs into batches, the same on all ranks of a run.

    A batch is a list of packs, a pack a list of sample indices, as with axolotl's class of this
    name. There are two ways to call it:

        MultipackBatchSampler(lengths, capacity, batch_size)
        MultipackBatchSampler(RandomSampler(dataset), lengths=lengths, batch_size=4,
                              batch_max_len=2048, drop_last=True)  # axolotl's

    In the first, seed and epoch fix the order of samples, and each rank gets its part. In the
    second, the order is that of `sampler`, drawn once for each epoch, at the first `len()` or
    iteration, and must be the same on each rank; all batches come on every rank. Where accelerate
    (or the Trainer of transformers) shards batches, both yield each process its part.

    Call `set_epoch` before each epoch, as for `DistributedSampler`. `DataLoader(dataset,
    batch_sampler=...)` calls `dataset[pack]` for each pack of a batch, with a list of indices.

    Args:
        lengths: shape (N,); tokens of each sample, at least 1. With several resources shape (N, R),
            its columns in the order of `capacity`, or a dict of columns.
        capacity: tokens a pack can contain; or a dict of what it can contain of each resource, with
            an entry "tokens".
        batch_size: packs in a batch.
        algorithm: "best" takes the fewest packs of several methods, and stops at 0.1 % above the
            least possible; the others are functions of `energon_lite.packing`.
        max_samples: samples in a pack at most; None for any number, with `sampler` 200.
        align: lengths are rounded up to a multiple of this; a number, or one for each resource.
        overlong: what becomes of samples above the capacity: "error"; "drop"; or "alone", each in
            a pack by itself that is too large. `num_overlong` counts them.
        seed: another value yields other epochs.
        shuffle: whether samples are shuffled before packing, and packs after it. Samples of a
            length that is unique may meet the same others again, but with "first_fit" and
            "sequential". With `sampler` packs alone are shuffled, and not if they are "sequential".
            Without, sorted packing has long samples first.
        drop_last: whether there is no last batch of fewer packs. By default so with `sampler`.
        end: how ranks get equally many packs in the last step: "split" cuts a few packs in parts,
            so that every sample comes once, also with `drop_last`; if there are too few samples
            for that, it is as "pad". "pad" repeats packs from the start of the epoch, fewer than
            there are ranks, or with `drop_last` drops them; "drop" drops some. `num_repeated` and
            `num_dropped` count their samples.
        rank: index of this data-parallel process, passed together with `world_size`. By default as
            in `torch.distributed`, with `sampler` 0 of 1. Omit both where accelerate shards
            batches.
        world_size: number of data-parallel processes.
        flatten: whether a batch is one list of indices, without bounds of packs.
        balance: "global_window" orders packs so that all ranks have packs of similar cost in the
            same step: those of `balance_window` steps are sorted by cost. None for random order.
        balance_window: steps that are sorted together; more balance better.
        cost: with `balance`, an `energon_lite.balance.CostModel`; tiles are the second resource.
        sampler: yields the order of samples, or of some of them.
        batch_max_len: another name of `capacity`.
        bin_size: another name of `max_samples`.
        sequential: the same as `algorithm="sequential"`.
        **ignored: axolotl's `group_size`, `num_processes`, `mp_start_method`, `num_count_samples`,
            `packing_efficiency_estimate` and `safe_mode`, which have no effect. All of axolotl's
            arguments may be positional, in its order.

    Attributes:
        epoch: as `set_epoch` or `load_state_dict` set it.

    Raises:
        TypeError: An argument is missing, passed twice, unknown, or not an integer.
        ValueError: There are no lengths; one is below 1, or too long; a setting is out of range.
            Iteration and `len()` raise it, too, if the packs make no batch.

    Example:
        >>> sampler = MultipackBatchSampler([6, 5, 4, 3, 2], capacity=10, batch_size=2)
        >>> len(sampler), sampler.efficiency()
        (1, 1.0)
    """

    _name, _unit = "multipack", "packs"
    _saved = (
        "capacity", "algorithm", "max_samples", "align", "overlong", "balance", "balance_window",
        "cost",
    )  # fmt: skip

    @also_called(
        "sampler", "batch_size", "batch_max_len", "lengths", "packing_efficiency_estimate",
        "drop_last", "num_count_samples", "sequential", "group_size", "bin_size", "num_processes",
        "safe_mode", "mp_start_method",
    )  # fmt: skip
    def __init__(
        self,
        lengths: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        capacity: int | Mapping[str, int] | None = None,
        batch_size: int = 1,
        *,
        algorithm: Algorithm | None = None,
        max_samples: int | None = None,
        align: int | Mapping[str, int] = 1,
        overlong: Overlong = "error",
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        end: End = "split",
        rank: int | None = None,
        world_size: int | None = None,
        flatten: bool = False,
        balance: Literal["global_window"] | None = None,
        balance_window: int = 64,
        cost: CostModel | None = None,
        sampler: Iterable[int] | None = None,
        batch_max_len: int | None = None,
        bin_size: int | None = None,
        sequential: bool = False,
        **ignored: Any,
    ) -> None:
        _check_arguments(ignored, lengths, sampler)
        if sequential and algorithm not in (None, "sequential"):
            raise ValueError(f"sequential=True contradicts algorithm={algorithm!r}; pass one.")
        capacity = either("capacity", capacity, "batch_max_len", batch_max_len)
        if capacity is None:
            raise TypeError("capacity is missing: how many tokens can a pack contain?")
        max_samples = either("max_samples", max_samples, "bin_size", bin_size)
        algorithm, has_sampler = "sequential" if sequential else algorithm, sampler is not None
        self.settings: PackSettings = PackSettings(
            capacity=capacity, align=align, overlong=overlong, algorithm=algorithm or "best",
            max_samples=200 if max_samples is None and has_sampler else max_samples,
            balance=balance, balance_window=balance_window, cost=cost, seed=seed, end=end,
            shuffle=not (has_sampler and algorithm == "sequential") if shuffle is None else shuffle,
        )  # fmt: skip
        self.flatten, self._is_nested = flatten, not flatten
        vars(self).update(_IGNORED | ignored)
        super().__init__(
            _columns_of(lengths, self.settings), sampler, batch_size,
            has_sampler if drop_last is None else drop_last, self.settings,
        )  # fmt: skip
        self._set_place(rank, world_size)

    def plan(self, order_N: Int64Array, epoch: int) -> Lists:
        """Returns the packs of an epoch: packed, cut for the ranks, shuffled, and balanced."""
        settings = self.settings
        lengths_NR = self.lengths.reshape(len(self.lengths), -1)
        # An overlong sample, as large as a whole pack, shares it with none.
        is_overlong = self._is_overlong[order_N, None]
        sizes_NR = np.where(is_overlong, settings.limits, lengths_NR[order_N]).astype(np.int64)
        limits: dict[str, Any] = {"max_samples": settings.max_samples, "align": settings.alignments}
        if settings.algorithm == "best":
            limits["tolerance"] = _TOLERANCE
        pack = getattr(packers, _PACKERS.get(settings.algorithm, settings.algorithm))
        packs: Lists = pack(sizes_NR, settings.capacities, **limits)
        packs = cut_lists(Lists(order_N[packs.indices], packs.offsets), self.layout.multiple)
        if settings.shuffle:
            packs = packs.reordered(self.permutation(len(packs), epoch, 1))
        if settings.balance:
            steps = balanced_steps(
                settings.cost.costs(packs, lengths_NR), self.layout.num_ranks,
                settings.balance_window, key_of("samplers.balance", settings.seed), epoch,
            )  # fmt: skip
            packs = packs.reordered(steps[steps != NO_PACK])
        return packs

    # Axolotl's attributes. Numbers of tokens are those of one epoch: of all ranks.

    def _sizes_yielded(self) -> Int64Array:
        """Returns the tokens of each pack that is left, over all ranks."""
        packs = self._planned().lists
        sizes_P = packs.sizes(self.lengths.reshape(len(self.lengths), -1)[:, 0])
        sizes: Int64Array = sizes_P[self._rows().ravel() % len(packs)]
        return sizes

    def efficiency(self) -> float:
        """Returns the share of packs' room for tokens that is filled, in 0..1, over all ranks.

        Padding by `align` counts as empty, a pack above the capacity as full. 1 if nothing is left.
        """
        slots = self.total_token_slots
        return self.total_tokens_used / slots if slots else 1.0

    @property
    def batch_max_len(self) -> int:
        """Tokens a pack can contain: `capacity`."""
        return self.settings.tokens

    @property
    def total_tokens_used(self) -> int:
        """Tokens of the packs of this epoch, over all ranks."""
        return int(self._sizes_yielded().sum())

    @property
    def total_token_slots(self) -> int:
        """Tokens that there is room for in these packs; in one that is too large, as it has."""
        return int(np.maximum(self._sizes_yielded(), self.settings.tokens).sum())


def _check_arguments(ignored: Mapping[str, Any], lengths: object, sampler: object) -> None:
    """Warns of arguments without effect; refuses unknown ones, and orders that make no sense."""
    for name in ignored.keys() - _IGNORED.keys():
        known = [*inspect.signature(MultipackBatchSampler).parameters][:-1]
        raise TypeError(
            f"MultipackBatchSampler has no argument {name!r}."
            + did_you_mean(name, [*known, *_IGNORED])
        )
    if ignored:
        _log.warning("MultipackBatchSampler ignores %s.", ", ".join(sorted(ignored)))
    if isinstance(lengths, Sampler):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}. With a sampler, pass the arguments of "
            "axolotl's class: sampler, batch_size, batch_max_len, lengths. If Lightning puts it "
            "there, use Trainer(use_distributed_sampler=False)."
        )
    check_sampler(sampler)


def _columns_of(lengths: Any, settings: PackSettings) -> Int64Array:
    """Returns lengths of shape (N,), or (N, R) with columns in the order of the resources."""
    resources = settings.resources
    if isinstance(settings.capacity, Mapping) and not isinstance(lengths, Mapping):
        rows = as_lengths(lengths, 1, len(resources)).reshape(len(lengths), -1)
        lengths = dict(zip(settings.capacity, rows.T, strict=True))
    if isinstance(lengths, Mapping):
        if set(lengths) != set(resources):
            raise ValueError(
                f"lengths has {', '.join(map(str, lengths))}, but capacity {', '.join(resources)}"
            )
        columns = [np.asarray(lengths[name]) for name in resources]
        lengths = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    return as_lengths(lengths, 1, len(resources))
