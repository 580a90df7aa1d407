"""Saving and restoring: how long it takes, and what is read again."""

from __future__ import annotations

import itertools
import json
import os
import timeit
from typing import Any

import numpy as np
import pytest

from benchmarks.baselines import state_by_hand
from benchmarks.conftest import TextData
from benchmarks.measure import Count, Entry, Figure
from energon_lite import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.loader.resume import decompressed
from energon_lite.sources.sample_loader import SampleLoader

GROUP = "Snapshots and state"
NUM_STREAMS, NUM_SOURCES = 8, 10


def blend_snapshot(num_items: int) -> Snapshot:
    """What a stream over a blend of ten sources has to say."""
    sources = tuple(
        Snapshot("source", {"name": f"set{n}/train", "position": 98_765 + n})
        for n in range(NUM_SOURCES)
    )
    drawn = np.arange(NUM_SOURCES, dtype=np.int64) + num_items
    blend = Snapshot("blend", {"drawn": drawn}, sources)
    return Snapshot("stream", {"items": num_items}, (blend,))


def test_saving_ten_sources_and_eight_streams(
    benchmark: Any, entries: list[Entry], few_texts: TextData
) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2, num_streams=NUM_STREAMS)
    loader = get_savable_loader(
        get_train_dataset(few_texts.root, batch_size=32, worker_config=config)
    )
    loader._run._snapshots = {s: blend_snapshot(12_345 + s) for s in range(NUM_STREAMS)}
    state = loader.save_state_rank()
    streams = decompressed(state["streams"], "streams")
    assert len(streams) == NUM_STREAMS
    assert all(len(stream["inner"][0]["inner"]) == NUM_SOURCES for stream in streams.values())
    assert loader._run._deliveries is None, "no worker was started"

    number = 200
    saving: list[float] = []
    dumping: list[float] = []
    by_hand: list[float] = []
    dumping_by_hand: list[float] = []
    plain = state_by_hand(NUM_STREAMS, NUM_SOURCES)

    def measure() -> None:
        for times, function in (
            (saving, loader.save_state_rank),
            (by_hand, lambda: state_by_hand(NUM_STREAMS, NUM_SOURCES)),
            (dumping, lambda: json.dumps(state)),
            (dumping_by_hand, lambda: json.dumps(plain)),
        ):
            times.append(timeit.timeit(function, number=number) / number)

    benchmark.pedantic(measure, rounds=9)
    entries.append(
        Figure(
            GROUP, "save_state_rank(), 10 sources, 8 streams", "µs", saving,
            "the same dicts as literals", by_hand, goal_sec=1e-3,
        )
    )  # fmt: skip
    size = len(json.dumps(state))
    entries.append(
        Figure(
            GROUP, f"json.dumps of it ({size:,} bytes)", "µs", dumping,
            f"of the literals ({len(json.dumps(plain)):,} bytes)", dumping_by_hand,
        )
    )  # fmt: skip


class ByLength(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Batches of texts of about one length; up to a batch per group is buffered."""

    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return len(sample.text) // 50, None


class Reads:
    """Counts what is read from tars while a state is restored, and nothing else."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = self.size_bytes = self.samples = 0
        self._is_restoring = False
        restore, load, preadv = StreamRun.restore, SampleLoader.__call__, os.preadv

        def counted_restore(run: StreamRun[Any], snapshot: Snapshot) -> None:
            self._is_restoring = True
            restore(run, snapshot)
            self._is_restoring = False

        def counted_load(*args: Any) -> Any:
            self.samples += self._is_restoring
            return load(*args)

        def counted_preadv(*args: Any) -> int:
            size = preadv(*args)
            self.calls += self._is_restoring
            self.size_bytes += self._is_restoring * size
            return size

        def no_pread(*args: Any) -> bytes:
            raise AssertionError("os.pread is not counted")

        patch.setattr(StreamRun, "restore", counted_restore)
        patch.setattr(SampleLoader, "__call__", counted_load)
        patch.setattr(os, "preadv", counted_preadv)
        patch.setattr(os, "pread", no_pread)

    def restore_everywhere(self, loaders: list[Any], states: list[Any]) -> list[list[Any]]:
        """Restores each rank and starts its streams; returns its next batches."""
        batches = []
        for loader in loaders:
            self._is_restoring = True
            loader.restore_state_global(states)
            self._is_restoring = False
            batches.append(list(itertools.islice(loader, NUM_STREAMS)))
        return batches


def buffered(snapshot: dict[str, Any]) -> list[list[Any]]:
    """The restore keys in a snapshot, of whatever stage."""
    keys = list(snapshot.get("keys", ()))
    return keys + [key for inner in snapshot.get("inner", ()) for key in buffered(inner)]


def all_buffered(states: list[dict[str, Any]]) -> list[list[Any]]:
    """The restore keys in the states, of the furthest snapshot of each stream."""
    furthest: dict[str, dict[str, Any]] = {}
    for state in states:
        for stream, snapshot in decompressed(state["streams"], "streams").items():
            if stream not in furthest or snapshot["items"] > furthest[stream]["items"]:
                furthest[stream] = snapshot
    return [key for snapshot in furthest.values() for key in buffered(snapshot)]


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_restoring_reads_nothing_also_where_samples_are_buffered(
    entries: list[Entry], few_texts: TextData, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def loaders(world_size: int) -> list[Any]:
        return [
            get_savable_loader(
                get_train_dataset(
                    few_texts.root,
                    batch_size=16,
                    shuffle_buffer_size=100,
                    task_encoder=ByLength() if kind == "grouped" else None,
                    worker_config=WorkerConfig(
                        rank=rank, world_size=world_size, num_workers=0, num_streams=NUM_STREAMS
                    ),
                )
            )
            for rank in range(world_size)
        ]

    saved = loaders(4)
    for loader in saved:
        for _ in itertools.islice(loader, 11):
            pass
    states = json.loads(json.dumps([loader.save_state_rank() for loader in saved]))
    keys = all_buffered(states)
    assert (len(keys) > NUM_STREAMS) == (kind == "grouped")

    restored = loaders(2)
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        batches = reads.restore_everywhere(restored, states)

    expected = [list(itertools.islice(loader, NUM_STREAMS)) for loader in saved]
    # 4 ranks returned 44 slots; rank r of 4 resumes at slot 44 + 4n + r, of 2 with 44 + 2n + r.
    found = [batches[slot % 2][slot // 2].__key__ for slot in range(2 * NUM_STREAMS)]
    assert found == [expected[slot % 4][slot // 4].__key__ for slot in range(2 * NUM_STREAMS)]
    # Buffered samples are re-created when they leave the buffer.
    assert (reads.samples, reads.size_bytes, reads.calls) == (0, 0, 0)
    entries.append(
        Count(
            GROUP,
            f"4 ranks saved, 2 restore: read, {kind}",
            f"{reads.samples:,} samples, {reads.size_bytes:,} B, {reads.calls:,} calls",
            f"0, of {len(keys):,} buffered",
        )
    )
