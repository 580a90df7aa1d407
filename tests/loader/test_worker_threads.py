"""Worker threads: the same batches, states and counts as in processes, and how they end."""

from __future__ import annotations

import gc
import random
import re
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.storage import files

from ..helpers import (
    Ranks,
    assert_same,
    is_true_in_fork,
    text_set,
    train,
)
from ..programs import run_program
from . import workers
from .test_random_hooks import ENCODERS as DRAWING
from .test_random_hooks import Making
from .workers import ORDER, threads_of_workers

loader_of = partial(workers.loader_of, kind="thread")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while (left := threads_of_workers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


@pytest.mark.parametrize("encoder", DRAWING)
def test_unmarked_hooks_draw_the_same_in_threads_and_after_a_resume(
    texts: Path, encoder: Any
) -> None:
    crude = "{__module__: megatron.energon, __class__: CrudeWebdataset}"
    (texts / ".nv-meta" / "crude.yaml").write_text(crude)
    make = Making(texts, encoder)
    whole = Ranks(make, 1, num_streams=4).slots(30)
    states = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
    run = Ranks(make, 1, 3, num_streams=4, worker_type="thread")
    assert_same(run.slots(15), {m: whole[m] for m in range(15)})
    resumed = Ranks(make, 2, 2, states=run.save(), worker_type="thread")
    assert_same(resumed.slots(6), {m: whole[m] for m in range(15, 21)})
    inline = Ranks(make, 3, states=resumed.save())
    assert_same(inline.slots(9), {m: whole[m] for m in range(21, 30)})
    for made in (*run.loaders, *resumed.loaders):
        made.shutdown()
    now = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
    assert_same(now, states)  # the generators of the training loop stand where they stood


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


def test_thread_that_a_hook_ends_is_replaced_a_few_times(texts: Path, caplog: Any) -> None:
    with loader_of(texts, Failing(SystemExit(3)), restart_workers=2) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        with pytest.raises(RuntimeError, match=r"Worker thread 1 \(SystemExit: 3\) of rank 0 died"):
            next(batches)
    assert len(caplog.records) == 2
    assert "Worker thread 1 (SystemExit: 3) of rank 0 died. Another" in caplog.text


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
    assert threads_of_workers() == []
    assert 16 <= len(calls) <= 17


def test_interrupted_wait_loses_no_batch(texts: Path, request: pytest.FixtureRequest) -> None:
    # In a background job of a shell, interrupts are ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    is_asleep, awake = threading.Event(), threading.Event()

    class Sleeping(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample: Any) -> Any:
            if sample.__key__ == "00005":
                is_asleep.set()
                awake.wait()
            return sample

    def press() -> None:
        is_asleep.wait()
        signal.raise_signal(signal.SIGINT)

    with loader_of(texts, Sleeping()) as loader:
        batches = iter(loader)
        keys = [next(batches).__key__ for _ in range(2)]

        def take_all() -> None:
            threading.Thread(target=press).start()
            keys.extend(batch.__key__ for batch in batches)

        with pytest.raises(KeyboardInterrupt):
            take_all()
        awake.set()
        batches = iter(loader)
        while len(keys) < 8:
            keys.append(next(batches).__key__)
    with loader_of(texts, DefaultTaskEncoder()) as loader:
        assert keys == [batch.__key__ for _, batch in zip(range(8), loader, strict=False)]


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
        assert is_collected.wait(60)
    finally:
        gc.enable()


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


SCRIPT = """
import sys, threading, time, torch
from energon_lite import *

is_hanging, is_computing = threading.Event(), threading.Event()

class Slow(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample):
        if self.current_batch_index > 6 and self.current_batch_index % 3 == 0:
            is_hanging.set()
            time.sleep(600)
        while self.current_batch_index > 6:
            is_computing.set()
            torch.ones(3) + 1
        return sample

config = WorkerConfig(rank=0, world_size=1, num_workers=3, worker_type="thread")
dataset = get_train_dataset(sys.argv[1], batch_size=2, worker_config=config, task_encoder=Slow())
loader = get_savable_loader(dataset)
for _, batch in zip(range(4), loader):
    pass
assert is_hanging.wait(60) and is_computing.wait(60)
print("done")
"""


@pytest.mark.processes
def test_program_ends_whatever_its_threads_do(texts: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_program(script, texts)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "has not ended: a thread cannot be killed" in done.stderr
    assert "Fatal" not in done.stderr


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
