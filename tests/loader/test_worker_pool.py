"""Worker processes: what they are told, what they send, and how they and the loader end."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.process
import os
import random
import signal
import threading
import time
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    batch_stack,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.loader.workers import worker_pool

from ..helpers import Ranks, assert_same, is_true_in_fork, train, validation
from .workers import workers_of

pytestmark = pytest.mark.processes


# ------------------------------------------------------------------------------------- how it ends


class Slow(DefaultTaskEncoder):
    """Records in a file when a hook was ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if self.current_batch_index < 2:
            return batch
        try:
            self.work()
            time.sleep(600)
        finally:
            (self.folder / str(self.current_batch_index)).touch()
        raise SkipSample

    def work(self) -> None:
        pass


class Deleting(Slow):
    """Is where Python drops exceptions, as often in an import, when it is to end."""

    def work(self) -> None:
        class Sleeper:
            def __del__(self) -> None:
                time.sleep(5)

        Sleeper()


@pytest.mark.parametrize("kind", [Slow, Deleting])
def test_hooks_end_with_their_finally_blocks_and_those_that_swallow_are_killed(
    texts, tmp_path, kind, capfd
) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=kind(tmp_path)
    )
    with get_savable_loader(dataset) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        time.sleep(0.2)
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}
    assert "Exception ignored" not in capfd.readouterr().err


def test_fork_of_the_main_process_leaves_the_workers_alone(texts) -> None:
    make = train(texts)
    whole = Ranks(make, 1, num_streams=2).slots(8)
    run = Ranks(make, 1, 2)
    assert_same(run.slots(3), {m: whole[m] for m in range(3)})

    def uses_workers_of_its_own() -> bool:
        assert_same(run.slots(2), {m: whole[m] for m in range(3, 5)})
        run.loaders[0].shutdown()
        multiprocessing.util._exit_function()  # as at the end of a program
        return True

    assert is_true_in_fork(uses_workers_of_its_own)
    assert all(worker.is_alive() for worker in workers_of(run))
    assert_same(run.slots(5), {m: whole[m] for m in range(3, 8)})


def test_batches_are_pinned_ahead_where_there_is_a_gpu(texts, monkeypatch) -> None:
    threads: list[str] = []

    def pin(item: Any) -> Any:
        threads.append(threading.current_thread().name)
        return item

    make = train(texts, "skipping", repeat=False)
    whole = Ranks(make, 1, num_streams=3).rest()
    run = Ranks(make, 1, 3)  # before torch believes that there is a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(worker_pool, "pin_memory", pin)
    assert_same(run.rest(), whole)
    assert len(threads) > len(whole)  # with the marks of the streams' ends
    assert all(name.startswith("pinning") for name in threads)
    run.iterators = [iter(run.loaders[0])]
    assert len(run.steps(2)) == 2
    run.loaders[0].shutdown()
    # What was received ahead in a pass that is broken off is in no other pass.
    make = validation(texts, "skipping")
    whole = Ranks(make, 1, num_streams=3).rest()
    run = Ranks(make, 1, 3)
    run.steps(1)
    time.sleep(0.3)  # so that the next one but one is ready
    run.steps(1)
    run.iterators = [iter(run.loaders[0])]
    assert_same(run.rest(), whole)
    run.loaders[0].shutdown()
    assert not any(t.name.startswith("pinning") and t.is_alive() for t in pinned_threads())


def pinned_threads() -> list[threading.Thread]:
    deadline = time.monotonic() + 60
    found = [True]
    while found and time.monotonic() < deadline:
        found = [t for t in threading.enumerate() if t.name.startswith("pinning")]
    return found


class Pictures(DefaultTaskEncoder):
    """Adds an array and a tensor that are made of the number of the batch."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        number = self.current_batch_index
        size = 20_000 + 3_000 * (number % 7)
        tensor = torch.full((size,), float(number))
        return {"number": number, "tensor": tensor, "array": np.full(size, number)}


def are_right(batch: dict[str, Any]) -> bool:
    """Whether the content of a batch of `Pictures` is that of its number."""
    parts = (batch["tensor"].numpy(), batch["array"])
    return all(len(part) >= 20_000 and (part == batch["number"]).all() for part in parts)


def pictures(texts: Path, num_workers: int = 2, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, start_method="fork")
    dataset = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=Pictures(), **settings
    )
    return get_savable_loader(dataset)


def test_batches_stay_right_after_their_worker_was_killed_and_the_loader_was_dropped(texts) -> None:
    numbers = random.Random(0)
    loader = pictures(texts)
    batches = iter(loader)
    kept: list[Any] = []
    for _ in range(60):
        kept.append(next(batches))
        if numbers.random() < 0.05:
            workers: Any = loader._run._deliveries
            os.kill(numbers.choice(workers._workers).process.pid, signal.SIGKILL)
        if numbers.random() < 0.4:
            del kept[numbers.randrange(len(kept))]
        assert all(map(are_right, kept))
    memory = weakref.ref(workers._workers[0]._inlet.arena._memory)
    loader.shutdown()
    del loader, batches, workers
    gc.collect()
    assert all(map(are_right, kept))
    assert memory() is not None
    kept.clear()
    gc.collect()
    assert memory() is None


class Forking(DefaultTaskEncoder):
    """Stacks in a fork, too."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        number = self.current_batch_index
        rows = [torch.full((200, 500), float(number))] * 2
        found = batch_stack(rows)
        pid = os.fork()
        if pid == 0:
            batch_stack([row + 1 for row in rows])
            is_own = bool((found == number).all())
            found.zero_()
            if os.fork() == 0:
                os._exit(bool(found.any()))
            os._exit(not is_own or os.wait()[1])
        assert os.waitpid(pid, 0)[1] == 0
        return {"number": number, "tensor": found, "again": batch_stack(rows)}


def test_hook_that_forks_does_not_change_the_batches_of_its_process(texts) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method="fork")
    dataset = get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=Forking())
    kept = []
    with get_savable_loader(dataset) as loader:
        for batch in islice(loader, 8):
            kept.append(batch)
            for old in kept[-3:]:
                assert all(bool((old[name] == old["number"]).all()) for name in ("tensor", "again"))


def zeroes(kept: list[Any]) -> bool:
    """Whether batches can be set to zero in a fork of a fork, each with memory of its own."""
    for batch in kept:
        batch["tensor"].zero_()
        batch["array"][:] = 0

    def are_zero() -> bool:
        return not any(batch["tensor"].any() or batch["array"].any() for batch in kept)

    return are_zero() and is_true_in_fork(are_zero)


@pytest.mark.parametrize("has_ended", [False, True])
def test_fork_of_the_loop_writes_into_no_batch_of_its_parent(texts, has_ended) -> None:
    with pictures(texts) as loader:
        batches = iter(loader)
        kept: list[Any] = []
        for _ in range(25):  # over several maps of growing arenas
            kept.append(next(batches))
            if not has_ended and len(kept) % 5 == 0:
                assert is_true_in_fork(lambda: zeroes(kept[1:]))
                assert all(map(are_right, kept))
    if has_ended:
        del loader, batches
        gc.collect()
        assert is_true_in_fork(lambda: zeroes(kept[1:]))
        assert all(map(are_right, kept))
