"""A pipeline with payloads of any size, whose hook can kill or stop its process at a sample."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_lite import (
    SavableDataLoader,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import (
    MakeDataset,
    SkippingEncoder,
    counts_in_state,
    ignore,
    number_of,
    opened,
    through_json,
)


class Act(NamedTuple):
    """What the hook does to its process: "kill", "exit", "sleep" or "compute".

    Attributes:
        name: which of these.
        value: signal, exit code, seconds, or numbers to add up, which no other thread interrupts.
        once: a file; where it is there, it was done before.
    """

    name: str
    value: float
    once: str | None = None

    def __call__(self) -> None:
        if self.once is not None:
            try:
                Path(self.once).touch(exist_ok=False)
            except FileExistsError:
                return
        if self.name == "kill":
            faulthandler.disable()  # which would print what is wanted here
            os.kill(os.getpid(), int(self.value))
        elif self.name == "exit":
            os._exit(int(self.value))
        elif self.name == "compute":
            sum(range(int(self.value)))
        else:
            time.sleep(self.value)


class ActingEncoder(SkippingEncoder):
    """Skips, fails and draws random numbers as `SkippingEncoder`; tells which process it was.

    Args:
        payload: bytes of each batch, one half in a tensor, the other in an array.
        acts: what is done at which sample.
    """

    def __init__(self, payload: int = 0, acts: Mapping[int, Act] | None = None) -> None:
        super().__init__()
        self.payload = payload
        self.acts = {} if acts is None else acts

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        act = self.acts.get(number_of(sample))
        if act is not None:
            act()
        return super().encode_sample(sample)

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        made = super().encode_batch(batch)
        half = self.payload // 2
        made["tensor"] = torch.full((half,), made["slot"] % 256, dtype=torch.uint8)
        made["array"] = np.full((half,), made["slot"] % 256, np.uint8)
        made["shared"] = torch.full((50,), float(made["slot"]))
        made["grad"] = torch.full((50,), float(made["slot"]), requires_grad=True)
        if multiprocessing.parent_process() is not None:  # else they would keep files open
            made["shared"].share_memory_()
            made["grad"].share_memory_()
        return {**made, "pid": os.getpid()}


def acting(
    texts: Path, payload: int = 0, acts: Mapping[int, Act] | None = None, **settings: Any
) -> MakeDataset:
    """A maker of training datasets."""
    settings = {"batch_size": 3, "shuffle_buffer_size": 8, **settings}
    encoder = ActingEncoder(payload, acts)

    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(texts, worker_config=config, task_encoder=encoder, **settings)

    return make


def loader_of(make: MakeDataset, num_workers: int, start_method: str, **loader: Any) -> Any:
    """A loader of one rank, of a run of six streams."""
    config = WorkerConfig(
        rank=0,
        world_size=1,
        num_workers=num_workers,
        num_streams=6,
        start_method=start_method,
        global_error_handler=ignore,
    )
    return get_savable_loader(make(config), max_skip_rate=1, **loader)


SECONDS = ("read_sec", "encode_sec", "wait_sec")


def without_pid(batch: dict[str, Any]) -> dict[str, Any]:
    """The part of a batch that does not depend on the process that made it."""
    return {key: value for key, value in batch.items() if key != "pid"}


def counts(loader: SavableDataLoader[Any]) -> dict[str, Any]:
    """All that a loader counts, and where it stands; without seconds."""
    state = opened(through_json(loader.save_state_rank()))
    state["stats"] = counts_in_state(state)
    state.pop("checksum")
    stats = {name: vars(found).copy() for name, found in loader.stats().items()}
    for found in stats.values():
        for name in SECONDS:
            found.pop(name)
    return {"state": state, "skipped": loader.num_skipped, "stats": stats}


@cache
def undisturbed(texts: Path, payload: int, num_batches: int) -> tuple[list[Any], dict[str, Any]]:
    """The first batches of a run without processes, and its counts after them."""
    loader = loader_of(acting(texts, payload), 0, "fork")
    found = [without_pid(batch) for batch in islice(loader, num_batches)]
    return found, counts(loader)


def workers(before: set[Any]) -> list[int]:
    """Process ids of the workers of a loader."""
    return [child.pid for child in set(multiprocessing.active_children()) - before]
