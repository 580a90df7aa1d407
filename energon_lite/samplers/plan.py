"""An epoch of packs, planned from all lengths: which samples share a pack, and who gets which.

Axes: N samples, P packs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

# By way of the package, which imports a packer, and with it numba, when it is first used.
from energon_lite import packing
from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import check_sizes
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.order.permutation import Permutation

Algorithm = Literal[
    "best", "first_fit_decreasing", "best_fit_decreasing", "first_fit", "sequential"
]
Overlong = Literal["error", "drop", "alone"]
End = Literal["split", "pad", "drop"]

# One pack in a thousand is not worth the seconds that the search for it would take in each epoch.
_TOLERANCE = 0.001


@dataclass(frozen=True)
class PackSettings:
    """What the packs of an epoch depend on, besides the lengths; see `MultipackBatchSampler`."""

    capacity: int
    algorithm: Algorithm
    max_samples: int | None
    align: int
    overlong: Overlong
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        check_choice("algorithm", self.algorithm, get_args(Algorithm))
        check_choice("overlong", self.overlong, get_args(Overlong))
        if self.align > self.capacity > 0:
            raise ValueError(
                f"align={self.align} is above capacity={self.capacity}: nothing would fit"
            )

    @property
    def limit(self) -> int:
        """Tokens of the longest sample that fits a pack when it is aligned."""
        return self.capacity - self.capacity % max(self.align, 1)

    def check(self, lengths: npt.ArrayLike) -> Int64Array:
        """Returns the lengths as an array, shape (N,).

        Raises:
            TypeError: Not integers.
            ValueError: There are none, one is below 1, or one is too long and that is an error; or
                a setting is out of range.
        """
        array = np.asarray(lengths)
        if array.size == 0:
            raise ValueError("lengths is empty: there are no samples to pack.")
        cut = np.minimum(array, self.limit)
        check_sizes(cut, self.capacity, max_samples=self.max_samples, align=self.align)
        is_long = array > self.limit
        if self.overlong == "error" and is_long.any():
            index = int(is_long.argmax())
            aligned = f" (aligned to {self.align})" if self.align > 1 else ""
            raise ValueError(
                f"Sample {index} has length {array[index]}, above the capacity of {self.capacity}"
                f"{aligned}, as have {int(is_long.sum()) - 1:,} after it. Truncate or split such "
                "samples, raise the capacity, or use overlong='drop' or overlong='alone'."
            )
        return array.astype(np.int64)

    def pack(self, lengths_N: Int64Array) -> Lists:
        """Lists lengths that `check` gave; those above the limit alone."""
        # As long as a whole pack, a sample shares it with none, whatever the algorithm.
        lengths_N = np.minimum(lengths_N, self.limit)
        pack: Callable[..., Lists] = packing.pack_best
        settings: dict[str, Any] = {"max_samples": self.max_samples, "align": self.align}
        if self.algorithm == "best":
            settings["tolerance"] = _TOLERANCE
        else:
            pack = getattr(packing, self.algorithm)
        return pack(lengths_N, self.capacity, **settings)


@dataclass(frozen=True)
class EpochPlan:
    """The packs of an epoch, in the order in which they are given.

    Attributes:
        packs: P packs of sample indices.
        num_overlong: samples of the epoch that are longer than a pack.
        order_digest: of the order that a sampler gave; None without.
    """

    packs: Lists
    num_overlong: int
    order_digest: str | None


def plan_epoch(
    lengths_N: Int64Array,
    order: Int64Array | None,
    settings: PackSettings,
    epoch: int,
    multiple: int = 1,
) -> EpochPlan:
    """Lists the samples of an epoch.

    Args:
        lengths_N: shape (N,), from `PackSettings.check`.
        order: sample indices in the order of a sampler, any number; None for all samples, shuffled
            if the settings say so.
        settings: how to pack.
        epoch: number of the epoch; with the seed, it fixes what is shuffled.
        multiple: of which the number of packs is to be a multiple; see `cut_packs`.

    Raises:
        ValueError: All samples are left out, since they are longer than a pack.
    """
    order_digest = None if order is None else digest(order)
    key = key_of("samplers.multipack", settings.seed)
    if order is None:
        order = np.arange(len(lengths_N))
        if settings.shuffle:
            order = Permutation(len(order), key, epoch, 0)(order)
    is_long = lengths_N[order] > settings.limit
    num_overlong = int(is_long.sum())
    if settings.overlong == "drop" and num_overlong:
        order = order[~is_long]
    if not len(order):
        raise ValueError(
            f"epoch {epoch} has no sample: overlong='drop' leaves out all {num_overlong:,}, which "
            f"are above the capacity of {settings.capacity}. Truncate or split them, or raise it."
        )
    packs = settings.pack(lengths_N[order])
    packs = cut_packs(Lists(order[packs.indices], packs.offsets), multiple)
    if settings.shuffle:
        places = np.arange(len(packs))
        packs = packs.reordered(Permutation(len(packs), key, epoch, 1)(places))
    return EpochPlan(packs, num_overlong, order_digest)


def cut_packs(packs: Lists, multiple: int) -> Lists:
    """Cuts the packs of most samples into parts, so that there are a multiple of so many packs.

    As few as will do are cut. With fewer samples than packs that are needed, all stay as they are.

    Example:
        >>> cut_packs(Lists.from_lists([[0, 1, 2], [3], [4, 5]]), 4).tolist()
        [[0], [1, 2], [3], [4, 5]]
    """
    num_missing = -len(packs) % multiple
    if not num_missing or len(packs) + num_missing > len(packs.indices):
        return packs
    counts = np.diff(packs.offsets)
    largest = np.argsort(-counts, kind="stable")[:num_missing].tolist()
    parts = dict.fromkeys(largest, 1)
    heap = [(-float(counts[place]), place) for place in largest]
    for _ in range(num_missing):
        _, place = heap[0]
        parts[place] += 1
        heapq.heapreplace(heap, (-float(counts[place]) / parts[place], place))
    cuts = [
        packs.offsets[place] + counts[place] * part // number
        for place, number in parts.items()
        for part in range(1, number)
    ]
    return Lists(packs.indices, np.sort(np.concatenate([packs.offsets, cuts])).astype(np.int64))


@dataclass(frozen=True)
class Deal:
    """Which of an epoch's packs each rank's batches have: step after step, rank after rank.

    Attributes:
        first: packs done before; the first step begins with pack `first`.
        num_packs: P.
        batch_size: packs in a batch.
        world_size: number of ranks.
        num_whole: steps with `batch_size` packs for each rank.
        last_size: packs for each rank in one shorter step after them; 0 if there is none.

    Example:
        11 packs, 2 ranks, batches of 2, the end padded: rank 0 gets packs 0 1, 4 5, 8 9 and rank 1
        gets 2 3, 6 7, 10 0. With 9 packs, the last batches would be 8 and 0.
    """

    first: int
    num_packs: int
    batch_size: int
    world_size: int
    num_whole: int
    last_size: int

    @property
    def step_size(self) -> int:
        """Lists in a whole step."""
        return self.batch_size * self.world_size

    @property
    def num_batches(self) -> int:
        """Batches of each rank."""
        return self.num_whole + (self.last_size > 0)

    @property
    def end(self) -> int:
        """One after the last pack given; `num_packs` and those after it are 0, 1, ... again."""
        return self.first + self.num_whole * self.step_size + self.last_size * self.world_size

    def place(self, batch_index: int, rank: int) -> tuple[int, int]:
        """Returns the first pack of a batch, and how many it has."""
        size = self.batch_size if batch_index < self.num_whole else self.last_size
        return self.first + batch_index * self.step_size + rank * size, size

    def given_after(self, num_batches: int) -> int:
        """Returns how many packs of the epoch are done when each rank has given so many batches."""
        return min(self.first + num_batches * self.step_size, self.end, self.num_packs)


def deal_packs(
    num_packs: int,
    first: int,
    batch_size: int,
    world_size: int,
    *,
    drop_last: bool,
    end: End,
) -> Deal:
    """Deals packs `first`..`num_packs - 1` to ranks so that each gets as many in each step.

    Raises:
        ValueError: No rank would get any, of a whole epoch.
    """
    step = batch_size * world_size
    num_whole, rest = divmod(num_packs - first, step)
    if drop_last:
        rest = 0
    elif end != "drop":
        rest += -rest % world_size
    num_whole, rest = num_whole + rest // step, rest % step
    deal = Deal(first, num_packs, batch_size, world_size, num_whole, rest // world_size)
    if deal.num_batches == 0 and first == 0:
        why = (
            f"drop_last=True leaves out what is less than a step of {step:,} (batch_size="
            f"{batch_size} times world_size={world_size}). Use drop_last=False, or a smaller "
            "batch_size."
            if drop_last
            else f"end='drop' leaves out what is less than one for each of world_size={world_size}."
            " Use end='pad', or fewer ranks."
        )
        raise ValueError(f"Of an epoch of {num_packs:,} packs nothing would be given: {why}")
    return deal


def digest(array: Int64Array) -> str:
    """Returns a text by which two arrays can be told apart."""
    return blake2b(array.astype("<i8").tobytes(), digest_size=16).hexdigest()


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuses a value that is not one of `allowed`, with a `ValueError`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
