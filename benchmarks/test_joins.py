"""Joined texts, by the inherited `from_joined` and by a function, and each dataset read alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data import write_texts
from benchmarks.measure import Entry, Figure, in_turn
from energon_lite import TextSample, WorkerConfig, get_train_dataset
from energon_lite.core.dataset import taken
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import Stream

NUM_SAMPLES, NUM_SHARDS, NUM_READ = 40_000, 8, 8_000
STREAM = Stream(0, 1)


def both(left: TextSample, right: TextSample) -> TextSample:
    """Joins two texts."""
    return TextSample.derive_from(left, text=left.text + right.text)


def test_joined_texts(benchmark: Any, entries: list[Entry], folder: Path) -> None:
    paths = [folder / name for name in "ab"]
    for path in paths:
        write_texts(path, num_samples=NUM_SAMPLES, num_shards=NUM_SHARDS, mean_bytes=60)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)

    def cursor_of(path: Any) -> Any:
        dataset: Any = get_train_dataset(path, worker_config=config, batch_size=None)
        while dataset.children:
            (dataset,) = dataset.children
        return dataset.cursor(STREAM)

    def joined(joiner: dict[str, str]) -> Any:
        node = {"join": [{"path": str(path)} for path in paths], "joiner": joiner}
        head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
        return cursor_of({**head, "splits": {"train": node}})

    def read(*cursors: Any) -> None:
        with context_of(StreamContext(STREAM)):
            for cursor in cursors:
                taken(cursor, NUM_READ)

    calls = {
        "class": partial(read, joined({"__module__": "energon_lite", "__class__": "TextSample"})),
        "function": partial(read, joined({"__module__": __name__, "__function__": "both"})),
        "alone": partial(read, *map(cursor_of, paths)),
    }
    found = {
        name: [t / NUM_READ for t in times]
        for name, times in in_turn(benchmark, calls, rounds=9).items()
    }
    for name, what, goal in (
        ("class", "by `from_joined`", 1.3),
        ("function", "by a function", None),
    ):
        figure = Figure("Joins", f"two texts joined {what}", "µs", found[name], "both read alone",
                        found["alone"], goal_ratio=goal)  # fmt: skip
        entries.append(figure)
