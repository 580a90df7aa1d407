"""Which part of a network's bandwidth is useful, and what fetching costs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.peers.probe import cpu_seconds
from benchmarks.remote.runs import (
    BYTES_PER_SEC,
    Spent,
    cache_of,
    is_data,
    open_run,
    served,
    write_samples,
)
from benchmarks.scale.rows import Row, print_rows

BATCH = 16
# Places in an epoch: before them is the start, after them nothing is left to fetch ahead.
STEADY = 0.15, 0.8
# Less than the data, so that what is needed at a time competes for it.
STAGING_BYTES = 3 << 29


def epoch(root: Path, num_samples: int, what: str, num_workers: int) -> Iterator[Row]:
    """Reads an epoch; yields what was fetched and spent."""
    useful = bytes_of(root)
    first, last = (int(part * num_samples / BATCH) for part in STEADY)
    address = f"s3://bucket/{root.name}"
    settings: dict[str, Any] = {"num_workers": num_workers, "repeat": False}
    with (
        served(root.parent) as server,
        open_run(address, **settings, **cache_of(STAGING_BYTES)) as loader,
    ):
        batches, spent = iter(loader), [Spent.now(server)]
        for count in (first, last - first, None):
            list(islice((None for _ in batches), count))
            spent.append(Spent.now(server))
        log = server.log()
    _, start, stop, end = spent
    steady, whole = stop - start, end - spent[0]
    data = [entry for entry in log if is_data(entry)]
    part = useful * (last - first) * BATCH / num_samples
    size = f"{what} with {num_workers} workers"
    yield f"useful of {BYTES_PER_SEC / 1e6:g} MB/s", size, part / steady.wall / 1e6, "MB/s"
    yield "fetched over used", size, sum(entry.num_bytes for entry in data) / useful, "x"
    yield "CPU of the fetcher", size, 1e3 * whole.fetcher / whole.requests, "ms a request"
    yield "CPU of the fetcher", size, 1e9 * whole.fetcher / whole.bytes, "ms a MB"
    yield "CPU of the loader", size, 1e9 * whole.loader / useful, "ms a MB"
    yield "CPU of the server", size, 1e9 * whole.server / whole.bytes, "ms a MB"
    yield "requests for data", size, len(data), ""
    yield "other requests", size, len(log) - len(data), ""


def local(root: Path, what: str, num_workers: int) -> Iterator[Row]:
    """Reads an epoch from the local folder: what this machine can do without a network."""
    cpu, wall = cpu_seconds(), perf_counter()
    with open_run(root, num_workers=num_workers, repeat=False) as loader:
        for _ in loader:
            pass
    cpu, wall = cpu_seconds() - cpu, perf_counter() - wall
    size, useful = f"{what} with {num_workers} workers", bytes_of(root)
    yield "from the local folder", size, useful / wall / 1e6, "MB/s"
    yield "from the local folder: CPU of the loader", size, 1e9 * cpu / useful, "ms a MB"


def bytes_of(root: Path) -> int:
    """Returns the bytes of all shards: their samples with the headers of the tars."""
    return sum(path.stat().st_size for path in root.glob("*.tar"))


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes pictures of 1.8 GB and texts of 2 GB, or four times as many."""
    factor = 4 if large else 1
    for what, num_samples, num_bytes in (
        ("pictures of 75 KB", 24_000 * factor, 75_000),
        ("texts of 1.5 KB", 1_000_000 * factor, 1500),
    ):
        root = write_samples(folder / "served", num_samples, num_bytes)
        for num_workers in (0, 2):
            yield from epoch(root, num_samples, what, num_workers)
            yield from local(root, what, num_workers)


if __name__ == "__main__":
    print_rows(rows)
