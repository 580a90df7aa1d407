"""A sampler of packs for map-style datasets: its epochs, against the way axolotl makes one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import RandomSampler

from benchmarks.measure import Count, Entry, Figure, in_turn
from benchmarks.test_packing import AXOLOTL, scanning_first_fit, text_lengths
from energon_lite.balance import CostModel, imbalance
from energon_lite.extras.samplers import MultipackBatchSampler
from energon_lite.extras.samplers.best import lower_bound

NUM, CAPACITY, BATCH_SIZE = 1_000_000, 4096, 8
GROUP = f"An epoch of packs from {NUM:,} lengths (as for packing), capacity {CAPACITY:,}"


def as_axolotl_does(lengths: Any) -> list[list[list[int]]]:
    """An epoch's batches: order, packs of positions in it, packs of samples, all as lists."""
    order = list(RandomSampler(range(len(lengths))))
    bins = [[order[i] for i in group] for group in scanning_first_fit(lengths[order], CAPACITY)]
    return [bins[first : first + BATCH_SIZE] for first in range(0, len(bins), BATCH_SIZE)]


def test_epoch(benchmark: Any, entries: list[Entry]) -> None:
    lengths = text_lengths(NUM, CAPACITY)
    settings: dict[str, Any] = {"lengths": lengths, "capacity": CAPACITY, "batch_size": BATCH_SIZE}
    best, ordered = (
        MultipackBatchSampler(**settings, algorithm=name) for name in ("best", "first_fit")
    )
    drop_in = MultipackBatchSampler(**settings, sampler=RandomSampler(range(NUM)))

    def plan(sampler: MultipackBatchSampler) -> int:
        sampler.set_epoch(sampler.epoch + 1)
        return len(sampler)

    def plan_and_iterate(sampler: MultipackBatchSampler) -> None:
        num_planned = plan(sampler)
        assert sum(1 for _ in sampler) == num_planned

    def theirs() -> None:
        for _ in as_axolotl_does(lengths):
            pass

    found = in_turn(
        benchmark,
        {
            "planned": lambda: plan(best),
            "iterated": lambda: plan_and_iterate(best),
            "first fit": lambda: plan_and_iterate(ordered),
            "drop-in": lambda: plan_and_iterate(drop_in),
            "theirs": theirs,
        },
        rounds=3,
    )
    rows = {
        "planned, with its length": ("planned", 0.04),
        "planned and iterated": ("iterated", 0.1),
        "planned and iterated, first fit": ("first fit", 0.1),
        "planned and iterated, first fit in a RandomSampler's order": ("drop-in", 0.15),
    }
    entries += [
        Figure(GROUP, name, "ms", found[key], AXOLOTL, found["theirs"], goal_ratio=goal)
        for name, (key, goal) in rows.items()
    ]
    bound = lower_bound(lengths, CAPACITY)
    efficiency = best.efficiency()
    assert efficiency >= 0.999 * lengths.sum() / (bound * CAPACITY)
    text = f"{efficiency:.4%} of the room; first fit {ordered.efficiency():.4%}"
    entries.append(Count(GROUP, "filled", text, "at most 0.1 % below the bound"))


RANKS = 8
COST = CostModel(token=1, token_squared=1 / 24_576)
BALANCED = f"An epoch of packs on {RANKS} ranks: imbalance, in random order and balanced"


def lengths_of(median: float, sigma: float, capacity: int) -> Any:
    """200,000 log-normal lengths."""
    generator = np.random.Generator(np.random.Philox(20250509))
    drawn = generator.lognormal(np.log(median), sigma, 200_000)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


def imbalance_of(lengths: Any, capacity: int, **settings: Any) -> float:
    """The imbalance of the packs that all ranks have, step by step."""
    samplers = [
        MultipackBatchSampler(
            lengths, capacity, flatten=True, rank=rank, world_size=RANKS, **settings
        )
        for rank in range(RANKS)
    ]
    squares = lengths.astype(np.float64) ** 2
    costs = [
        [float(COST.combine(lengths[pack].sum(), squares[pack].sum())) for pack in sampler]
        for sampler in samplers
    ]
    return imbalance(np.array(costs).T)


@pytest.mark.parametrize(
    ("name", "median", "sigma", "capacity", "goal"),
    [("documents", 1500, 1.3, 32_768, 0.01), ("texts", 400, 1.0, 8192, 0.074)],
)
def test_balance(
    entries: list[Entry], name: str, median: float, sigma: float, capacity: int, goal: float
) -> None:
    lengths = lengths_of(median, sigma, capacity)
    found: dict[int, float] = {}
    for window in (16, 64, 256):
        found[window] = imbalance_of(
            lengths, capacity, balance="global_window", balance_window=window, cost=COST
        )
    assert found[64] <= goal
    text = f"{imbalance_of(lengths, capacity):.3f}; balanced by 16, 64 and 256 steps " + ", ".join(
        f"{found[window]:.4f}" for window in (16, 64, 256)
    )
    entries.append(
        Count(BALANCED, f"{name} of up to {capacity:,} tokens", text, f"{goal} with 64 steps")
    )
