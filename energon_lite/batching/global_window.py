"""A plan that all ranks share: packs of about the same cost go into the same step.

Axes: P packs, S steps, K ranks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from energon_lite.batching.checks import at_least
from energon_lite.batching.costs import as_costs
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.seeds import UInt64Array, key_of, random_words

Remainder = Literal["pad", "drop", "ragged"]

NO_PACK = -1


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Which pack each rank has in each step, and what became of those that did not fit in.

    Every pack in 0..P-1 is in `steps` once, and once more for each time that `repeated` has it; or
    it is in `left_out`.

    Attributes:
        steps: shape (S, K); the pack of each rank in each step, -1 for none.
        repeated: packs that are there once more for each time that they are named here.
        left_out: packs that no rank has, ascending.
    """

    steps: Int64Array
    repeated: Int64Array
    left_out: Int64Array

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        return all(np.array_equal(a, vars(other)[name]) for name, a in vars(self).items())

    def __repr__(self) -> str:
        num_steps, num_ranks = self.steps.shape
        return (
            f"StepPlan({num_steps:,} steps of {num_ranks:,} ranks, {len(self.repeated):,} packs "
            f"repeated, {len(self.left_out):,} omitted)"
        )

    def costs(self, costs_P: npt.ArrayLike) -> Float64Array:
        """Returns what each rank has in each step, 0 where it has no pack.

        Args:
            costs_P: shape (P,); any cost of the packs.

        Returns:
            Shape (S, K), for `imbalance` and `idle_share`.

        Raises:
            TypeError: Not numbers.
            ValueError: Another shape, not P of them, or one is negative or not finite.
        """
        costs = as_costs(costs_P, "pack")
        num_packs = self.steps.size - (self.steps == NO_PACK).sum()
        num_packs += len(self.left_out) - len(self.repeated)
        if len(costs) != num_packs:
            raise ValueError(f"{len(costs):,} costs for a plan of {num_packs:,} packs.")
        return np.append(costs, 0.0)[self.steps]  # -1 takes the last


def global_window(
    costs_P: npt.ArrayLike,
    num_ranks: int,
    window_steps: int,
    seed: int,
    *,
    epoch: int = 0,
    remainder: Remainder = "pad",
) -> StepPlan:
    """Sorts windows of packs by cost, and cuts them into steps of neighbours.

    A window is the next `window_steps * num_ranks` packs of the argument; it keeps its packs.
    Steps of a window come in random order. Within `num_ranks` steps of neighbouring cost, each rank
    has each place, from the cheapest to the dearest, in turn. What becomes of a window depends on
    its own packs, the seed, the epoch and its number only. O(P log window) time.

    Packs are to come in random order: those of a packer that sorts go from long samples to short
    ones, and so would the epoch.

    Args:
        costs_P: shape (P,); the cost of each pack, in any unit.
        num_ranks: K.
        window_steps: steps in a window; 1 keeps the order of packs but for ranks. The imbalance
            falls about with 1 / window_steps: 64 make that of long documents a fiftieth.
        seed: the same on all ranks.
        epoch: with the seed, it fixes what is drawn.
        remainder: what becomes of P % K packs. `"pad"`: as many packs as are missing come once
            more, from the first on. `"drop"`: the last packs are dropped; all of them, if they are
            fewer than ranks. `"ragged"`: the cheapest of the last window make
            a step that comes last, in which some ranks have no pack.

    Raises:
        TypeError: Not numbers.
        ValueError: A cost is negative or not finite, `remainder` is another word, or a number is
            too small.

    Example:
        >>> global_window([3, 9, 4, 8, 1, 2], num_ranks=2, window_steps=3, seed=0).steps.tolist()
        [[0, 2], [1, 3], [5, 4]]
    """
    costs = as_costs(costs_P, "pack")
    num_ranks, epoch = at_least("num_ranks", num_ranks, 1), at_least("epoch", epoch, 0)
    window_steps = at_least("window_steps", window_steps, 1)
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder={remainder!r} is not one of {', '.join(get_args(Remainder))}")
    packs, repeated, left_out = _whole_steps(len(costs), num_ranks, remainder)
    window_steps = max(min(window_steps, len(packs) // num_ranks), 1)
    size = window_steps * num_ranks
    num_whole, num_windows = len(packs) // size, -(-len(packs) // size)
    per_window = -(-(window_steps + num_ranks) // 4) * 4  # whole blocks of Philox
    key = key_of("balance.global_window", operator.index(seed))
    words = random_words(key, epoch, size=num_windows * per_window).reshape(-1, per_window)
    whole = packs[: num_whole * size].reshape(num_whole, size)
    steps = [_cut(costs, whole, num_ranks, words[:num_whole])]
    if num_whole < num_windows:
        rest = packs[None, num_whole * size :]
        steps.append(_cut(costs, rest, num_ranks, words[num_whole:]))
    return StepPlan(np.concatenate(steps), repeated, left_out)


def _whole_steps(
    num_packs: int, num_ranks: int, remainder: Remainder
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Packs for whole steps, with `NO_PACK` among the last; those repeated, and those dropped."""
    packs = np.arange(num_packs)
    num_missing = -num_packs % num_ranks
    if remainder == "drop":
        packs, left_out = np.split(packs, [num_packs - num_packs % num_ranks])
        return packs, left_out[:0], left_out
    repeated = packs[:0]
    if remainder == "pad" and num_packs:
        repeated = np.resize(packs, num_missing)
    added = repeated if remainder == "pad" else np.full(num_missing, NO_PACK)
    return np.append(packs, added), repeated, packs[:0]


def _cut(
    costs: Float64Array, packs_WM: Int64Array, num_ranks: int, words: UInt64Array
) -> Int64Array:
    """Makes the steps of windows, each a row of M packs; shape (number of all steps, K).

    The first K random words of a window are for its ranks, the next for its steps.
    """
    num_windows, num_packs = packs_WM.shape
    num_steps = num_packs // num_ranks
    keys_WM = np.append(costs, -1.0)[packs_WM]  # no pack is cheaper than any
    order_WM = np.argsort(keys_WM, axis=1, kind="stable")
    sorted_WSK = np.take_along_axis(packs_WM, order_WM, axis=1).reshape(-1, num_steps, num_ranks)
    # The step at place s of a window, in sorted order, starts with rank s. Ranks are renamed, or
    # the first would always have the cheapest pack of all.
    places = np.arange(num_ranks) - np.arange(num_steps)[:, None]
    turned_WSK = np.take_along_axis(sorted_WSK, places[None] % num_ranks, axis=2)
    ranks_WK = np.argsort(words[:, :num_ranks], axis=1, kind="stable")
    turned_WSK = np.take_along_axis(turned_WSK, ranks_WK[:, None], axis=2)
    steps_WS = np.argsort(words[:, num_ranks : num_ranks + num_steps], axis=1, kind="stable")
    if NO_PACK in packs_WM[-1:]:  # then in the first step when sorted; it comes last
        steps_WS[-1] = np.append(steps_WS[-1][steps_WS[-1] > 0], 0)
    shuffled = np.take_along_axis(turned_WSK, steps_WS[:, :, None], axis=1)
    return shuffled.reshape(num_windows * num_steps, num_ranks)
