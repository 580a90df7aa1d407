"""Worker threads: the same batches, states and counts as in processes, and how they end."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core import global_generators
from energon_lite.storage import files

from ..conftest import examples
from ..helpers import (
    ENCODERS,
    Ranks,
    assert_same,
    is_true_in_fork,
    text_set,
    through_json,
    train,
    validation,
)
from .test_random_hooks import ENCODERS as DRAWING
from .test_random_hooks import Making
from .test_restarts import ORDER, counts_of


def threads_of_workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("energon_lite worker")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := threads_of_workers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


# ---------------------------------------------------------------------------------- same content


@examples(15)
@given(
    encoder=st.sampled_from(sorted(ENCODERS)),
    num_streams=st.integers(1, 5),
    stages=st.lists(
        st.tuples(
            st.sampled_from(["process", "thread"]),
            st.integers(1, 3),
            st.integers(0, 3),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_run_resumed_with_threads_and_without_gives_what_one_unbroken_run_gives(
    texts: Path, encoder: str, num_streams: int, stages: Any
) -> None:
    make = train(texts, encoder)
    whole = Ranks(make, 1, num_streams=num_streams)
    expected = whole.slots(60)
    states, found = None, {}
    for worker_type, world_size, num_workers, steps in stages:
        # Without threads, in this process: processes take long to start, and are tested once below.
        num_workers = num_workers if worker_type == "thread" else 0
        run = Ranks(
            make, world_size, num_workers, worker_type=worker_type, states=states,
            num_streams=num_streams,
        )  # fmt: skip
        found |= run.steps(steps)
        states = run.save()
    expected = {m: expected[m] for m in sorted(found)}
    assert dict(sorted(found.items())).keys() == expected.keys()
    if expected:
        assert_same(dict(sorted(found.items())), expected)


@pytest.mark.processes
def test_state_of_threads_resumes_in_processes_and_the_reverse(texts: Path) -> None:
    make = train(texts, "skipping")
    whole = Ranks(make, 1, num_streams=4)
    expected = whole.slots(36)
    found: dict[int, Any] = {}
    states = None
    for worker_type in ("thread", "process", "thread"):
        run = Ranks(make, 2, 2, worker_type=worker_type, num_streams=4, states=states)
        found |= run.steps(6)
        states = run.save()
    assert_same(dict(sorted(found.items())), expected)
    counts, whole_counts = counts_of(run), counts_of(whole)
    streams = {k: v for state in counts for k, v in state["streams"].items()}
    assert_same(dict(sorted(streams.items())), dict(sorted(whole_counts[0]["streams"].items())))


@pytest.mark.parametrize("encoder", ["skipping", "expanding", "grouping"])
def test_all_passes_over_finite_data_are_those_without_workers(texts: Path, encoder: str) -> None:
    for make in (validation(texts, encoder), train(texts, encoder, repeat=False)):
        whole = Ranks(make, 2, num_streams=3)
        run = Ranks(make, 2, 2, num_streams=3, worker_type="thread")
        for _ in range(3):
            assert_same(run.rest(), whole.rest())
            assert_same(counts_of(run), counts_of(whole))
            for each in (run, whole):
                each.iterators = [iter(loader) for loader in each.loaders]


@pytest.mark.parametrize("encoder", DRAWING)
def test_unmarked_hooks_draw_the_same_in_threads(texts: Path, encoder: Any) -> None:
    crude = "{__module__: megatron.energon, __class__: CrudeWebdataset}"
    (texts / ".nv-meta" / "crude.yaml").write_text(crude)
    make = Making(texts, encoder)
    whole = Ranks(make, 1, num_streams=4).slots(30)
    states = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
    run = Ranks(make, 1, 3, num_streams=4, worker_type="thread")
    assert_same(run.slots(15), {m: whole[m] for m in range(15)})
    resumed = Ranks(make, 2, 2, states=run.save(), worker_type="thread")
    assert_same(resumed.slots(14), {m: whole[m] for m in range(15, 29)})
    for made in (*run.loaders, *resumed.loaders):
        made.shutdown()
    now = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
    assert_same(now, states)  # the generators of the training loop stand where they stood


def test_seeds_of_hooks_hold_in_threads_that_run_side_by_side(texts: Path) -> None:
    class Seeded(DefaultTaskEncoder):
        @stateless(restore_seeds=True)
        def encode_sample(self, sample: Any) -> Any:
            first = random.random(), np.random.rand()
            time.sleep(0.0005)  # another thread runs
            sample.text = f"{first} {torch.rand(()).item()} {random.random()}"
            return sample

    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(texts, batch_size=3, worker_config=config, task_encoder=Seeded())

    whole = Ranks(make, 1, num_streams=4).slots(30)
    state = torch.get_rng_state()
    assert_same(Ranks(make, 1, 4, num_streams=4, worker_type="thread").slots(30), whole)
    gc.collect()
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------- what is known


class Telling(DefaultTaskEncoder):
    """Says in each batch where it is computed."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        config: Any = WorkerConfig.active_worker_config
        return {
            "keys": batch.__key__,
            "id": (config.rank_worker_id(), config.global_worker_id()),
            "index": (self.current_batch_index, config.active_worker_batch_index),
            "thread": threading.current_thread().name,
            "pid": os.getpid(),
            "info": get_worker_info(),
        }


