"""Worker processes that die or get stuck are replaced, and nothing changes in what is given."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import random
import re
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.loader.workers import process_executor, worker_pool

from ..conftest import examples
from ..helpers import Ranks, assert_same, opened, through_json, train, validation
from .test_worker_pool import workers_of

pytestmark = pytest.mark.processes


def counts_of(run: Ranks) -> Any:
    """What a run counted, without the seconds that it took, and its state without these."""
    found = []
    for loader in run.loaders:
        state = opened(through_json(loader.save_state_rank()))
        for fields in state["stats"].values():
            for name in ("read_sec", "encode_sec", "wait_sec"):
                fields.pop(name, None)
        found.append({**state, "checksum": 0})
    return found


def kill(run: Ranks, which: set[int], rank: int = 0) -> None:
    for number, worker in enumerate(workers_of(run, rank)):
        if number in which:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


@examples(5)
@given(
    encoder=st.sampled_from(["skipping", "expanding", "expanding batches", "grouping"]),
    num_workers=st.integers(1, 3),
    num_streams=st.integers(1, 5),
    kills=st.dictionaries(st.integers(0, 14), st.sets(st.integers(0, 2)), max_size=3),
    pause_ms=st.integers(0, 5),
    start=st.integers(0, 4),
)
def test_killed_workers_change_no_batch_and_no_count(
    texts, encoder, num_workers, num_streams, kills, pause_ms, start
) -> None:
    make = train(texts, encoder)
    whole = Ranks(make, 1, num_streams=num_streams)
    expected = whole.slots(15 + start)
    first = Ranks(make, 1, num_streams=num_streams)
    first.steps(start)
    run = Ranks(make, 1, num_workers, states=first.save(), restart_workers=20)
    for step in range(15):
        slot, batch = run.next(0)
        assert_same({slot: batch}, {start + step: expected[start + step]})
        if step in kills:
            time.sleep(pause_ms / 1000)
            kill(run, kills[step])
    assert_same(counts_of(run), counts_of(whole))


@examples(4)
@given(
    num_workers=st.integers(1, 3),
    world_size=st.integers(1, 2),
    kills=st.lists(st.integers(0, 12), max_size=2),
)
def test_killed_workers_change_no_pass_over_finite_data(
    texts, num_workers, world_size, kills
) -> None:
    make = validation(texts, "skipping")
    whole = Ranks(make, world_size, num_streams=3)
    expected = whole.rest()
    run = Ranks(make, world_size, num_workers, num_streams=3, restart_workers=20)
    for _ in range(2):  # the next pass is told to the new workers as well
        found: dict[int, Any] = {}
        for rank, iterator in enumerate(run.iterators):
            for step, batch in enumerate(iterator):
                state = through_json(run.loaders[rank].save_state_rank())
                found[(state["count"] - 1) * world_size + rank] = batch
                if step in kills:
                    kill(run, {0, 1, 2}, rank)
        assert_same(dict(sorted(found.items())), expected)
        run.iterators = [iter(loader) for loader in run.loaders]


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
    for _ in range(4):
        kill(run, {0, 1})
        slot, batch = run.next(0)
        assert_same({slot: batch}, {slot: expected[slot]})


def test_log_records_that_are_kept_keep_no_workers_of_a_dropped_loader(texts, caplog) -> None:
    run = Ranks(train(texts), 1, 2, restart_workers=1)
    run.slots(4)
    kill(run, {0})
    run.slots(70)
    workers = workers_of(run)
    del run
    assert len(caplog.records) == 1
    assert {worker.exitcode for worker in workers} == {0}


# That of the files.
ORDER: dict[str, Any] = {
    "shuffle_buffer_size": None,
    "max_samples_per_sequence": None,
    "shuffle_over_epochs_multiplier": None,
}


class Odd(DefaultTaskEncoder):
    """Does something odd in one batch, the first time; says so in a file."""

    def __init__(self, kind: str, flag: Path) -> None:
        super().__init__()
        self.kind = kind
        self.flag = flag

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "00005" and not self.flag.exists():
            self.flag.touch()
            if self.kind == "sleep":
                time.sleep(600)
            elif self.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                sample.text = Unwilling()
        return sample


class Unwilling:
    """Is never done with being pickled."""

    def __reduce__(self) -> Any:
        time.sleep(600)


@pytest.mark.parametrize(
    ("kind", "report"),
    [
        ("sleep", r"stage encode_sample, .*encode_sample \(test_restarts.py:\d+\), sample 00005 "
                  r"\(shard-000.tar\)\.(?s:.*)time\.sleep\(600\)"),
        ("stop", r"It does not answer: its state is T, so it was stopped by a signal"),
        ("pickle", r"It pickles a batch(?s:.*)in __reduce__"),
    ],
)  # fmt: skip
def test_stuck_worker_is_reported_and_replaced(texts, tmp_path, caplog, kind, report) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = get_train_dataset(
        texts,
        batch_size=2,
        worker_config=config,
        task_encoder=Odd(kind, tmp_path / "flag"),
        **ORDER,
    )
    with get_savable_loader(dataset, stall_timeout_sec=0.4) as loader:
        batches = iter(loader)
        keys = [key for _ in range(8) for key in next(batches).__key__]
    assert len(set(keys)) == 16
    assert "00005" in keys
    (record,) = caplog.records
    message = record.getMessage()
    assert "(stuck for" in message
    assert "stall_timeout_sec=0.4" in message
    assert re.search(report, message), message


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
    monkeypatch.setattr(process_executor, "_LOCKED_SEC", 0.5)
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method="fork")
    dataset = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=Waiting(take_lock), **ORDER
    )
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
    with get_savable_loader(dataset, restart_workers=1) as loader:
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


@pytest.mark.parametrize(
    "wait",
    [
        lambda: time.sleep(2),
        lambda: threading.Event().wait(2),
        lambda: subprocess.run(["sleep", "2"], check=True),
        lambda: concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 2).result(),
        lambda: SEMAPHORE.acquire(timeout=None),
        lambda: select.select([], [], [], 2),
    ],
    ids=["sleep", "event", "process", "thread", "other process", "file"],
)
def test_hook_that_waits_for_something_is_not_taken_for_locked(
    texts, caplog, monkeypatch, wait
) -> None:
    monkeypatch.setattr(process_executor, "_LOCKED_SEC", 0.1)
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method="fork")
    dataset = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=Waiting(wait), **ORDER
    )
    release = threading.Timer(2, SEMAPHORE.release)
    release.start()
    with get_savable_loader(dataset, restart_workers=0) as loader:
        assert next(iter(loader)).__key__ == ["00000", "00001"]
    release.join()
    while SEMAPHORE.acquire(block=False):
        pass
    assert not caplog.records


def test_slow_worker_reports_what_it_does_and_fails_by_setting(texts, tmp_path, caplog) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    for fails in (False, True):
        flag = tmp_path / f"flag{fails}"
        dataset = get_train_dataset(
            texts, batch_size=8, worker_config=config, task_encoder=Odd("sleep", flag)
        )
        limits = {"watchdog_timeout_seconds": 0.3, "fail_on_timeout": fails}
        with get_savable_loader(dataset, **limits) as loader:
            if fails:
                with pytest.raises(RuntimeError, match=r"No batch for 0.3 s (?s:.*)sample 00005"):
                    list(loader)
                continue

            def give_up(*_: object) -> None:
                raise TimeoutError

            before = signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, 1.5)
            try:
                with pytest.raises(TimeoutError):
                    list(loader)
            finally:
                signal.signal(signal.SIGALRM, before)
    messages = [r.getMessage() for r in caplog.records if "No batch" in r.getMessage()]
    assert len(messages) == 1, messages
    assert "No batch of worker process" in messages[0]
    assert "stage encode_sample" in messages[0]


def test_senseless_limits_are_refused(texts) -> None:
    dataset = get_train_dataset(texts, batch_size=2)
    for wrong in ({"restart_workers": -1}, {"stall_timeout_sec": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            get_savable_loader(dataset, **wrong)  # type: ignore[arg-type]


def test_workers_killed_at_random_moments_change_no_batch_and_no_state(texts) -> None:
    numbers = random.Random(3)
    make = train(texts, "skipping")
    whole = Ranks(make, 1, num_streams=2).slots(240)
    run = Ranks(make, 1, 2, restart_workers=1_000)
    num_kills = position = 0
    while position < 240:
        if numbers.random() < 0.1:
            time.sleep(numbers.uniform(0, 0.01))
            if run.loaders[0]._run._deliveries is not None:
                os.kill(numbers.choice(workers_of(run)).pid, signal.SIGKILL)
                num_kills += 1
        number = min(numbers.randint(1, 6), 240 - position)
        assert_same(run.slots(number), {m: whole[m] for m in range(position, position + number)})
        position += number
        if position < 200 and numbers.random() < 0.05:
            run = Ranks(make, 1, 2, states=run.save(), restart_workers=1_000)
    assert num_kills > 3
