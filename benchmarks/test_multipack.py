"""A sampler of packs for map-style datasets: its epochs, against the way axolotl makes one."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler

from benchmarks.measure import Count, Entry, Figure, in_turn
from benchmarks.test_packing import AXOLOTL, scanning_first_fit, text_lengths
from energon_lite.batching.bounds import lower_bound
from energon_lite.samplers import MultipackBatchSampler

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
        "planned, which gives its length": ("planned", 0.04),
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
