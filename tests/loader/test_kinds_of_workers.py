"""One matrix: what holds for worker processes of any start method, and for worker threads."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from energon_lite import DefaultTaskEncoder, FatalSampleError, WorkerConfig, stateless

from ..helpers import Ranks, assert_same, through_json, train
from .workers import counts_of, kind_of, loader_of, threads_of_workers, wait_until

pytestmark = pytest.mark.processes
KINDS = ["fork", "thread"]


@pytest.mark.parametrize("kind", KINDS)
def test_finite_passes_are_those_without_workers(texts, kind) -> None:
    make = train(texts, "skipping", repeat=False)
    whole = Ranks(make, 2, num_streams=3)
    run = Ranks(make, 2, 2, num_streams=3, **kind_of(kind))
    for stop in (None, 2, None):  # of the second one, what is left comes in a third `for`
        for rank in range(2):
            for _ in range(stop or 0):
                assert_same(next(run.iterators[rank]), next(whole.iterators[rank]))
        if stop is None:
            assert_same(run.rest(), whole.rest())
        assert_same(counts_of(run), counts_of(whole))
        for each in (run, whole):
            each.iterators = [iter(loader) for loader in each.loaders]


class Telling(DefaultTaskEncoder):
    """Says in each batch where it is computed."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        config: Any = WorkerConfig.active_worker_config
        info: Any = get_worker_info()
        found = {
            "ids": (config.rank_worker_id(), config.global_worker_id()),
            "index": (self.current_batch_index, config.active_worker_batch_index),
            "thread": threading.current_thread().name,
            "is_here": os.getpid() == self.pid,
            "info": info and (info.id, info.num_workers, type(info.dataset).__name__),
        }
        if info:
            found["draws"] = (random.random(), float(torch.rand(())), float(np.random.rand()))
            found["is_seeded"] = info.seed == torch.initial_seed()
            found["threads"] = torch.get_num_threads()
            found["is_daemon"] = multiprocessing.current_process().daemon
            found["ignores"] = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return found

    pid = 0


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(m, marks=pytest.mark.soak) for m in ("spawn", "forkserver"))]
)
def test_hooks_know_their_worker(texts, kind) -> None:
    encoder = Telling()
    encoder.pid = os.getpid()
    num_threads = torch.get_num_threads()
    with loader_of(texts, encoder, kind=kind) as loader:
        batches = iter(loader)
        found = [next(batches) for _ in range(4)]
        assert loader.worker_config.rank_worker_id() == 0  # of the training loop
    assert torch.get_num_threads() == num_threads
    assert [batch["ids"] for batch in found] == [(0, 0), (1, 1)] * 2
    assert [batch["index"] for batch in found] == [(m, m) for m in range(4)]
    if kind == "thread":
        names = [f"energon_lite worker thread {i}" for i in (0, 1)] * 2
        assert [batch["thread"] for batch in found] == names
        assert {(batch["is_here"], batch["info"]) for batch in found} == {(True, None)}
        return
    dataset = type(loader.dataset).__name__
    assert [batch["info"] for batch in found[:2]] == [(0, 2, dataset), (1, 2, dataset)]
    assert set(found[0]["draws"]).isdisjoint(found[1]["draws"])
    for batch in found:
        assert not batch["is_here"]
        assert [batch[n] for n in ("threads", "is_seeded", "is_daemon", "ignores")] == [
            1,
            *[True] * 3,
        ]


@pytest.mark.parametrize("prefetch_factor", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_worker_computes_further_ahead_than_it_may(texts, kind, prefetch_factor) -> None:
    counter = multiprocessing.Value("i", 0)

    class Counting(DefaultTaskEncoder):
        @stateless
        def encode_batch(self, batch: Any) -> Any:
            with counter.get_lock():
                counter.value += 1
            return {"keys": batch.__key__, "x": torch.zeros(100_000)}

    with loader_of(texts, Counting(), kind=kind, prefetch_factor=prefetch_factor) as loader:
        batches = iter(loader)
        for taken in range(1, 9):
            next(batches)
            expected = taken + 2 * prefetch_factor
            wait_until(lambda expected=expected: counter.value >= expected)
            time.sleep(0.002)
            assert counter.value == expected


# ------------------------------------------------------------------------------------ how it ends


class Fatal(DefaultTaskEncoder):
    @stateless(failure_tolerance=2)
    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) >= 20:
            raise ValueError("too large")
        return sample


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_fatal_error_has_its_type_and_text_and_leaves_an_exact_state(texts, kind) -> None:
    before = set(multiprocessing.active_children())
    loader = loader_of(texts, Fatal(), 2 if kind else 0, kind=kind or "fork")
    found: list[Any] = []
    with pytest.raises(FatalSampleError, match=r"failed 2 times in a row .*too large") as caught:
        found.extend(loader)
    # They end at once though the traceback is kept.
    assert set(multiprocessing.active_children()) <= before
    assert threads_of_workers() == []
    if kind:
        text = r"in worker thread \d" if kind == "thread" else r"in worker process \d"
        assert re.search(rf"{text}(?s:.*)in encode_sample", str(caught.value))
    assert [key for batch in found for key in batch.__key__] == [f"{i:05d}" for i in range(20)]
    # The state stands after the last batch that was given, and asking again fails again.
    state = through_json(loader.save_state_rank())
    assert state["count"] == 10
    with pytest.raises(FatalSampleError, match="too large"):
        next(iter(loader))
    assert through_json(loader.save_state_rank())["count"] == 10
    mended = loader_of(texts, Mended(), 0)
    mended.restore_state_rank(state)
    assert next(iter(mended)).__key__ == ["00020", "00021"]


