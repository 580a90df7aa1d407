"""Costs of sources: their number, windows, workers of a fork server, lint and prepare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from benchmarks.data import link_tars, prepare_texts
from benchmarks.measure import REPO
from benchmarks.peers.probe import cpu_seconds
from benchmarks.probes import megabytes
from benchmarks.scale.rows import Row, least_cpu, print_rows
from benchmarks.scale.runs import open_loader, text_set, write_blend
from energon_lite.core.topology import Stream
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.formats.nvmeta import DEFAULT_SPLIT, INFO_JSON, META
from energon_lite.order.source_order import SourceOrder
from energon_lite.sources.refs import MOST_ORDERED

PROGRAM = """
if __name__ == "__main__":
    import sys
    from pathlib import Path
    from benchmarks.scale.sources import first_batches
    print(*first_batches(Path(sys.argv[1]), int(sys.argv[2])))
"""


def window(num_samples: int, size: int, num_blocks: int = 100) -> Row:
    """Looks up the order of a stream in blocks, as a loader does."""
    order = SourceOrder("s", num_samples, 0, True, max_slice=1000, interleave=4, window=size)
    stream = order.stream(Stream(3, 8))
    blocks = range(0, num_blocks * MOST_ORDERED, MOST_ORDERED)
    spent, _ = least_cpu(lambda: [stream.block(at, MOST_ORDERED) for at in blocks])
    name = f"window of {size:,} in {num_samples:,} samples"
    return "order: CPU a sample", name, 1e6 * spent / blocks.stop, "us"


def first_batches(path: Path, num_workers: int) -> tuple[float, float]:
    """Seconds until each worker has returned a batch; CPU of the fork server and the workers."""
    with open_loader(path, {"num_workers": num_workers, "start_method": "forkserver"}) as loader:
        start = perf_counter()
        list(islice(loader, num_workers))
        return perf_counter() - start, cpu_seconds() - process_time()


def forkserver(folder: Path, num_workers: int) -> Iterator[Row]:
    """Starts workers of a new program, since a program has one fork server."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, folder / "texts", str(num_workers)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds, spent = map(float, done.stdout.split())
    size = f"{num_workers} workers of a fork server"
    yield "first batch of each worker", size, seconds, "s"
    yield "first batch of each worker: CPU", size, spent, "s"


def lint(folder: Path, num_shards: int) -> Iterator[Row]:
    """Checks shards of 10,000 samples, without and with decoding them."""
    num = num_shards * 10_000
    path = text_set(folder / f"lint{num_shards}", num, num_shards, 64)
    for decode, name in ((False, "lint"), (True, "lint with decoding")):
        spent, report = least_cpu(lambda d=decode: lint_dataset(path, num_workers=0, decode=d), 1)
        assert report.is_ok, report.errors[:3]
        yield f"{name}: CPU a sample", f"{num:,} samples", 1e6 * spent / num, "us"


def missing_shards(folder: Path, num_missing: int) -> Row:
    """Checks a dataset that lists shards which are not there."""
    path = text_set(folder / f"missing{num_missing}", 200, 2, 64)
    names = [f"gone{i:06d}.tar" for i in range(num_missing)]
    info = json.loads((path / META / INFO_JSON).read_text())
    info["shard_counts"] |= dict.fromkeys(names, 100)
    (path / META / INFO_JSON).write_text(json.dumps(info))
    split = {"split_parts": {"train": list(info["shard_counts"])}}
    (path / META / DEFAULT_SPLIT).write_text(json.dumps(split))
    spent, report = least_cpu(lambda: lint_dataset(path, num_workers=0), 1)
    assert len(report.errors) >= num_missing
    return "lint: CPU a shard", f"{num_missing:,} missing shards", 1e3 * spent / num_missing, "ms"


def prepare(folder: Path, num_shards: int) -> Row:
    """Prepares shards of 1,000 samples, as links beside no indexes."""
    num = num_shards * 1000
    path = text_set(folder / f"prepare{num_shards}", num, num_shards, 64)
    with TemporaryDirectory(dir=folder) as temporary:
        bare = Path(temporary) / "bare"
        link_tars(path, bare)
        spent, _ = least_cpu(lambda: prepare_texts(bare, num_workers=0), 1)
    return "prepare: CPU a sample", f"{num:,} samples", 1e6 * spent / num, "us"


def blend_of(folder: Path, num_sources: int) -> Path:
    """Makes a blend of datasets of 1,000 texts; their files are hard links to those of one."""
    base = text_set(folder / "base", 1000, 1, 1000)
    members = [{"path": f"sources/{i:05d}"} for i in range(num_sources)]
    for member in members:
        own = folder / member["path"]
        if not own.exists():
            (own / META).mkdir(parents=True)
            for path in (*base.glob("*.*"), *(base / META).iterdir()):
                if path.is_file():
                    os.link(path, own / path.relative_to(base))
    return write_blend(folder / f"blend{num_sources}.yaml", members)


def blend(folder: Path, num_sources: int) -> Iterator[Row]:
    """Opens a blend, and draws from it: first where sources are met that are not read yet."""
    path, size = blend_of(folder, num_sources), f"{num_sources:,} sources"
    settings = {"shuffle_buffer_size": None}
    spent, loader = least_cpu(lambda: open_loader(path, {"num_streams": 8}, **settings), 1)
    yield "open: CPU", size, spent, "s"
    batches = iter(loader)
    yield "first batch: CPU", size, least_cpu(lambda: next(batches), 1)[0], "s"
    # The last batches take one read of each stream.
    for name, num in (("first 16,000 samples", 1000), ("next 80,000", 5000), ("later", 7200)):
        spent, _ = least_cpu(lambda n=num: list(islice(batches, n)), 1)
        yield f"{name}: CPU a sample", size, 1e6 * spent / num / 16, "us"
    yield "open files", size, len(list(Path("/proc/self/fd").iterdir())), "files"
    yield "memory", size, megabytes("self"), "MiB"


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes texts, and links to some."""
    for num_sources in (100, 1000, *[10_000] * large):
        yield from blend(folder, num_sources)
    for size in (10_000, 262_144, 300_000, 1_000_000, 10_000_000):
        yield window(10**9, size)
    for size in (300_000, 1_000_000):
        yield window(1_250_000, size)
    text_set(folder / "texts")
    for num_workers in (1, 4, 8):
        yield from forkserver(folder, num_workers)
    for num_shards in (2, *[8] * large):
        yield from lint(folder, num_shards)
    for num_missing in (500, 2000):
        yield missing_shards(folder, num_missing)
    for num_shards in (10, 40, *[160] * large):
        yield prepare(folder, num_shards)


if __name__ == "__main__":
    print_rows(rows)