def test_hooks_know_their_worker(texts: Path) -> None:
    num_threads = torch.get_num_threads()
    config = WorkerConfig(rank=1, world_size=2, num_workers=2, worker_type="thread")
    dataset = get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=Telling())
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        found = [next(batches) for _ in range(4)]
        assert config.rank_worker_id() == 0  # of the training loop
    assert [batch["id"] for batch in found] == [(0, 2), (1, 3)] * 2
    assert [batch["index"] for batch in found] == [(m, m) for m in (1, 3, 5, 7)]
    assert {batch["thread"] for batch in found} == {
        f"energon_lite worker thread {i}" for i in (0, 1)
    }
    assert {batch["pid"] for batch in found} == {os.getpid()}
    assert {batch["info"] for batch in found} == {None}
    assert torch.get_num_threads() == num_threads


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="worker_type='threads' is not one of process, thread"):
        WorkerConfig(rank=0, world_size=1, num_workers=1, worker_type="threads")
    with pytest.raises(ValueError, match="start_method='fork' is of worker processes"):
        WorkerConfig(rank=0, world_size=1, num_workers=1, worker_type="thread", start_method="fork")


def loader_of(texts: Path, encoder: Any, num_workers: int = 2, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, worker_type="thread")
    dataset = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=encoder, **ORDER
    )
    return get_savable_loader(dataset, **settings)


def test_no_thread_computes_further_ahead_than_it_may(texts: Path) -> None:
    for prefetch_factor in (1, 3):
        computed: list[int] = []

        class Counting(DefaultTaskEncoder):
            @stateless
            def encode_batch(self, batch: Any, computed: Any = computed) -> Any:
                computed.append(self.current_batch_index)
                return batch

        with loader_of(texts, Counting(), prefetch_factor=prefetch_factor) as loader:
            batches = iter(loader)
            for taken in range(1, 9):
                next(batches)
                expected = taken + 2 * prefetch_factor
                deadline = time.monotonic() + 20
                while len(computed) < expected and time.monotonic() < deadline:
                    time.sleep(0.002)
                time.sleep(0.002)
                assert len(computed) == expected


def test_torch_warns_of_too_many_processes_and_of_no_threads(texts: Path) -> None:
    def made(worker_type: str) -> list[str]:
        config = WorkerConfig(rank=0, world_size=1, num_workers=500, worker_type=worker_type)
        dataset = get_train_dataset(texts, batch_size=2, worker_config=config, **ORDER)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            get_savable_loader(dataset)
        return [str(warning.message) for warning in found]

    assert "500 worker processes" in str(made("process"))
    assert made("thread") == []


