"""Files of all kinds with random damage: nothing silent, nothing unclear, no hang."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from .figures import Figures
from .mutations import SCENES, try_one

GOOD = {"same", "skipped", "error", "content", "moved", "warning"}


def test_corrupt_files_are_reported_or_change_nothing(tmp_path: Path) -> None:
    numbers = [*range(len(SCENES))] * 6
    found = [try_one(tmp_path, number, f"{number}/{i}") for i, number in enumerate(numbers)]
    assert [text for kind, text in found if kind not in GOOD] == []
    assert GOOD - {"moved", "warning"} <= {kind for kind, _ in found}


def try_many(folder: Path, number: int, seeds: list[str]) -> list[tuple[str, str]]:
    """What a process of the long form does."""
    from energon_lite.storage import patience

    patience.sleep = lambda seconds: None
    return [try_one(folder / str(os.getpid()), number, seed) for seed in seeds]


@pytest.mark.soak
@pytest.mark.processes
def test_ten_thousand_corrupt_files(tmp_path: Path) -> None:
    each = -(-10_000 // len(SCENES))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    bad: list[str] = []
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        tasks = {
            pool.submit(try_many, tmp_path, number, [f"{number}/long/{i}" for i in numbers]): scene
            for number, scene in enumerate(SCENES)
            for numbers in (range(i, min(i + 100, each)) for i in range(0, each, 100))
        }
        for task, scene in tasks.items():
            counts[scene.kind].update(outcome for outcome, _ in task.result())
            bad += [text for outcome, text in task.result() if outcome not in GOOD]
    for kind, found in counts.items():
        figures = Figures(f"mutated: {kind}")
        figures.num_trials = sum(found.values())
        figures.note(", ".join(f"{name} {count}" for name, count in sorted(found.items())))
        figures.check()
    assert bad == [], "\n".join(bad)
