"""Costs of packing by the size of the buffer, and of opening length indexes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.probes import megabytes
from benchmarks.scale.rows import Row, least_cpu, print_rows
from benchmarks.scale.runs import LENGTHS, Texts, open_loader, text_set
from energon_lite.balance import CostModel
from energon_lite.formats.length_files import (
    TOKENS,
    read_facts,
    read_lengths,
    sums_of,
    write_lengths,
)
from energon_lite.sources.dataset_config import load_factory


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


def shared(root: Path, num_ranks: int) -> Iterator[Row]:
    """Makes the first pack of a plan of the streams of all ranks."""

    def first_pack() -> Any:
        encoder = Texts(balance="global_window", cost=CostModel(token=1), lengths="bench")
        place = {"rank": num_ranks // 2, "world_size": num_ranks, "num_streams": num_ranks}
        settings = {"batch_size": None, "shuffle_buffer_size": 10_000, "task_encoder": encoder}
        return next(iter(open_loader(root, place, **settings)))

    name = f"{num_ranks:,} ranks of 1 stream"
    yield "shared plan, first pack: CPU", name, least_cpu(first_pack, 2)[0], "s"
    tracemalloc.start()
    first_pack()
    yield "shared plan: memory", name, tracemalloc.get_traced_memory()[1] / 2**20, "MiB"
    tracemalloc.stop()


def index(folder: Path, num_samples: int) -> Iterator[Row]:
    """Opens a length index as a plan does: checks it, and takes its hash and mean."""
    place = folder / f"index{num_samples}", "train", "bench"
    path = Path(write_lengths(*place, LENGTHS, "data"))
    lengths = np.lib.format.open_memmap(path, "w+", "<u2", (num_samples,))
    for first in range(0, num_samples, len(LENGTHS)):
        lengths[first : first + len(LENGTHS)] = LENGTHS[: num_samples - first]
    lengths.flush()
    facts = path.with_suffix(".json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "samples": num_samples}))

    def opened() -> Any:
        lengths = read_lengths(*place, num_samples, "data")
        sums_of(read_facts(*place) or {}, TOKENS, lengths)
        return lengths

    before = megabytes("self")
    spent, lengths = least_cpu(opened)
    size = f"{num_samples:,} samples"
    yield "length index: CPU to open", size, 1e3 * spent, "ms"
    yield "length index: memory", size, max(0.0, megabytes("self") - before), "MiB"
    yield "length index: a sample", size, lengths.nbytes / num_samples, "B"


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes texts and indexes."""
    root = text_set(folder / "texts")
    for size in (100, 1000, 10_000, *[100_000] * large):
        yield from streamed(root, size)
    factory = load_factory(root)
    lengths = np.resize(LENGTHS, len(factory))
    write_lengths(root, factory.split_part, "bench", lengths, factory.data)
    for num_ranks in (8, 64, 512, *[4096] * large):
        yield from shared(root, num_ranks)
    for num_samples in (10**5, 10**7, *[10**9] * large):
        yield from index(folder, num_samples)


if __name__ == "__main__":
    print_rows(rows)