def test_hooks_that_may_draw_are_named_once(texts: Path, caplog: Any) -> None:
    files.warn_once.cache_clear()

    class Drawing(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @stateless(restore_seeds=True)
        def encode_batch(self, batch: Any) -> Any:
            return batch

    class Marked(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return sample

    for encoder in (Drawing(), Drawing(), Marked()):
        with loader_of(texts, encoder) as loader:
            next(iter(loader))
    (record,) = caplog.records
    text = record.getMessage()
    assert re.search(r"encode_batch, \S+encode_batch \(test_worker_threads.py:\d+\)", text), text
    assert re.search(r"encode_sample, \S+encode_sample \(test_worker_threads.py:\d+\)", text), text
    for remedy in ("@stateless", "sample_rng()", "worker_type='process'"):
        assert remedy in text


# ------------------------------------------------------------------------------------ how it ends


class Failing(DefaultTaskEncoder):
    """Raises something in the batch of slot 5."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index == 5:
            raise self.error
        return batch


def test_error_has_its_traceback_and_names_the_thread(texts: Path) -> None:
    with loader_of(texts, Failing(FatalSampleError("the cause"))) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        with pytest.raises(FatalSampleError) as info:
            next(batches)
    text = str(info.value)
    assert "in worker thread 1" in text
    assert "in encode_batch" in text
    assert "the cause" in text


def test_thread_that_a_hook_ends_is_replaced_a_few_times(texts: Path, caplog: Any) -> None:
    with loader_of(texts, Failing(SystemExit(3)), restart_workers=2) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        with pytest.raises(RuntimeError, match=r"Worker thread 1 \(SystemExit: 3\) of rank 0 died"):
            next(batches)
    assert len(caplog.records) == 2
    assert "Worker thread 1 (SystemExit: 3) of rank 0 died. Another" in caplog.text


class Odd(DefaultTaskEncoder):
    """Sleeps in one sample, the first time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.awake = threading.Event()
        self.has_slept = False

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__ == "00005" and not self.has_slept:
            self.has_slept = True
            self.awake.wait(self.seconds)
        return sample


def test_stuck_thread_is_reported_and_its_streams_go_on_in_another(
    texts: Path, caplog: Any
) -> None:
    encoder = Odd(600)
    with loader_of(texts, encoder, stall_timeout_sec=0.4) as loader:
        batches = iter(loader)
        keys = [key for _ in range(8) for key in next(batches).__key__]
    encoder.awake.set()
    assert len(set(keys)) == 16
    assert "00005" in keys
    (record,) = caplog.records
    text = record.getMessage()
    assert "thread 0 (stuck for" in text
    assert re.search(r"stage encode_sample, .*sample 00005 \(shard-000.tar\)", text), text
    assert "self.awake.wait" in text


def test_slow_thread_reports_what_it_does_and_fails_by_setting(texts: Path, caplog: Any) -> None:
    encoder = Odd(1.0)
    with loader_of(texts, encoder, watchdog_timeout_seconds=0.3) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
    reports = [r.getMessage() for r in caplog.records if "No batch" in r.getMessage()]
    assert len(reports) == 1, reports
    assert "No batch of worker thread 0" in reports[0]
    assert "stage encode_sample" in reports[0]
    encoder = Odd(1.0)
    limits: dict[str, Any] = {"watchdog_timeout_seconds": 0.3, "fail_on_timeout": True}
    with loader_of(texts, encoder, **limits) as loader:
        with pytest.raises(RuntimeError, match=r"No batch for 0.3 s (?s:.*)sample 00005"):
            list(loader)
        encoder.awake.set()


def test_end_waits_for_no_whole_batch(texts: Path) -> None:
    begun = threading.Event()
    calls: list[str] = []

    class Slow(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            calls.append(sample.__key__)
            if len(calls) > 15:
                begun.set()
                time.sleep(0.2)
            return sample

    config = WorkerConfig(rank=0, world_size=1, num_workers=1, worker_type="thread")
    dataset = get_train_dataset(texts, batch_size=10, worker_config=config, task_encoder=Slow())
    with get_savable_loader(dataset) as loader:
        next(iter(loader))
        begun.wait()
        since = time.monotonic()
    assert time.monotonic() - since < 0.9
    assert threads_of_workers() == []
    assert 16 <= len(calls) <= 17


def test_interrupted_wait_loses_no_batch(texts: Path, request: pytest.FixtureRequest) -> None:
    # In a background job of a shell, interrupts are ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    encoder = Odd(600)
    with loader_of(texts, encoder) as loader:
        batches = iter(loader)
        keys = [next(batches).__key__ for _ in range(2)]
        press = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        press.start()
        with pytest.raises(KeyboardInterrupt):
            keys.extend(batch.__key__ for batch in batches)
        encoder.awake.set()
        batches = iter(loader)
        while len(keys) < 8:
            keys.append(next(batches).__key__)
    with loader_of(texts, DefaultTaskEncoder()) as loader:
        assert keys == [batch.__key__ for _, batch in zip(range(8), loader, strict=False)]


def test_unmarked_hook_may_read_another_pipeline(texts: Path) -> None:
    class Inner(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            sample.text = str(random.random())
            return sample

    class Outer(DefaultTaskEncoder):
        def encode_batch(self, batch: Any) -> Any:
            inner = get_train_dataset(texts, batch_size=2, task_encoder=Inner(), **ORDER)
            return {"own": random.random(), "inner": [next(iter(inner)).text for _ in range(2)]}

    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=Outer())

    whole = Ranks(make, 1, num_streams=2).slots(6)
    assert_same(Ranks(make, 1, 2, worker_type="thread").slots(6), whole)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hook_that_waits_for_threads_that_wait_for_its_generators_is_an_error(
    texts: Path, num_workers: int
) -> None:
    class Inner(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return sample

    class Outer(DefaultTaskEncoder):
        def encode_batch(self, batch: Any) -> Any:
            with loader_of(texts, self.inner) as loader:
                batch.__inner__ = next(iter(loader)).__key__
            return batch

    class Marked(Outer):
        @stateless
        def encode_batch(self, batch: Any) -> Any:
            return super().encode_batch(batch)

    def first(outer: Any, inner: Any) -> Any:
        outer.inner = inner
        with loader_of(texts, outer, num_workers) as loader:
            return next(iter(loader)).__inner__

    assert first(Marked(), Inner()) == first(Outer(), DefaultTaskEncoder())
    with pytest.raises(FatalSampleError, match="both would wait for ever"):
        first(Outer(), Inner())


def test_loader_may_be_collected_in_a_thread_of_its_own(texts: Path) -> None:
    is_dropped, is_collected = threading.Event(), threading.Event()

    class Collecting(DefaultTaskEncoder):
        @stateless
        def encode_batch(self, batch: Any) -> Any:
            if self.current_batch_index == 4:
                is_dropped.wait()
                gc.collect()
                is_collected.set()
            return batch

    loader = loader_of(texts, Collecting())
    next(iter(loader))
    gc.disable()
    try:
        loader.own = loader  # a cycle
        del loader
        is_dropped.set()
        assert is_collected.wait(20)
    finally:
        gc.enable()


def test_dropped_loader_ends_its_threads(texts: Path) -> None:
    loader = loader_of(texts, DefaultTaskEncoder())
    next(iter(loader))
    assert len(threads_of_workers()) == 2
    reference = weakref.ref(loader)
    del loader
    gc.collect()
    assert reference() is None
    assert threads_of_workers() == []


def test_break_and_a_new_for_go_on_where_the_loop_was_left(texts: Path) -> None:
    make = train(texts, "skipping")
    whole = Ranks(make, 1, num_streams=2).slots(9)
    run = Ranks(make, 1, 2, worker_type="thread")
    found: list[Any] = []
    for _ in range(3):
        for batch in run.loaders[0]:
            found.append(batch)
            if len(found) % 3 == 0:
                break
    assert_same(found, list(whole.values()))


def test_fork_of_the_process_leaves_the_threads_alone_and_may_read_on(texts: Path) -> None:
    make = train(texts, "skipping")  # its hooks have the generators most of the time
    whole = Ranks(make, 1, num_streams=2).slots(40)
    state = torch.get_rng_state()  # later, a hook may have the generators
    run = Ranks(make, 1, 2, worker_type="thread")
    assert_same(run.slots(3), {m: whole[m] for m in range(3)})
    for first in range(3, 33, 3):

        def reads_on(first: int = first) -> bool:
            assert threads_of_workers() == []
            assert torch.equal(torch.get_rng_state(), state)
            assert_same(run.slots(2), {m: whole[m] for m in range(first, first + 2)})
            run.loaders[0].shutdown()
            return True

        assert is_true_in_fork(reads_on)
        assert_same(run.slots(3), {m: whole[m] for m in range(first, first + 3)})


def test_fork_waits_a_moment_only_for_a_hook_that_has_the_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(global_generators, "_FORK_SEC", 0.05)
    is_inside, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        is_inside.set()
        may_end.wait()

    thread = threading.Thread(target=global_generators.call_seeded, args=(7, hold))
    thread.start()
    is_inside.wait()

    def can_draw() -> bool:
        return global_generators.call_seeded(8, lambda: True)

    assert is_true_in_fork(can_draw)
    may_end.set()
    thread.join()
    assert can_draw()


SCRIPT = """
import sys, threading, time, torch
from energon_lite import *

is_inside = threading.Event()

class Slow(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample):
        if self.current_batch_index > 6:
            is_inside.set()
        if self.current_batch_index > 6 and HOW == "hangs":
            time.sleep(600)
        while self.current_batch_index > 6 and HOW == "computes":
            torch.ones(3) + 1
        return sample

HOW = sys.argv[2]
config = WorkerConfig(rank=0, world_size=1, num_workers=3, worker_type="thread")
dataset = get_train_dataset(sys.argv[1], batch_size=2, worker_config=config, task_encoder=Slow())
loader = get_savable_loader(dataset)
for _, batch in zip(range(4), loader):
    pass
if HOW in ("hangs", "computes"):
    assert is_inside.wait(60)
if HOW == "raises":
    raise ValueError("of the loop")
print("done")
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["ends", "hangs", "computes", "raises"])
def test_program_ends_whatever_its_threads_do(texts: Path, tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), str(texts), how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (how == "raises"), done.stderr
    assert ("done" in done.stdout) == (how != "raises")
    is_left = "has not ended: a thread cannot be killed" in done.stderr
    assert is_left == (how in ("hangs", "computes"))
    assert "Fatal" not in done.stderr
    assert time.monotonic() - since < 45


# --------------------------------------------------------------------------- what threads share


def test_shards_that_many_threads_open_and_close_are_read_right(tmp_path: Path) -> None:
    path = text_set(tmp_path / "many", 120, num_shards=40)
    make = train(path, "plain", max_samples_per_sequence=2)
    whole = Ranks(make, 1, num_streams=8).slots(80)
    for max_open in (0, 1, 3):

        def make_few(config: WorkerConfig, max_open: int = max_open) -> Any:
            dataset = make(config)
            source = dataset
            while source.children:
                (source,) = source.children
            source.reader.max_open = max_open
            return dataset

        run = Ranks(make_few, 1, 8, num_streams=8, worker_type="thread")
        assert_same(run.slots(80), whole)


def test_state_is_saved_while_threads_compute_ahead(texts: Path) -> None:
    make = train(texts, "expanding")
    run = Ranks(make, 1, 3, worker_type="thread", prefetch_factor=4)
    model = Ranks(make, 1, num_streams=3)
    for _ in range(20):
        run.next(0), model.next(0)
        assert_same(counts_of(run), counts_of(model))
        assert through_json(run.loaders[0].state_dict())
