"""What machines fetch where each of them keeps reading the same data: `node_groups`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.remote.cache import BATCH
from benchmarks.remote.runs import (
    NUM_STREAMS,
    WINDOW,
    Bytes,
    cache_of,
    is_data,
    open_run,
    served,
    temporary_folder,
    without_fetcher,
    write_samples,
)
from benchmarks.scale.rows import Row, print_rows
from energon_lite import WorkerConfig, get_train_dataset
from tests.helpers import Ranks, keys_of

NODES, EPOCHS = 8, 3
SAMPLE_BYTES, RECORD_BYTES = 75_000, 75_776
# What the two streams of a machine read ahead; the rest is an eighth of the data.
AHEAD_BYTES = 2 * 24 << 20


def groups_of(number: int) -> dict[str, Any]:
    """Returns the settings of groups."""
    return {"node_groups": number, "ranks_per_node": 1}


def machines(root: Path, num_samples: int, groups: int) -> Iterator[Row]:
    """Runs machines one after the other, each with a cache of its own; yields what they fetch."""
    fetched = later = 0
    per_epoch = num_samples // NODES // BATCH
    with served(root.parent, latency_ms=0, bytes_per_sec=0) as server:
        for node in range(NODES):
            with temporary_folder():
                server.clear_log()
                config = {"rank": node, "world_size": NODES, **groups_of(groups)}
                config |= cache_of(num_samples * RECORD_BYTES // NODES + AHEAD_BYTES)
                with open_run(f"s3://bucket/{root.name}", **config) as loader:
                    batches = iter(loader)
                    list(islice(batches, per_epoch))
                    first = bytes_of_data(server)
                    list(islice(batches, (EPOCHS - 1) * per_epoch))
                    fetched += bytes_of_data(server)
                    later += bytes_of_data(server) - first
                without_fetcher()
    size, used = f"{NODES} machines with {groups} groups", NODES * per_epoch * BATCH * RECORD_BYTES
    yield "fetched over used", size, fetched / used / EPOCHS, "x"
    yield "fetched after the first epoch", size, later / used, "of an epoch"


def bytes_of_data(server: Any) -> int:
    """Returns the bytes of samples that the server has sent."""
    return sum(entry.num_bytes for entry in server.log() if is_data(entry))


def resumed(root: Path, world_size: int) -> Iterator[Row]:
    """Resumes a run of all machines on others; yields how many batches differ."""

    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(
            root, batch_size=BATCH, worker_config=replace(config, **groups_of(NODES)),
            shuffle_buffer_size=WINDOW, task_encoder=Bytes(),
        )  # fmt: skip

    number = 64
    run = Ranks(make, NODES, num_streams=NUM_STREAMS)
    run.slots(number)
    states, expected = run.save(), run.slots(number)
    found = Ranks(make, world_size, states=states).slots(number)
    wrong = sum(keys_of(found[slot]) != keys_of(expected[slot]) for slot in expected)
    yield "batches that differ after a resume", f"on {world_size} machines", wrong, ""


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows, with groups and without; writes samples of 75 KB."""
    num_samples = 64_000 if large else 16_000
    root = write_samples(folder / "served", num_samples, SAMPLE_BYTES)
    for groups in (1, NODES):
        yield from machines(root, num_samples, groups)
    for world_size in (4, 16):
        yield from resumed(root, world_size)


if __name__ == "__main__":
    print_rows(rows)
