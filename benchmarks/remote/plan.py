"""The bytes and requests that `energon-lite plan` predicts, against those of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.remote.cache import BATCH
from benchmarks.remote.runs import cache_of, is_data, open_run, served, write_samples
from benchmarks.scale.rows import Row, print_rows

COMMAND = [sys.executable, "-m", "energon_lite", "plan"]


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields what was fetched in three epochs, and over what was predicted."""
    num_samples, num_streams = 64_000 if large else 12_000, 4
    root = write_samples(folder / "served", num_samples, 75_000)
    for part in (0.2, 0.5) if large else (0.2,):
        cache_bytes = int(part * num_samples * 75_776)
        steps = 3 * num_samples // BATCH
        arguments = {
            "steps": steps, "batch-size": BATCH, "num-streams": num_streams,
            "shuffle-buffer-size": 1000, "cache-bytes": cache_bytes,
        }  # fmt: skip
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        done = subprocess.run([*COMMAND, root, *words, "--json"], capture_output=True, check=False)
        predicted = json.loads(done.stdout or "{}").get("cache") or {}
        with (
            served(root.parent, latency_ms=0, bytes_per_sec=0) as server,
            open_run(
                f"s3://bucket/{root.name}", num_streams=num_streams, window=1000,
                **cache_of(cache_bytes),
            ) as loader,
        ):  # fmt: skip
            list(islice(loader, steps))
            log = [entry for entry in server.log() if is_data(entry)]
        size, fetched = f"cache of {part:.0%}", sum(entry.num_bytes for entry in log)
        yield "fetched", size, fetched / 1e6, "MB"
        yield "requests", size, len(log), ""
        if not predicted:
            yield f"no prediction: {done.stderr.decode().splitlines()[-1:]}", size, 0, ""
            continue
        yield "fetched over predicted", size, fetched / predicted["fetched_bytes"], "x"
        yield "requests over predicted", size, len(log) / predicted["requests"], "x"


if __name__ == "__main__":
    print_rows(rows)
