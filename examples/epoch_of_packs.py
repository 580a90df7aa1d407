"""Packs pictures cut into tiles under limits on tiles and tokens, in steps of equal ranks.

    python examples/epoch_of_packs.py

For several pairs of limits it prints how many packs an epoch has, how full they are, and the share
of time in which ranks wait for the slowest, with packs in random order and in balanced steps. Take
the limits that waste the least, with what a step costs besides its packs.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from energon_lite.balance import CostModel, StepPlan, global_window, idle_share
from energon_lite.packing import Packs, first_fit_decreasing

Int64Array = npt.NDArray[np.int64]

NUM_RANKS, WINDOW_STEPS = 8, 64
# The time of a tile in the vision tower is that of 300 tokens in the language model.
MODEL = CostModel(token=1, tile=300)


def made_up_lengths(num_samples: int) -> Int64Array:
    """Returns tokens and tiles of samples, shape (N, 2)."""
    rng = np.random.default_rng(0)
    tiles = rng.choice([1, 3, 4, 5], num_samples, p=[0.1, 0.34, 0.01, 0.55])
    return np.stack([tiles * 256 + rng.integers(20, 400, num_samples), tiles], axis=1)


def epoch_of_packs(
    lengths_NR: Int64Array, limits: tuple[int, int], seed: int = 0
) -> tuple[Packs, StepPlan]:
    """Returns the packs of an epoch, and which pack each rank has in each step.

    Samples and packs are shuffled, because packs of sorted samples would come sorted by cost.
    """
    rng = np.random.default_rng(seed)
    order_N = rng.permutation(len(lengths_NR))
    packs = first_fit_decreasing(lengths_NR[order_N], limits)
    packs = Packs(order_N[packs.indices], packs.offsets).reordered(rng.permutation(len(packs)))
    costs_P = MODEL.costs(packs, lengths_NR)
    return packs, global_window(costs_P, NUM_RANKS, WINDOW_STEPS, seed, remainder="drop")


def main() -> None:
    lengths_NR = made_up_lengths(5_000)
    print(f"{len(lengths_NR):,} samples, {NUM_RANKS} ranks")
    print("tiles  tokens   packs  tiles full  tokens full  idle, random  idle, balanced")
    for max_tiles, max_tokens in product([9, 18, 30], [4_096, 6_016, 8_192]):
        limits = (max_tokens, max_tiles)
        packs, plan = epoch_of_packs(lengths_NR, limits)
        costs_P = MODEL.costs(packs, lengths_NR)
        unsorted_SK = costs_P[: plan.steps.size].reshape(-1, NUM_RANKS)
        tokens_full, tiles_full = np.asarray(packs.efficiency(lengths_NR, limits)).tolist()
        idle = idle_share(unsorted_SK), idle_share(plan.costs(costs_P))
        print(
            f"{max_tiles:5}  {max_tokens:6,}  {len(packs):6,}  {tiles_full:10.1%}"
            f"  {tokens_full:11.1%}  {idle[0]:12.1%}  {idle[1]:14.1%}"
        )


if __name__ == "__main__":
    main()
