"""Costs of states by the number of sources, of restores by many ranks, and of schedules."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.rows import Row, least_cpu, print_rows
from benchmarks.scale.runs import open_loader, text_set, write_blend
from energon_lite.core.state import checksum
from energon_lite.core.topology import Stream
from energon_lite.loader import resume
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Schedule, Weights


def blend_loader(folder: Path, num_sources: int, **config: int) -> Any:
    """Opens a blend of one dataset under many names, by several weights."""
    texts = str(text_set(folder / "base", 1000, 1, 1000))
    members = [
        {"path": texts, "name": f"corpus/part-{i:05}/train", "weight": 1 + i % 3}
        for i in range(num_sources)
    ]
    path = write_blend(folder / f"names{num_sources}.yaml", members)
    return open_loader(path, config, shuffle_buffer_size=100, max_samples_per_sequence=10)


def states(folder: Path, num_sources: int) -> Iterator[Row]:
    """Saves and restores a state of 8 streams."""
    size = f"{num_sources:,} sources x 8 streams"
    loader = blend_loader(folder, num_sources, num_streams=8)
    list(islice(loader, 20 + num_sources))
    spent, state = least_cpu(loader.save_state_rank)
    text = json.dumps(state)
    yield "save: CPU", size, 1e3 * spent, "ms"
    yield "state", size, len(text) / 1e3, "KB"
    again, state = blend_loader(folder, num_sources, num_streams=8), json.loads(text)
    yield "restore: CPU", size, least_cpu(lambda: again.restore_state_rank(state), 1)[0], "s"
    yield "first batch after it: CPU", size, least_cpu(lambda: next(iter(again)), 1)[0], "s"


def many_ranks(folder: Path, num_sources: int, num_ranks: int) -> Iterator[Row]:
    """Restores on one of twice the ranks; the states are copies of one with 4 streams."""
    size = f"{num_sources:,} sources on {num_ranks:,} ranks then {2 * num_ranks:,}"
    config = {"num_streams": 4 * num_ranks}
    loader = blend_loader(folder, num_sources, world_size=num_ranks, **config)
    list(islice(loader, 8))
    first = loader.save_state_rank()
    table = resume.decompressed(first["streams"], "streams")
    found = []
    for rank in range(num_ranks):
        own = {str(int(stream) + rank): value for stream, value in table.items()}
        state = {**copy.deepcopy(first), "rank": rank, "streams": resume.compressed(own)}
        state |= {"begun": sorted(map(int, own)), "config": None if rank else first["config"]}
        found.append({**state, "checksum": checksum(state)})
    text = json.dumps(found)
    yield "all states", size, len(text) / 2**20, "MiB"
    again = blend_loader(folder, num_sources, rank=1, world_size=2 * num_ranks, **config)
    found = json.loads(text)
    tracemalloc.start()
    again.restore_state_global(found)
    yield "restore of all states: memory", size, tracemalloc.get_traced_memory()[1] / 2**20, "MiB"
    tracemalloc.stop()
    spent, _ = least_cpu(lambda: again.restore_state_global(found))
    yield "restore of all states: CPU", size, spent, "s"


def schedules(num: int) -> Iterator[Row]:
    """Sums up targets as a save does, and draws, by linear schedules."""
    rng = np.random.default_rng(0)
    points = np.sort(rng.integers(1, 9_000_000, (num, 2)).astype(float), axis=1)
    ends = rng.random((num, 2)) + 0.01
    linear = [
        Schedule("linear", ((a, x), (b + 1, y)))
        for (a, b), (x, y) in zip(points, ends, strict=True)
    ]
    own = Weights(linear)
    same = Weights([Schedule("linear", ((0, x), (9e6, y))) for x, y in ends])
    size = f"{num:,} schedules with own points"
    spent, _ = least_cpu(lambda: own.expected(5_000_000), 1)
    yield "targets at a first save: CPU", size, spent, "s"
    draws = count(5_001_000, 1000)
    spent, _ = least_cpu(lambda: own.expected(next(draws)), 5)
    yield "targets at the next save: CPU", size, 1e3 * spent, "ms"
    for name, weights in (("own", own), ("the same", same)):
        order = BlendOrder(weights, "exact", 5, Stream(1, 8))
        order.block(250_000, 60)
        firsts = count(300_000, 3000)
        spent, _ = least_cpu(lambda found=order, at=firsts: found.block(next(at), 3000))
        yield "draw: CPU", f"{num:,} schedules with {name} points", 1e6 * spent / 3000, "us"


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes texts."""
    more = [10_000] * large
    for num_sources in (10, 1000, *more):
        yield from states(folder, num_sources)
    yield from many_ranks(folder, 300, 1024 if large else 256)
    for num in (10, 1000, *more):
        yield from schedules(num)


if __name__ == "__main__":
    print_rows(rows)
