"""Files of all kinds with random damage: nothing silent, nothing unclear, no hang."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from .figures import Figures
from .mutations import SCENES, Scenes

GOOD = {"same", "skipped", "error", "content", "moved", "warning"}
_made: dict[Path, Scenes] = {}


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_lite.storage.patience.sleep", lambda seconds: None)


def test_corrupt_files_are_reported_or_change_nothing(tmp_path: Path, no_pause: Any) -> None:
    scenes = Scenes(tmp_path / "made")
    found = [
        scenes.try_one(number, f"{number}/{repetition}", tmp_path / "work")
        for number in range(len(SCENES))
        for repetition in range(6)
    ]
    assert [text for kind, text in found if kind not in GOOD] == []
    assert GOOD - {"moved", "warning"} <= {kind for kind, _ in found}


def try_many(folder: Path, number: int, seeds: list[str]) -> list[tuple[str, str]]:
    """What a process of the long form does."""
    from energon_lite.storage import files

    files.sleep = lambda seconds: None
    scenes = _made.setdefault(folder, Scenes(folder / f"made-{os.getpid()}"))
    work = folder / f"work-{os.getpid()}"
    return [scenes.try_one(number, seed, work) for seed in seeds]


@pytest.mark.soak
@pytest.mark.processes
def test_ten_thousand_corrupt_files(tmp_path: Path) -> None:
    each = -(-10_000 // len(SCENES))
    tasks = {}
    bad: list[str] = []
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        for number, scene in enumerate(SCENES):
            for first in range(0, each, 100):
                seeds = [f"{number}/long/{i}" for i in range(first, min(first + 100, each))]
                tasks[pool.submit(try_many, tmp_path, number, seeds)] = scene.kind
        counts: dict[str, Counter[str]] = {}
        for task, kind in tasks.items():
            for outcome, text in task.result():
                counts.setdefault(kind, Counter())[outcome] += 1
                if outcome not in GOOD:
                    bad.append(text)
    for kind, found in counts.items():
        figures = Figures(f"mutated: {kind}")
        figures.num_trials = sum(found.values())
        figures.note(", ".join(f"{name} {count}" for name, count in sorted(found.items())))
        figures.check()
    assert bad == [], "\n".join(bad)
