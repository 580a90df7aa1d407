"""Packs with limits on tiles and tokens: an epoch in balanced steps, and which limits waste least.

Axes: N samples, P packs, S steps, K ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import product
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from energon_lite.batching.balance_orders import Remainder, StepPlan, global_window
from energon_lite.batching.costs import CostModel
from energon_lite.batching.fit import first_fit_decreasing
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import at_least
from energon_lite.batching.sizes import MAX_CAPACITY, as_integers, check_sizes
from energon_lite.batching.stream import pack_stream
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.core.tables import table_lines
from energon_lite.order.permutation import Permutation

Oversize = Literal["error", "drop"]

# Cheap ones first. More buffered samples are not better: those that fit badly pile up. Where one
# resource is filled by few large samples, longest first is best.
_PACKERS: dict[str, Callable[[Int64Array, tuple[int, int]], Lists]] = {
    "first-fit decreasing": first_fit_decreasing,
    **{f"stream of {size}": partial(pack_stream, buffer_size=size) for size in (16, 32, 64)},
}
_DRY_RUN_SAMPLES = 4096
# The last packs of so few samples are less full, by chance: what is as good is taken as equal.
_DRY_RUN_TOLERANCE = 0.001


@dataclass(frozen=True, eq=False)
class BalancedEpoch:
    """Packs and steps of an epoch.

    Every sample is in one pack or in `oversize`; every pack is in the plan's steps, or named there
    as dropped.

    Attributes:
        packs: P packs, in random order.
        plan: which pack each rank has in each step.
        oversize: samples that are dropped, as they fit no pack, ascending.
        packer: the packer that the dry run chose.
        tiles: shape (P,), of each pack; what OmniBal calls `vit_num`.
        tokens: shape (P,), of each pack.
    """

    packs: Lists
    plan: StepPlan
    oversize: Int64Array
    packer: str
    tiles: Int64Array = field(repr=False)
    tokens: Int64Array = field(repr=False)


def balance_epoch(
    vit_num: npt.ArrayLike,
    token_num: npt.ArrayLike,
    *,
    max_tiles: int,
    max_tokens: int,
    num_ranks: int,
    window_steps: int = 64,
    model: CostModel | None = None,
    seed: int = 0,
    epoch: int = 0,
    oversize: Oversize = "error",
    remainder: Remainder = "pad",
) -> BalancedEpoch:
    """Does what OmniBal's iterative sampling and filtering (ISF) does: similar packs in every step.

    Samples are shuffled, packed by the packer that needs the fewest packs in a dry run on some of
    them, the packs shuffled, and ordered by `global_window`. About 30 ms for 70,000 samples.

    Args:
        vit_num: shape (N,); tiles of each sample, 0 for text.
        token_num: shape (N,); tokens of each sample.
        max_tiles: OmniBal's Q_v; tiles of a pack at most.
        max_tokens: OmniBal's Q_t; tokens of a pack at most.
        num_ranks: K; data-parallel ranks.
        window_steps: steps among which packs of similar cost are looked for.
        model: what makes packs similar; None for the tiles, then the tokens.
        seed: the same on all ranks.
        epoch: with the seed, it fixes what is shuffled.
        oversize: what becomes of samples that fit no pack: `"error"`, or `"drop"` and name them.
        remainder: what becomes of packs that make no whole step; see `global_window`.

    Raises:
        TypeError: Not integers.
        ValueError: A sample is oversize and that is an error; a shape or a limit is wrong; or a
            sample has neither tokens nor tiles. Names the first such sample.

    Example:
        >>> balanced = balance_epoch(
        ...     [1, 2, 2, 1], [70, 30, 60, 40], max_tiles=3, max_tokens=100, num_ranks=2
        ... )
        >>> sorted(balanced.tokens.tolist()), balanced.plan.steps.shape
        ([100, 100], (1, 2))
    """
    limits = (at_least("max_tokens", max_tokens, 1), at_least("max_tiles", max_tiles, 1))
    epoch = at_least("epoch", epoch, 0)
    if oversize not in get_args(Oversize):
        raise ValueError(f"oversize={oversize!r} is not one of {', '.join(get_args(Oversize))}")
    lengths_NR = stacked(vit_num, token_num)
    is_over = (lengths_NR > limits).any(axis=1)
    if oversize == "error" and is_over.any():
        _refuse_oversize(lengths_NR, limits)
    packs, packer = _pack(lengths_NR, np.flatnonzero(~is_over), limits, (seed, epoch))
    # A whole pack of tokens weighs less than a tile: tiles first.
    model = CostModel(token=1, tile=max_tokens + 1) if model is None else model
    costs = model.costs(packs, lengths_NR)
    plan = global_window(costs, num_ranks, window_steps, seed, epoch=epoch, remainder=remainder)
    tokens, tiles = packs.sizes(lengths_NR).T
    return BalancedEpoch(packs, plan, np.flatnonzero(is_over), packer, tiles, tokens)


def stacked(vit_num: npt.ArrayLike, token_num: npt.ArrayLike) -> Int64Array:
    """Returns tokens and tiles as one array, shape (N, 2).

    Raises:
        TypeError: Not integers.
        ValueError: They are not both of shape (N,); a number is negative, or both of a sample 0.
    """
    columns = [as_integers("token_num", token_num), as_integers("vit_num", vit_num)]
    shapes = [column.shape for column in columns]
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise ValueError(
            f"token_num has shape {shapes[0]}, vit_num {shapes[1]}; give both of every sample, in "
            "shape (N,)."
        )
    lengths_NR = np.stack([column.astype(np.int64) for column in columns], axis=1)
    return check_sizes(lengths_NR, [MAX_CAPACITY] * 2).lengths


def _refuse_oversize(lengths_NR: Int64Array, limits: tuple[int, int]) -> None:
    """Names the first sample that fits no pack, with a `ValueError`."""
    is_over = (lengths_NR > limits).any(axis=1)
    index = int(is_over.argmax())
    tokens, tiles = lengths_NR[index].tolist()
    raise ValueError(
        f"Sample {index} has {tokens:,} tokens and {tiles} tiles, above {limits[0]:,} tokens or "
        f"{limits[1]} tiles, as have {int(is_over.sum()) - 1:,} after it. Truncate or split such "
        "samples, raise the limits, or use oversize='drop'."
    )


def _pack(
    lengths_NR: Int64Array, samples: Int64Array, limits: tuple[int, int], seeds: tuple[int, int]
) -> tuple[Lists, str]:
    """Packs some samples, and shuffles the packs; names the packer, too."""
    seed, epoch = seeds
    key = key_of("balance.epoch", operator.index(seed))
    samples = samples[Permutation(len(samples), key, epoch, 0)(np.arange(len(samples)))]
    shuffled = lengths_NR[samples]
    packer = _choose_packer(shuffled, limits)
    packs = _PACKERS[packer](shuffled, limits)
    order = Permutation(len(packs), key, epoch, 1)(np.arange(len(packs)))
    return Lists(samples[packs.indices], packs.offsets).reordered(order), packer


def _choose_packer(shuffled_NR: Int64Array, limits: tuple[int, int]) -> str:
    """Names the cheapest packer that is as good as the best on the first samples."""
    some = shuffled_NR[:_DRY_RUN_SAMPLES]
    needed = {name: len(pack(some, limits)) for name, pack in _PACKERS.items()}
    enough = min(needed.values()) * (1 + _DRY_RUN_TOLERANCE)
    return next(name for name, num in needed.items() if num <= enough)


_NUM_VALUES = 10
_HEADINGS = ("tiles", "tokens", "packs", "tiles full", "tokens full", "idle, unsorted", "wasted")


@dataclass(frozen=True)
class CapacityPair:
    """What comes of one pair of limits.

    Attributes:
        max_tiles: Q_v.
        max_tokens: Q_t.
        num_packs: P, by first-fit decreasing.
        tiles_filled: share of all packs' room for tiles that is filled.
        tokens_filled: the same of tokens.
        idle_unsorted: share of time in which ranks wait if packs come in random order.
        wasted: share of time in which ranks wait in the order of `global_window`, or that steps
            take besides what their packs cost.
    """

    max_tiles: int
    max_tokens: int
    num_packs: int
    tiles_filled: float
    tokens_filled: float
    idle_unsorted: float
    wasted: float


@dataclass(frozen=True)
class CapacityTable:
    """Pairs of limits, those that waste the least first; `str` returns a table.

    Attributes:
        pairs: as ranked.
        num_samples: N.
        num_ranks: K.
    """

    pairs: tuple[CapacityPair, ...]
    num_samples: int
    num_ranks: int

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[CapacityPair]:
        return iter(self.pairs)

    def __getitem__(self, index: int) -> CapacityPair:
        return self.pairs[index]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEADINGS]
        for tiles, tokens, packs, *shares in map(astuple, self.pairs):
            percents = (f"{100 * share:.2f} %" for share in shares)
            rows.append((str(tiles), f"{tokens:,}", f"{packs:,}", *percents))
        head = f"{self.num_samples:,} samples, {self.num_ranks} ranks"
        return "\n".join([head, *table_lines(rows, num_left=0)])


def search_capacities(
    vit_num: npt.ArrayLike,
    token_num: npt.ArrayLike,
    *,
    tiles: int | Sequence[int],
    tokens: int | Sequence[int],
    num_ranks: int,
    model: CostModel,
    step_cost: float = 0.0,
    window_steps: int = 64,
    seed: int = 0,
) -> CapacityTable:
    """Packs with each pair of limits; ranks the pairs by the work that they waste.

    Packs are those of first-fit decreasing; `balance_epoch` may find better ones. A hundred pairs
    take 2 seconds for 70,000 samples. Without `step_cost`, small packs are as good as large ones.

    Args:
        vit_num: shape (N,); tiles of each sample, 0 for text.
        token_num: shape (N,); tokens of each sample.
        tiles: limits on tiles to try; or the largest, for ten in even steps from the sample with
            the most tiles on.
        tokens: the same for tokens.
        num_ranks: K.
        model: what a pack costs.
        step_cost: what a step costs besides, in the unit of `model`: such as summing gradients.
        window_steps: steps among which packs of similar cost are looked for; see `global_window`.
        seed: of the order of packs.

    Returns:
        All pairs. Of those that waste the same, the fewest packs first.

    Raises:
        TypeError: Not integers.
        ValueError: There is no sample or no limit, a limit is below what some sample needs, or a
            number is out of range.

    Example:
        >>> limits = {"tiles": [2, 3], "tokens": [100]}
        >>> print(search_capacities([1, 2], [50, 60], **limits, num_ranks=1, model=CostModel()))
        2 samples, 1 ranks
        tiles  tokens  packs  tiles full  tokens full  idle, unsorted  wasted
            2     100      2     75.00 %      55.00 %          0.00 %  0.00 %
            3     100      2     50.00 %      55.00 %          0.00 %  0.00 %
    """
    num_ranks = at_least("num_ranks", num_ranks, 1)
    if not 0 <= step_cost < float("inf"):
        raise ValueError(f"step_cost is {step_cost}; it must be at least 0, finite.")
    lengths_NR = stacked(vit_num, token_num)
    if not len(lengths_NR):
        raise ValueError("vit_num and token_num are empty: there are no samples to pack.")
    all_tokens = _limits_to_try("tokens", tokens, lengths_NR[:, 0])
    all_tiles = _limits_to_try("tiles", tiles, lengths_NR[:, 1])
    order = (num_ranks, window_steps, operator.index(seed))
    pairs = [
        _tried(lengths_NR, limits, model, step_cost, order)
        for limits in product(all_tiles, all_tokens)
    ]
    pairs.sort(key=lambda pair: (pair.wasted, pair.num_packs, pair.max_tiles, pair.max_tokens))
    return CapacityTable(tuple(pairs), len(lengths_NR), num_ranks)


def _tried(
    lengths_NR: Int64Array, limits: tuple[int, int], model: CostModel, step_cost: float,
    order: tuple[int, int, int],
) -> CapacityPair:  # fmt: skip
    (max_tiles, max_tokens), (num_ranks, window_steps, seed) = limits, order
    capacity = (max_tokens, max_tiles)
    packs = first_fit_decreasing(lengths_NR, capacity)
    # In random order: packs of a packer that sorts would fill windows with like ones.
    places = Permutation(len(packs), key_of("balance.capacities", seed))
    costs = model.costs(packs, lengths_NR)[places(np.arange(len(packs)))]
    plan = global_window(costs, num_ranks, window_steps, seed, remainder="ragged")
    slowest = float(plan.costs(costs).max(axis=1).sum()) + step_cost * len(plan)
    tokens_filled, tiles_filled = np.asarray(packs.efficiency(lengths_NR, capacity)).tolist()
    idle = _idle_unsorted(costs, num_ranks)
    wasted = _share_missing(float(costs.sum()), num_ranks * slowest)
    return CapacityPair(
        max_tiles, max_tokens, len(packs), tiles_filled, tokens_filled, idle, wasted
    )


def _limits_to_try(name: str, limits: int | Sequence[int], needed_N: Int64Array) -> list[int]:
    """The limits to try, all of them enough for every sample."""
    largest = int(needed_N.max())
    if np.ndim(limits) == 0:
        highest = at_least(name, limits, 1)  # type: ignore[arg-type]
        lowest = max(min(largest, highest), 1)
        steps = range(_NUM_VALUES)
        values = [lowest + (highest - lowest) * i // (_NUM_VALUES - 1) for i in steps]
    else:
        values = [at_least(name, value, 1) for value in limits]  # type: ignore[union-attr]
    values = sorted(set(values))
    if not values:
        raise ValueError(f"{name} is empty; give at least one limit.")
    if values[0] < largest:
        raise ValueError(
            f"{name} has {values[0]:,}, but sample {int(needed_N.argmax())} needs {largest:,}. "
            "Truncate, split or drop such samples, or raise the limit."
        )
    return values


def _idle_unsorted(costs_P: Float64Array, num_ranks: int) -> float:
    """1 - mean / expected largest of K packs drawn at random, each from all.

    The largest of K draws is among the cheapest i of P with probability (i / P)**K.
    """
    reached = (np.arange(len(costs_P) + 1) / len(costs_P)) ** num_ranks
    largest = float((np.sort(costs_P) * np.diff(reached)).sum())
    return _share_missing(float(costs_P.mean()), largest)


def _share_missing(part: float, whole: float) -> float:
    # Not below 0 by what was rounded.
    return max(0.0, 1 - part / whole) if whole else 0.0
