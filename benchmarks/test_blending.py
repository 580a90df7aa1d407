"""Blends of many small sources: samples per second, opening, memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines import open_shards, text_batches
from benchmarks.conftest import TextData
from benchmarks.data import write_texts
from benchmarks.measure import Count, Entry, Figure, in_turn, probe
from benchmarks.test_throughput import BATCH, LOOP, going_through, per_sample, taking
from energon_lite import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)

GROUP = "Blends of sources of 200 texts of 500 B, batches of 32, one stream"
HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
# The goals are rates on a core where the hand-written loop makes 650,000 samples/s.
LOOP_RATE = 650_000
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Measured(DefaultTaskEncoder[TextSample, TextSample, Any, Any]):
    """Knows how long a text is."""

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)


@pytest.fixture(scope="session")
def small_sources(folder: Path) -> Path:
    """1,000 prepared folders, and metadatasets over some of them."""
    root = folder / "small"
    for i in range(1000):
        write_texts(root / f"source{i:04d}", num_samples=200, num_shards=1)
    for number in (1, 2, 10, 100, 1000):
        write_blend(root, f"blend{number}", number, "")
    write_blend(root, "tokens10", 10, "    unit: tokens\n")
    fading = ", weight: {schedule: linear, points: {0: 1.0, 1000000: 0.1}}"
    write_blend(root, "schedule10", 10, "", fading)
    return root


def write_blend(root: Path, name: str, number: int, settings: str, weight: str = "") -> None:
    lines = [f"    - {{path: source{i:04d}{weight if i % 2 else ''}}}\n" for i in range(number)]
    text = f"{HEAD}{settings}    blend:\n{''.join(lines)}"
    (root / f"{name}.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "file", "goal_rate"),
    [
        ("2 sources", "blend2", 100_000),
        ("10 sources", "blend10", 100_000),
        ("100 sources", "blend100", 80_000),
        ("1,000 sources", "blend1000", 40_000),
        ("10 sources, half of them on a schedule", "schedule10", None),
        ("10 sources, by tokens that are measured", "tokens10", None),
    ],
)
def test_blended_batches(
    benchmark: Any,
    entries: list[Entry],
    many_texts: TextData,
    small_sources: Path,
    name: str,
    file: str,
    goal_rate: int | None,
) -> None:
    shards = open_shards(many_texts.root)
    dataset = get_train_dataset(
        small_sources / f"{file}.yaml",
        batch_size=BATCH,
        shuffle_buffer_size=100,
        task_encoder=Measured() if file.startswith("tokens") else None,
        worker_config=ONE,
    )
    loader = get_savable_loader(dataset)
    batches = iter(loader)
    num_samples = len(many_texts.texts)
    found = in_turn(
        benchmark,
        {
            "ours": taking(batches, num_samples // BATCH),
            LOOP: going_through(lambda: text_batches(shards, BATCH)),
        },
        rounds=5,
    )
    stats = loader.stats()
    assert all(abs(s.actual_share - s.target_share) < 1e-3 for s in stats.values())
    ours, loop = (per_sample(times, num_samples) for times in found.values())
    goal = LOOP_RATE / goal_rate if goal_rate else None
    entries.append(Figure(GROUP, name, "/s", ours, LOOP, loop, goal_ratio=goal))


def test_opening_a_thousand_sources(
    benchmark: Any, entries: list[Entry], small_sources: Path
) -> None:
    found: list[dict[str, float]] = []
    path = small_sources / "blend1000.yaml"
    probe("open", path)
    benchmark.pedantic(lambda: found.append(probe("open", path)), rounds=5)
    for what, name, goal in (("open", "opening", 1.0), ("first", "first batch", None)):
        seconds = [one[what] for one in found]
        entries.append(
            Figure(GROUP, f"1,000 sources: {name}", "ms", seconds, "", None, goal_sec=goal)
        )


def test_memory_of_a_thousand_sources(entries: list[Entry], small_sources: Path) -> None:
    one, many = (
        probe("blend-memory", small_sources / f"blend{number}.yaml", 0, 6000)
        for number in (1, 1000)
    )
    assert many["over_torch"] <= 150
    assert many["files"] < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    entries.append(
        Count(
            GROUP,
            "1,000 sources, after 192,000 samples: memory over torch, open files",
            f"{many['over_torch']:.0f} MB ({one['over_torch']:.0f} with 1), {many['files']:.0f}",
            "<= 150 MB",
        )
    )


def test_memory_of_eight_workers(entries: list[Entry], small_sources: Path) -> None:
    """What 999 further sources take, in all processes together, before much is read."""
    taken = {}
    for workers in (1, 8):
        one, many = (
            probe("blend-memory", small_sources / f"blend{number}.yaml", workers, workers)
            for number in (1, 1000)
        )
        taken[workers] = many["all"] - one["all"]
    entries.append(
        Count(
            GROUP,
            "1,000 sources: memory of all processes, 8 workers over 1",
            f"{taken[8]:.0f} MB / {taken[1]:.0f} MB = {taken[8] / taken[1]:.1f}",
            "<= 2",
            taken[8] <= 2 * taken[1],
        )
    )
