"""Which limits on tiles and tokens waste the least work: a table of pairs.

Axes: N samples, P packs, K ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from energon_lite.batching.checks import at_least
from energon_lite.batching.costs import CostModel
from energon_lite.batching.fit import first_fit_decreasing
from energon_lite.batching.global_window import global_window
from energon_lite.batching.prepare_epoch import stacked
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.order.permutation import Permutation

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

    def row(self) -> tuple[str, ...]:
        """Returns the cells of the table."""
        shares = (self.tiles_filled, self.tokens_filled, self.idle_unsorted, self.wasted)
        return (
            str(self.max_tiles), f"{self.max_tokens:,}", f"{self.num_packs:,}",
            *(f"{100 * share:.2f} %" for share in shares),
        )  # fmt: skip


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
        rows = [_HEADINGS, *(pair.row() for pair in self.pairs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        head = f"{self.num_samples:,} samples, {self.num_ranks} ranks"
        return "\n".join([head, *lines])


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
        _tried(lengths_NR, limits, model, step_cost, *order)
        for limits in product(all_tiles, all_tokens)
    ]
    pairs.sort(key=lambda pair: (pair.wasted, pair.num_packs, pair.max_tiles, pair.max_tokens))
    return CapacityTable(tuple(pairs), len(lengths_NR), num_ranks)


def _tried(
    lengths_NR: Int64Array,
    limits: tuple[int, int],
    model: CostModel,
    step_cost: float,
    num_ranks: int,
    window_steps: int,
    seed: int,
) -> CapacityPair:
    max_tiles, max_tokens = limits
    capacity = (max_tokens, max_tiles)
    packs = first_fit_decreasing(lengths_NR, capacity)
    # In random order: packs of a packer that sorts would fill windows with like ones.
    places = Permutation(len(packs), key_of("balance.capacities", seed))
    costs = model.costs(packs, lengths_NR)[places(np.arange(len(packs)))]
    plan = global_window(costs, num_ranks, window_steps, seed, remainder="ragged")
    slowest = float(plan.costs(costs).max(axis=1).sum()) + step_cost * len(plan)
    tokens_filled, tiles_filled = np.asarray(packs.efficiency(lengths_NR, capacity)).tolist()
    return CapacityPair(
        max_tiles,
        max_tokens,
        len(packs),
        tiles_filled,
        tokens_filled,
        idle_unsorted=_idle_unsorted(costs, num_ranks),
        wasted=_share_missing(float(costs.sum()), num_ranks * slowest),
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
