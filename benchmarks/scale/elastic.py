"""Costs of a batch on a number of ranks that does not divide the number of streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.scale.rows import Row, least_cpu, print_rows
from benchmarks.scale.runs import Texts, open_loader, text_set
from energon_lite import DefaultTaskEncoder
from energon_lite.extras.lengths.length_index import measure_lengths

FULL, FEWER = 1_024, 1_016
PACKS: dict[str, dict[str, Any] | None] = {
    "plain batches": None,
    "planned packs": {"lengths": "index"},
    "measured packs": {"buffer_size": 100},
}


def seconds_per_batch(
    root: Path, packs: dict[str, Any] | None, num_streams: int, world_size: int, num_steps: int
) -> float:
    """CPU seconds of a batch after the first steps, the mean of two ranks."""
    spent = 0.0
    encoder = DefaultTaskEncoder() if packs is None else Texts(**packs)
    for rank in (0, world_size // 2):
        config = {"rank": rank, "world_size": world_size, "num_streams": num_streams}
        batch_size = 16 if packs is None else None
        with open_loader(root, config, batch_size=batch_size, task_encoder=encoder) as loader:
            batches = iter(loader)
            list(islice(batches, num_steps // 4))
            spent += least_cpu(lambda run=batches: list(islice(run, num_steps)), 1)[0]
    return spent / 2 / num_steps


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows, each the least of some rounds; writes texts and their lengths."""
    logging.disable(logging.WARNING)
    num_steps, rounds = (256, 3) if large else (64, 1)
    root = text_set(folder / "texts")
    if not (folder / "measured").exists():
        measure_lengths(root, Texts(buffer_size=100), name="index", num_workers=0)
        (folder / "measured").touch()
    for num_streams in (1_024, 4_096, 12_288):
        for name, packs in PACKS.items():
            if num_streams > 4_096 and name == "planned packs" and not large:
                continue  # planning takes minutes
            # In turn, since other programs of the machine slow both.
            found = [
                [seconds_per_batch(root, packs, num_streams, n, num_steps) for n in (FULL, FEWER)]
                for _ in range(rounds)
            ]
            full, fewer = map(min, zip(*found, strict=True))
            size = f"{num_streams:,} streams on"
            yield f"{name}: CPU of a batch", f"{size} {FULL:,} ranks", 1e3 * full, "ms"
            yield f"{name}: CPU of a batch", f"{size} {FEWER:,} ranks", 1e3 * fewer, "ms"
            yield f"{name}: over {FULL:,} ranks", f"{size} {FEWER:,} ranks", fewer / full, "x"


if __name__ == "__main__":
    print_rows(rows)
