"""A server of objects with the latency of a network, datasets, and what reading them took."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from benchmarks.data import prepare_texts, tar_member
from benchmarks.peers.probe import cpu_seconds
from benchmarks.scale.runs import open_loader
from energon_lite import DefaultTaskEncoder, SavableDataLoader, WorkerConfig
from energon_lite.extras.remote import fetcher_client
from tests.remote.server import Logged, Server

LATENCY_MS, BYTES_PER_SEC = 30, 200e6
NUM_STREAMS, WINDOW = 16, 10_000


class Bytes(DefaultTaskEncoder):
    """Leaves the files of samples as they are."""

    decoder = None


@contextmanager
def served(root: Path, **network: float) -> Iterator[Server]:
    """Serves a folder as the buckets of S3, with an own folder for fetchers of this program."""
    network = {"latency_ms": LATENCY_MS, "bytes_per_sec": BYTES_PER_SEC, **network}
    with Server(root=root, **network) as server, temporary_folder():
        os.environ.update(
            AWS_ENDPOINT_URL=server.url, AWS_REGION="us-east-1", AWS_SKIP_SIGNATURE="true"
        )
        yield server


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes an empty folder the one for temporary files: that of a machine for itself."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, None
        fetcher_client.forget()
        try:
            yield Path(folder)
        finally:
            fetcher_client.forget()
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            os.environ.update({} if before is None else {"TMPDIR": before})


def write_samples(folder: Path, num_samples: int, num_bytes: int, num_shards: int = 16) -> Path:
    """Writes and prepares samples of random letters, unless they are there."""
    root = folder / f"{num_samples}-of-{num_bytes}"
    if (root / ".nv-meta").exists():
        return root
    rng = np.random.default_rng(num_samples)
    root.mkdir(parents=True)
    for shard in range(num_shards):
        first, stop = (num_samples * s // num_shards for s in (shard, shard + 1))
        with (root / f"shard-{shard:04d}.tar").open("wb") as file:
            for i in range(first, stop):
                data = rng.integers(97, 123, num_bytes, np.uint8).tobytes()
                file.write(tar_member(f"{i:08d}.txt", data))
            file.write(bytes(1024))
    prepare_texts(root)
    return root


def open_run(
    path: object, *, window: int = WINDOW, repeat: bool = True, **config: Any
) -> SavableDataLoader[Any]:
    """Opens a loader with the streams of all measurements, of raw bytes."""
    return open_loader(
        path, {"num_streams": NUM_STREAMS, **config}, shuffle_buffer_size=window,
        max_samples_per_sequence=None, task_encoder=Bytes(), repeat=repeat,
    )  # fmt: skip


def is_data(entry: Logged) -> bool:
    """Whether a request was for bytes of samples, and not for an index."""
    return entry.method == "GET" and entry.path.endswith(".tar")


@dataclass
class Spent:
    """What was fetched and spent up to a moment, or between two.

    Attributes:
        wall: seconds.
        fetcher: CPU seconds of the process that fetches.
        loader: CPU seconds of the program, with its workers.
        server: CPU seconds of the server.
        requests: all of them.
        bytes: of all of them.
    """

    wall: float
    fetcher: float
    loader: float
    server: float
    requests: int
    bytes: int

    @classmethod
    def now(cls, server: Server) -> Spent:
        """Takes all of it."""
        counts = server.counts()
        fetcher, own = sum(map(cpu_of, fetchers())), cpu_of(server.pid)
        cpu = fetcher, cpu_seconds() - fetcher - own, own
        return cls(perf_counter(), *cpu, counts["requests"], counts["bytes"])

    def __sub__(self, other: Spent) -> Spent:
        mine, its = vars(self), vars(other)
        return Spent(**{name: mine[name] - its[name] for name in mine})


def cache_of(max_bytes: int) -> dict[str, Any]:
    """Returns the setting of a cache for this machine, where this version has it."""
    if "cache" not in signature(WorkerConfig).parameters:
        return {}
    return {"cache": {"path": f"{tempfile.gettempdir()}/cache", "max_bytes": max_bytes}}


def without_fetcher() -> None:
    """Waits until the fetchers that have no client any more have ended."""
    fetcher_client.forget()
    gc.collect()
    while fetchers():
        sleep(0.05)


def fetchers() -> list[int]:
    """Returns the processes that fetch for the present folder of temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        is_own = any(word.startswith(os.environ["TMPDIR"].encode()) for word in words)
        if is_own and b"energon_lite.extras.remote.fetcher" in words:
            found.append(int(path.parent.name))
    return found


def cpu_of(process: int) -> float:
    """Returns the CPU seconds of a process that runs, and of its threads."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
