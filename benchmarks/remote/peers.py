"""Other loaders that read the same data from the same server, each in its own environment."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.environments import ENVIRONMENTS, answer_of, install
from benchmarks.remote.peer_loaders import IMPORTED, NUM_SHARDS
from benchmarks.remote.runs import served, write_samples
from benchmarks.scale.rows import Row, print_rows

# An epoch is read, or as much of it as comes within this time; then it is a while until the end.
LIMIT_SEC, END_SEC = 45.0, 30.0
MODULE = "benchmarks.remote.peer_loaders"
# Where those of other benchmarks do not do. Energon's are named with versions, since pip tries
# hundreds of them otherwise; later ones of litData read no endpoint without TLS.
PACKAGES = {
    "megatron_energon": [
        "megatron-energon==7.4.1",
        "multi-storage-client[boto3]==1.3.1",
        "boto3==1.43.117",
        "aiobotocore==3.10.0",
    ],
    "litdata_": ["litdata==0.2.60"],
}


def measured(name: str, python: Path, root: Path, what: str, num_workers: int) -> Iterator[Row]:
    """Reads with one loader; yields what came, and what the server sent for it."""
    title, size = title_of(name), f"{what} with {num_workers} workers"
    num_samples = int(root.name.partition("-")[0])
    with served(root.parent) as server:
        words = "read", name, server.url, root.name, num_workers, LIMIT_SEC
        found = answer_of(python, (MODULE, *words), LIMIT_SEC + END_SEC)
        counts = server.counts()
    if "error" in found:
        yield f"{title}: could not be run", size, found["error"], ""
        return
    yield f"{title}: samples", size, found["samples"] / found["wall_sec"], "/s"
    yield f"{title}: useful", size, found["bytes"] / found["wall_sec"] / 1e6, "MB/s"
    yield f"{title}: fetched over used", size, counts["bytes"] / found["bytes"], "x"
    yield f"{title}: requests", size, counts["requests"] / found["samples"], "a sample"
    yield f"{title}: first batch", size, found["first_sec"], "s"
    yield f"{title}: read of an epoch", size, 100 * found["samples"] / num_samples, "%"


def title_of(name: str) -> str:
    """Returns how a loader calls itself."""
    return str(importlib.import_module(f"benchmarks.peers.loaders.{name}").TITLE)


def python_of(name: str) -> tuple[Path | None, str]:
    """Returns the Python of a loader's environment, or why there is none; ours is this one."""
    if name == "ours":
        return Path(sys.executable), ""
    if name in PACKAGES:
        return install(ENVIRONMENTS, f"{name}_remote", PACKAGES[name])
    packages = importlib.import_module(f"benchmarks.peers.loaders.{name}").PACKAGES
    return install(ENVIRONMENTS, name, packages)


def made_ready(root: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns the Python of each loader, with data in its format, or why it cannot be run."""
    pythons, errors = dict[str, Path](), dict[str, str]()
    for name in IMPORTED:
        python, error = python_of(name)
        if python and name == "litdata_" and not (root / "litdata" / "index.json").exists():
            error = answer_of(python, (MODULE, "convert", root), 600).get("error", "")
        if python and not error:
            pythons[name] = python
        else:
            errors[name] = error
    return pythons, errors


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes pictures of 600 MB and texts of 300 MB, or four times as many."""
    factor = 4 if large else 1
    for what, num_samples, num_bytes in (
        ("pictures of 75 KB", 8000 * factor, 75_000),
        ("texts of 1.5 KB", 200_000 * factor, 1500),
    ):
        root = write_samples(folder / "served", num_samples, num_bytes, NUM_SHARDS)
        pythons, errors = made_ready(root)
        for name, error in errors.items():
            yield f"{title_of(name)}: could not be run", what, error, ""
        for num_workers in (0, 2):
            for name, python in pythons.items():
                yield from measured(name, python, root, what, num_workers)


if __name__ == "__main__":
    print_rows(rows)
