"""Does one thing with one loader in a fresh process, in the loader's own environment.

    python -m benchmarks.peers.probe WHAT LOADER ROW DATA SECONDS

with "prepare", "prepare-check" (fewer samples), "check" or "measure" as WHAT,
prints its answer as JSON in the last line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.exits import exit_after
from benchmarks.peers.rows import ROWS, Row

MIN_BATCHES = 4
SHARED = ("torch", "numpy", "pillow")


def prepare(loader: Any, row: Row, data: Path, *, checked: bool) -> dict[str, Any]:
    """Writes the samples of a row in the loader's format."""
    from benchmarks.peers.samples import CHECKED, load_samples

    folder = folder_of(loader, row, data, checked=checked)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    samples = load_samples(data, row.kind, CHECKED[row.kind] if checked else None)
    loader.prepare(samples.divided(row.num_sources), folder)
    return {}


def check(loader: Any, row: Row, data: Path) -> dict[str, Any]:
    """Compares what a loader returns with what was written, and counts it."""
    from benchmarks.peers.checking import compare
    from benchmarks.peers.samples import CHECKED, load_samples

    samples = load_samples(data, row.kind, CHECKED[row.kind])
    opened = loader.open_loader(folder_of(loader, row, data, checked=True), row)
    return compare(samples, endless(opened), loader.samples_of, row)


def measure(loader: Any, row: Row, data: Path, seconds: float) -> dict[str, Any]:
    """Iterates for some seconds of wall time and returns the time per sample.

    Before that it warms up for at least a second, in which some loaders read ahead, and until it
    met each source some times.
    """
    start = time.perf_counter()
    opened = loader.open_loader(folder_of(loader, row, data), row)
    batches = endless(opened)
    next(batches)
    opened_sec = time.perf_counter() - start
    count, at_least = 0, MIN_BATCHES + 5 * row.num_sources // row.batch_size
    until = time.perf_counter() + max(1.0, seconds / 4)
    while count < at_least or time.perf_counter() < until:
        next(batches)
        count += 1
    num_samples = count = 0
    cpu, wall = cpu_seconds(), time.perf_counter()
    while count < MIN_BATCHES or time.perf_counter() < wall + seconds:
        num_samples += len(loader.samples_of(next(batches), row))
        count += 1
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    times = {"cpu_us": cpu / num_samples * 1e6, "wall_us": wall / num_samples * 1e6}
    return {**times, "first_batch_s": opened_sec}


def endless(loader: Any) -> Iterator[Any]:
    """Yields batches of one epoch after the other."""
    while True:
        yield from loader


def cpu_seconds() -> float:
    """CPU time of this process and of all its descendants, also of those that have ended."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        stats[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    family = {os.getpid()}
    while more := {pid for pid, (parent, _) in stats.items() if parent in family} - family:
        family |= more
    ended = os.times().children_user + os.times().children_system
    ticks = sum(stats[pid][1] for pid in family - {os.getpid()})
    return time.process_time() + ended + ticks / os.sysconf("SC_CLK_TCK")


def folder_of(loader: Any, row: Row, data: Path, *, checked: bool = False) -> Path:
    """Where the files of a row are; those for the check have fewer samples."""
    name = getattr(loader, "DATA_OF", loader.__name__.rpartition(".")[2])
    return data / ("check" if checked else "whole") / name / f"{row.kind}-{row.num_sources}"


def versions(loader: Any) -> dict[str, str]:
    """Versions of the packages that the loader was installed by."""
    names = getattr(loader, "SHOWN", [package.partition("==")[0] for package in loader.PACKAGES])
    return {name: importlib.metadata.version(name) for name in [*names, *SHARED]}


def main() -> None:
    what, name, row_name, data, seconds = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    loader: Any = importlib.import_module(f"benchmarks.peers.loaders.{name}")
    row, root = ROWS[row_name], Path(data)
    if what == "measure":
        answer = measure(loader, row, root, float(seconds))
        answer["versions"] = versions(loader)
    elif what == "check":
        answer = check(loader, row, root)
    else:
        answer = prepare(loader, row, root, checked=what == "prepare-check")
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    exit_after(main)