class Mended(Fatal):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_a_loader_in_a_circle_of_references_end_with_it(texts, kind) -> None:
    before = set(multiprocessing.active_children())
    run: Any = Ranks(train(texts), 1, 2, **kind_of(kind))
    run.slots(2)
    run.circle = run
    workers = set(multiprocessing.active_children()) - before
    assert len([*workers, *threads_of_workers()]) == 2
    del run
    gc.collect()
    assert threads_of_workers() == []
    # Sent away, not killed after a time-out.
    assert {worker.exitcode for worker in workers} <= {0}


class Odd(DefaultTaskEncoder):
    """Does something odd in one batch, the first time; says so in a file."""

    def __init__(self, kind: str, flag: Path, seconds: float = 600) -> None:
        super().__init__()
        self.kind = kind
        self.flag = flag
        self.seconds = seconds
        self.awake: Any = None

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "00005" and not self.flag.exists():
            self.flag.touch()
            if self.kind == "sleep":
                (self.awake.wait if self.awake else time.sleep)(self.seconds)
            elif self.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                sample.text = Unwilling()
        return sample


class Unwilling:
    """Is never done with being pickled."""

    def __reduce__(self) -> Any:
        time.sleep(600)


WHERE = (
    r"stage encode_sample, .*encode_sample \(test_kinds_of_workers.py:\d+\), sample 00005 "
    r"\(shard-000.tar\)\.(?s:.*)self\.awake\.wait"
)


@pytest.mark.parametrize(
    ("kind", "odd", "report"),
    [
        ("fork", "sleep", WHERE),
        ("thread", "sleep", WHERE),
        ("fork", "stop", r"It does not answer: its state is T, so it was stopped by a signal"),
        ("fork", "pickle", r"It pickles a batch(?s:.*)in __reduce__"),
    ],
)
def test_stuck_worker_is_reported_and_replaced(texts, tmp_path, caplog, kind, odd, report) -> None:
    encoder = Odd(odd, tmp_path / "flag")
    if kind == "thread":
        encoder.awake = threading.Event()
    with loader_of(texts, encoder, kind=kind, stall_timeout_sec=0.8) as loader:
        batches = iter(loader)
        keys = [key for _ in range(8) for key in next(batches).__key__]
    if encoder.awake:
        encoder.awake.set()
    assert len(set(keys)) == 16
    assert "00005" in keys
    message = caplog.records[0].getMessage()  # on a busy machine the next one may start slowly
    assert "(stuck for" in message
    assert "stall_timeout_sec=0.8" in message
    assert re.search(report, message), message


@pytest.mark.parametrize("kind", KINDS)
def test_slow_worker_reports_what_it_does_and_fails_by_setting(
    texts, tmp_path, caplog, kind
) -> None:
    limits: dict[str, Any] = {"watchdog_timeout_seconds": 0.3, "kind": kind}
    with loader_of(texts, Odd("sleep", tmp_path / "one", 0.8), **limits) as loader:
        batches = iter(loader)
        keys = [key for _ in range(8) for key in next(batches).__key__]
    assert "00005" in keys
    messages = [r.getMessage() for r in caplog.records if "No batch" in r.getMessage()]
    assert len(messages) == 1, messages
    assert f"No batch of worker {'thread 0' if kind == 'thread' else 'process'}" in messages[0]
    assert "stage encode_sample" in messages[0]
    encoder = Odd("sleep", tmp_path / "two", 0.8)
    loader = loader_of(texts, encoder, fail_on_timeout=True, **limits)
    with loader, pytest.raises(RuntimeError, match=r"No batch for 0.3 s (?s:.*)sample 00005"):
        list(loader)


def test_stats_have_the_memory_of_each_worker(texts) -> None:
    run = Ranks(train(texts), 2, 2, num_streams=6)
    run.slots(4)
    stats = run.loaders[1].stats()
    assert stats.place == (1, 2, 2)
    assert len(stats.memory_bytes) == 2
    assert min(stats.memory_bytes) > 2**20
    assert stats.scalars()["data/worker_1/memory_bytes"] == stats.memory_bytes[1]
