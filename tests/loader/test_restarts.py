"""Worker processes that die or get stuck are replaced, and nothing changes in what is given."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from energon_lite import DefaultTaskEncoder, get_train_dataset, stateless
from energon_lite.loader.workers import executor, process_executor, worker_pool

from ..helpers import Ranks, assert_same, train
from .workers import loader_of, workers_of

pytestmark = pytest.mark.processes


def kill(run: Ranks, which: set[int], rank: int = 0) -> None:
    for number, worker in enumerate(workers_of(run, rank)):
        if number in which:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


class Counting(DefaultTaskEncoder):
    """Counts the samples that it encodes, in a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def encode_sample(self, sample: Any) -> Any:
        with self.file.open("a") as file:
            file.write("x")
        return sample


def test_worker_that_replaces_another_begins_where_that_one_stood(texts, tmp_path) -> None:
    count = tmp_path / "count"
    encoder = Counting(count)

    def make(config: Any) -> Any:
        return get_train_dataset(
            texts, worker_config=config, batch_size=1, task_encoder=encoder,
            shuffle_buffer_size=None,
        )  # fmt: skip

    run = Ranks(make, 1, 1, restart_workers=1)
    run.steps(100)
    kill(run, {0})
    run.steps(10)
    run.loaders[0].shutdown()
    assert 110 <= len(count.read_text()) <= 140


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.soak) for m in ("spawn", "forkserver"))]
)
def test_replacing_is_logged_and_limited(texts, method, caplog, monkeypatch) -> None:
    make = train(texts, "skipping")
    expected = Ranks(make, 1, num_streams=2).slots(230)
    run = Ranks(make, 1, 2, start_method=method, restart_workers=2)
    found = run.slots(4)
    kill(run, {0, 1})
    found |= run.slots(70)  # more than both had computed ahead
    texts_logged = [record.getMessage() for record in caplog.records]
    assert len(texts_logged) == 2
    assert "(signal 9) of rank 0 died. " in texts_logged[0]
    assert "often a lack of memory" in texts_logged[0]
    assert sorted(text.partition("its streams ")[2][:3] for text in texts_logged) == ["[0]", "[1]"]
    assert "1 more may die within 10 minutes (restart_workers=2)" in texts_logged[0]
    kill(run, {1})
    text = r"\(signal 9\) of rank 0 died .*Nothing is lost.* 2 were replaced \(restart_workers=2\)"
    with pytest.raises(RuntimeError, match=text):
        run.slots(70)
    run.iterators = [iter(run.loaders[0])]
    slot, batch = run.next(0)
    assert_same({slot: batch}, {slot: expected[slot]})
    assert_same(found, {m: expected[m] for m in range(74)})
    # After some time they may die again.
    monkeypatch.setattr(worker_pool, "RESTART_WINDOW_SEC", 0.0)
    for start in (slot + 1, slot + 71):
        kill(run, {0, 1})
        assert_same(run.slots(70), {m: expected[m] for m in range(start, start + 70)})


def test_log_records_that_are_kept_keep_no_workers_of_a_dropped_loader(texts, caplog) -> None:
    run = Ranks(train(texts), 1, 2, restart_workers=1)
    run.slots(4)
    kill(run, {0})
    run.slots(70)
    workers = workers_of(run)
    del run
    assert len(caplog.records) == 1
    assert {worker.exitcode for worker in workers} == {0}


LOCK = threading.Lock()


class Waiting(DefaultTaskEncoder):
    """Waits in each batch, in some way."""

    def __init__(self, wait: Any) -> None:
        super().__init__()
        self.wait = wait

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        self.wait()
        return batch


def take_lock() -> None:
    with LOCK:
        pass


@pytest.mark.parametrize("is_released", [True, False])
def test_worker_that_was_forked_while_a_thread_had_a_lock_is_found(
    texts, caplog, monkeypatch, is_released
) -> None:
    monkeypatch.setattr(process_executor, "_LOCKED_SEC", 0.3)
    start = worker_pool.WorkerPool._replace

    def replace(*args: Any) -> None:
        if is_released:
            LOCK.release()
        start(*args)

    monkeypatch.setattr(worker_pool.WorkerPool, "_replace", replace)
    holder = threading.Thread(target=LOCK.acquire)
    holder.start()
    holder.join()
    words = r"\(waits for a lock\) of rank 0 died.*"
    with loader_of(texts, Waiting(take_lock), 1, restart_workers=1) as loader:
        if is_released:
            assert next(iter(loader)).__key__ == ["00000", "00001"]
            text = caplog.records[0].getMessage()
        else:
            with pytest.raises(RuntimeError) as caught:
                next(iter(loader))
            LOCK.release()
            text = str(caught.value)
    assert re.search(words, text)
    assert len(caplog.records) == 1
    for word in ("when the process was forked", 'start_method="forkserver"', "in take_lock"):
        assert word in text


SEMAPHORE = multiprocessing.get_context("fork").Semaphore(0)
WAITS = [
    lambda: time.sleep(0.5),
    lambda: threading.Event().wait(0.5),
    lambda: subprocess.run(["sleep", "0.5"], check=True),
    lambda: SEMAPHORE.acquire(timeout=None),
    lambda: select.select([], [], [], 0.5),
    lambda: concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 0.5).result(),
]


def test_hook_that_waits_for_something_is_not_taken_for_locked(texts, caplog, monkeypatch) -> None:
    monkeypatch.setattr(process_executor, "_LOCKED_SEC", 0.1)
    monkeypatch.setattr(executor, "_POLL_SEC", 0.04)
    waits = iter(WAITS)
    encoder = Waiting(lambda: next(waits)())
    with loader_of(texts, encoder, 1, restart_workers=0) as loader:
        for number, _ in enumerate(loader):
            if number == 2:  # the next one is, or will be, waited for
                release = threading.Timer(0.5, SEMAPHORE.release)
                release.start()
            if number == len(WAITS) - 1:
                break
    release.join()
    assert not caplog.records
