"""What training jobs do; each function is the main program of a job."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import Ranks, SkippingEncoder, ignore, last_slot, number_of
from .acting import Act, acting, loader_of, without_pid

Report = Callable[[Any], None]


def train(
    report: Report,
    texts: str,
    *,
    num_workers: int = 2,
    start_method: str = "fork",
    payload: int = 0,
    way: str = "train",
    hook: str = "",
    from_thread: bool = False,
) -> None:
    """Trains for ever, or for some batches; SIGALRM ends it by `os._exit`.

    Args:
        report: called before the first batch, in the body of the fourth, and after the loop.
        texts: the data.
        num_workers: how many there are.
        start_method: of the worker processes.
        payload: bytes of a batch.
        way: how it leaves the loop: "sys.exit", "raise", "circle" (a loader
            that only the garbage collector finds), "with", "fall off" (the end of the program),
            "train" (never), "block" (nobody takes the batches).
        hook: "slow", for each sample; "sleep" for ever, or "compute" so that no other thread of
            the worker runs; the first one to do so leaves a file "asleep".
        from_thread: whether another thread than the main one trains, and starts the workers.
    """
    asleep = str(Path(tempfile.gettempdir()).parent / "asleep")
    does = {"slow": Act("sleep", 0.2), "sleep": Act("sleep", 1000, asleep),
            "compute": Act("compute", 1e13, asleep)}  # fmt: skip
    acts = dict.fromkeys(range(60), does[hook]) if hook else {}
    loader: Any = loader_of(acting(Path(texts), payload, acts), num_workers, start_method)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(7))
    if way == "circle":
        gc.disable()
        loader.circle = loader
    report("starts")
    if not from_thread:
        loop(report, loader, way)
        if way == "circle":
            del loader
        report("ends")
    else:
        threading.Thread(target=loop, args=(report, loader, way), daemon=True).start()
        time.sleep(1000)


def loop(report: Report, loader: Any, way: str) -> None:
    for number, batch in enumerate(loader):
        assert not np.any(batch["array"] - batch["slot"] % 256)
        if number == 3:
            report("runs")
            if way == "block":
                time.sleep(1000)
            if way == "sys.exit":
                sys.exit(5)
            if way == "raise":
                raise LookupError("in the loop")
        if number > 3 and way != "train":
            break
    if way == "with":
        loader.shutdown()


def digest(batch: dict[str, Any]) -> int:
    """A number that tells batches apart, whichever process made them."""
    parts = [value.tolist() if hasattr(value, "tolist") else value for value in batch.values()]
    return zlib.crc32(repr(parts).encode())


def train_ranks(
    report: Report,
    texts: str,
    file: str,
    world_size: int,
    num_workers: int,
    is_finite: bool,
    num_slots: int,
    seed: int,
) -> None:
    """Trains with all ranks of a job, in step, from the last saved state to the end.

    Args:
        report: called with slot and digest of each batch, and with what was skipped in the end.
        texts: the data.
        file: where the states are, which are saved at random steps.
        world_size: number of ranks.
        num_workers: worker processes of each.
        is_finite: whether the data are read once.
        num_slots: where endless data end.
        seed: of the steps at which the state is saved.
    """
    rng = random.Random(seed)
    saved, new = Path(file), Path(f"{file}.new")
    states = json.loads(saved.read_text()) if saved.exists() else None
    make = acting(Path(texts), 2_000, repeat=not is_finite)
    run = Ranks(make, world_size, num_workers, num_streams=6, states=states, start_method="fork")
    running = set(range(world_size))
    next_slot = 0
    while running and (is_finite or next_slot < num_slots):
        for rank in sorted(running):
            batch = next(run.iterators[rank], None)
            if batch is None:
                running.discard(rank)
                continue
            slot = last_slot(run.loaders[rank])
            next_slot = max(next_slot, slot + 1)
            report([slot, digest(without_pid(batch))])
        if rng.random() < 0.3:
            new.write_text(json.dumps(run.save()))
            new.replace(saved)
    skipped: dict[str, int] = {}
    for loader in run.loaders:
        for source, number in loader.num_skipped.items():
            skipped[source] = skipped.get(source, 0) + number
    report({"slots": next_slot, "skipped": skipped})


class PackingEncoder(DefaultTaskEncoder):
    """Packs texts of very different lengths into rows of 1,024 tokens."""

    packing = Packing(capacity=1024, buffer_size=256)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        number = number_of(sample)
        length = 1 + number * 7919 % 900
        return {"__key__": sample.__key__, "input_ids": torch.full((length,), number)}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


def train_long(report: Report, path: str, is_packed: bool) -> None:
    """Trains with two workers for ever; saves its state now and then.

    Args:
        report: called with the number of batches, after each hundredth.
        path: the data.
        is_packed: whether samples share packs.
    """
    config = WorkerConfig(rank=0, world_size=1, num_workers=2, global_error_handler=ignore)
    encoder = PackingEncoder() if is_packed else SkippingEncoder()
    dataset: Any = get_train_dataset(
        path, worker_config=config, task_encoder=encoder, batch_size=8, shuffle_buffer_size=100
    )
    loader = get_savable_loader(dataset, max_skip_rate=1)
    for number, _ in enumerate(loader, 1):
        if number == 100:
            # It writes to all objects, so that their pages are no longer shared with the workers.
            gc.collect()
        if number % 100 == 0:
            json.dumps(loader.save_state_rank())
            loader.stats()
            report(number)
