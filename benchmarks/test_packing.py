"""Offline packing: against what trainers do today, and against what no packer can go below."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from benchmarks.data import needs_omnibal, omnibal_rows
from benchmarks.measure import REPO, Count, Entry, Figure, in_turn
from energon_lite.batching.fit import first_fit, first_fit_decreasing
from energon_lite.batching.lists import Lists
from energon_lite.extras.samplers.best import lower_bound, pack_best

GROUP = "Packing 1,000,000 lengths (lognormal, median 400, sigma 1, cut at the capacity)"
AXOLOTL = "axolotl's algorithm, rebuilt"


def text_lengths(num: int, capacity: int) -> Any:
    """Lengths as of instruction texts; every capacity cuts the same ones."""
    drawn = np.random.Generator(np.random.Philox(20250509)).lognormal(np.log(400), 1.0, num)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


@numba.njit(cache=True)
def _scan_all_bins(lengths: Any, first: int, capacity: int, max_per_bin: int) -> Any:
    rooms = [0 for _ in range(0)]
    bins = [[0] for _ in range(0)]
    for index, length in enumerate(lengths):
        found = 0
        while found < len(bins) and (rooms[found] < length or len(bins[found]) >= max_per_bin):
            found += 1
        if found == len(bins):
            rooms.append(capacity)
            bins.append([0 for _ in range(0)])
        rooms[found] -= length
        bins[found].append(first + index)
    return bins


def scanning_first_fit(lengths: Any, capacity: int) -> list[list[int]]:
    """First fit as axolotl has it since 2025-05-09: unsorted, over all bins of a group.

    In groups of 100,000, at most 200 samples in a bin, lists of lists: our own code, from a
    description.
    """
    bins: list[list[int]] = []
    for first in range(0, len(lengths), 100_000):
        bins += _scan_all_bins(lengths[first : first + 100_000], first, capacity, 200)
    return bins


@pytest.mark.parametrize(
    ("capacity", "goal"), [(2048, 300), (4096, 300), (8192, 300), (32_768, 50)]
)
def test_first_fit_decreasing(
    benchmark: Any, entries: list[Entry], capacity: int, goal: int
) -> None:
    lengths = text_lengths(1_000_000, capacity)
    packs: list[Lists] = []

    def decreasing() -> None:
        packs[:] = [first_fit_decreasing(lengths, capacity)]

    found = in_turn(
        benchmark,
        {
            "ours": decreasing,
            "axolotl": lambda: scanning_first_fit(lengths, capacity),
            "lists": lambda: first_fit_decreasing(lengths, capacity).tolist(),
            "in order": lambda: first_fit(lengths, capacity),
        },
        rounds=3,
    )
    theirs, name = found["axolotl"], f"capacity {capacity:,}"
    entries += [
        Figure(
            GROUP, f"{name}, longest first", "ms", found["ours"], AXOLOTL, theirs,
            goal_ratio=1 / goal, goal_sec=0.010,
        ),
        Figure(
            GROUP, f"{name}, as lists of lists", "ms", found["lists"], AXOLOTL, theirs,
            goal_ratio=1 / 15 if capacity == 2048 else None,
        ),
        Figure(GROUP, f"{name}, order kept", "ms", found["in order"], AXOLOTL, theirs),
    ]  # fmt: skip
    bound = lower_bound(lengths, capacity)
    assert len(packs[0]) <= 1.0005 * bound
    text = f"{len(packs[0]):,} packs; at least {bound:,}; axolotl's {{:,}}"
    text = text.format(len(scanning_first_fit(lengths, capacity)))
    entries.append(Count(GROUP, name, text, "≤ 1.0005 × the bound"))


@needs_omnibal
@pytest.mark.parametrize(
    ("tokens", "tiles"), [(4096, None), (8192, None), (6016, 18), (4096, 15), (4096, 9)]
)
def test_pack_best_of_image_lengths(
    benchmark: Any, entries: list[Entry], tokens: int, tiles: int | None
) -> None:
    rows = omnibal_rows()
    lengths, capacity = (rows[:, 0], tokens) if tiles is None else (rows, (tokens, tiles))
    packs: list[Lists] = []
    found = in_turn(
        benchmark,
        {
            "ours": lambda: packs.append(pack_best(lengths, capacity)),
            "decreasing": lambda: packs.append(first_fit_decreasing(lengths, capacity)),
        },
        rounds=3,
    )
    fitted, best, bound = len(packs[-2]), len(packs[-1]), lower_bound(lengths, capacity)
    group = f"Packing {len(rows):,} lengths of samples with images (OmniBal)"
    name = f"{tokens:,} tokens" + (f", {tiles} tiles" if tiles else "")
    entries.append(
        Figure(
            group, f"{name}: pack_best", "ms", found["ours"], "first_fit_decreasing",
            found["decreasing"],
        )
    )  # fmt: skip
    fitted, best = max(fitted, best), min(fitted, best)
    assert bound >= 0.999 * best
    text = f"{best:,} packs; at least {bound:,}; first-fit decreasing {fitted:,}"
    entries.append(Count(group, name, text, "≤ 1.001 × the bound"))


def test_compiling(benchmark: Any, entries: list[Entry], folder: Path) -> None:
    code = (
        "import time, numba, energon_lite.extras.samplers.best, energon_lite.batching.fit\n"
        "from energon_lite.core.compiled import compile_all\n"
        "start = time.perf_counter(); compile_all(); print(time.perf_counter() - start)"
    )
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def compile_in(place: Path, is_new: bool) -> None:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(REPO), "NUMBA_CACHE_DIR": str(place)},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds[is_new].append(float(done.stdout))

    def both() -> None:
        place = folder / f"code_{len(seconds[True])}"
        compile_in(place, True)
        compile_in(place, False)

    benchmark.pedantic(both, rounds=3)
    group = "Compiling the packers, after numba is imported"
    entries += [
        Figure(group, "the first process", "s", seconds[True], goal_sec=5.0),
        Figure(group, "later ones", "s", seconds[False], goal_sec=0.6),
    ]
