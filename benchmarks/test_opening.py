"""Time to the first batch, in fresh processes."""

from __future__ import annotations

from typing import Any

from benchmarks.conftest import TextData
from benchmarks.measure import Entry, Figure, probe

GROUP = "Start"
ROUNDS = 7


def test_opening_a_thousand_shards(
    benchmark: Any, entries: list[Entry], many_shards: TextData
) -> None:
    probe("open", many_shards.root)
    ours: list[dict[str, float]] = []
    by_hand: list[dict[str, float]] = []

    def measure() -> None:
        ours.append(probe("open", many_shards.root))
        by_hand.append(probe("open-by-hand", many_shards.root))

    benchmark.pedantic(measure, rounds=ROUNDS)
    for what, name, reference, goal in (
        ("open", "opening 1,000 shards", "stat of each, read of .nv-meta", 0.2),
        ("first", "first batch of 32 after that", "32 samples of 32 shards", 0.1),
    ):
        entries.append(
            Figure(
                GROUP, name, "ms", [found[what] for found in ours],
                reference, [found[what] for found in by_hand], goal_sec=goal,
            )
        )  # fmt: skip


def test_import(benchmark: Any, entries: list[Entry]) -> None:
    found: list[dict[str, float]] = []
    probe("import")
    benchmark.pedantic(lambda: found.append(probe("import")), rounds=ROUNDS)
    entries.append(
        Figure(
            GROUP, "import of get_loader and the like, after torch", "ms",
            [seconds["package"] for seconds in found],
            "import torch", [seconds["torch"] for seconds in found], goal_sec=0.1,
        )
    )  # fmt: skip
