"""Costs of packing by the size of the buffer, and of opening length indexes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.rows import Row, least_cpu, print_rows
from benchmarks.scale.runs import LENGTHS, Texts, open_loader, text_set
from energon_lite.formats.length_files import (
    TOKENS,
    read_facts,
    read_lengths,
    sums_of,
    write_lengths,
)


def streamed(root: Path, size: int) -> Iterator[Row]:
    """Packs, saves and restores a buffer; both runs must return the same packs afterwards."""

    def opened() -> Any:
        encoder = Texts(buffer_size=size)
        settings = {"batch_size": None, "shuffle_buffer_size": 10_000, "task_encoder": encoder}
        return open_loader(root, {"num_streams": 1}, **settings)

    name, loader, again = f"buffer of {size:,}", opened(), opened()
    run = iter(loader)
    yield "first pack: CPU", name, least_cpu(lambda: next(run), 1)[0], "s"
    list(islice(run, 300))
    spent, packs = least_cpu(lambda: list(islice(run, 200)))
    yield "pack: CPU a sample", name, 1e6 * spent / sum(packs), "us"
    spent, state = least_cpu(loader.save_state_rank)
    yield "save: CPU", name, 1e3 * spent, "ms"
    text = json.dumps(state)
    yield "state", name, len(text) / 1e3, "KB"
    again.restore_state_rank(json.loads(text))
    spent, pack = least_cpu(lambda: next(iter(again)), 1)
    yield "first pack after a restore: CPU", name, spent, "s"
    assert [pack, *islice(again, 50)] == [*islice(run, 51)]


def index(folder: Path, num_samples: int) -> Iterator[Row]:
    """Opens a length index as a plan does: checks it, and takes its hash and mean."""
    place = folder / f"index{num_samples}", "train", "bench"
    write_lengths(*place, np.resize(LENGTHS, num_samples), "data")

    def opened() -> Any:
        lengths = read_lengths(*place, num_samples, "data")
        sums_of(read_facts(*place) or {}, TOKENS, lengths)
        return lengths

    spent, lengths = least_cpu(opened)
    size = f"{num_samples:,} samples"
    yield "length index: CPU to open", size, 1e3 * spent, "ms"
    yield "length index: a sample", size, lengths.nbytes / num_samples, "B"


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes texts and indexes."""
    root = text_set(folder / "texts")
    for size in (100, 1000, 10_000, *[100_000] * large):
        yield from streamed(root, size)
    for num_samples in (10**5, 10**7):
        yield from index(folder, num_samples)


if __name__ == "__main__":
    print_rows(rows)
