"""Requests and seconds until the first batch of datasets of many shards, cold and with a cache."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.remote.runs import (
    cache_of,
    is_data,
    open_run,
    served,
    temporary_folder,
    without_fetcher,
    write_samples,
)
from benchmarks.scale.rows import Row, print_rows
from tests.remote.server import Server

# The files of `.nv-meta` that Energon's `prepare` writes.
OF_ENERGON = {"dataset.yaml", "split.yaml", ".info.json", "index.sqlite", "index.uuid"}


def first_batch(server: Server, name: str, size: str, **config: Any) -> Iterator[Row]:
    """Opens a dataset, and yields what the first batch took."""
    without_fetcher()
    server.clear_log()
    start = perf_counter()
    with open_run(f"s3://bucket/{name}", **config) as loader:
        next(iter(loader))
        seconds, log = perf_counter() - start, server.log()
    kinds = Counter(
        "data" if is_data(entry) else "indexes of shards" if entry.path.endswith(".idx") else "rest"
        for entry in log
    )
    yield "until the first batch", size, seconds, "s"
    for kind in ("rest", "indexes of shards", "data"):
        yield f"requests until the first batch: {kind}", size, kinds[kind], ""
    yield "shards used by then", size, len({e.path for e in log if is_data(e)}), ""


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes texts of 20 MB in many shards."""
    num_shards = 4000 if large else 1000
    root = write_samples(folder / "opened", 10 * num_shards, 1500, num_shards)
    plain = root.with_name(f"{root.name}-by-energon")
    if not plain.exists():
        shutil.copytree(root, plain)
        for path in (plain / ".nv-meta").iterdir():
            if path.name not in OF_ENERGON:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    with open_run(root) as loader:  # whatever takes time once
        next(iter(loader))
    with served(root.parent) as server:
        for whose, path in (("ours", root), ("Energon's", plain)):
            for num_workers in (0, 2):
                size = f"{num_shards:,} shards of {whose} with {num_workers} workers"
                with temporary_folder():
                    yield from first_batch(server, path.name, size, num_workers=num_workers)
        with temporary_folder():
            cache = cache_of(1 << 30)
            for number in range(2):
                size = f"{num_shards:,} shards with a {'warm' if number else 'cold'} cache"
                yield from first_batch(server, root.name, size, **cache)


if __name__ == "__main__":
    print_rows(rows)
