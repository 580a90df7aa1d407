"""What tests of workers share: their processes and threads, what they counted, and odd hooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from energon_lite import SavableDataLoader, WorkerConfig, get_savable_loader, get_train_dataset

from ..helpers import Ranks, counts_in_state, opened, through_json

# That of the files.
ORDER: dict[str, Any] = {
    "shuffle_buffer_size": None,
    "max_samples_per_sequence": None,
    "shuffle_over_epochs_multiplier": None,
}


def loader_of(
    texts: Path, encoder: Any, num_workers: int = 2, *, batch_size: int = 2, kind: str = "fork",
    **settings: Any,
) -> Any:  # fmt: skip
    """A loader of batches in the order of the files; `kind` is "thread" or a start method."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, **kind_of(kind))
    dataset = get_train_dataset(
        texts, batch_size=batch_size, worker_config=config, task_encoder=encoder, **ORDER
    )
    return get_savable_loader(dataset, **settings)


def loader_from(make: Any, num_workers: int = 0, **config: Any) -> SavableDataLoader[Any]:
    """Returns a loader of the pipeline that a function makes for a place in a run."""
    place = {"rank": 0, "world_size": 1, "num_workers": num_workers, **config}
    return get_savable_loader(make(WorkerConfig(**place)))


def kind_of(kind: str) -> dict[str, Any]:
    """Settings of workers: "thread", "ray", or a start method of processes."""
    return {"worker_type": kind} if kind in ("thread", "ray") else {"start_method": kind}


def workers_of(run: Ranks, rank: int = 0) -> list[Any]:
    """The processes of a rank."""
    deliveries: Any = run.loaders[rank]._run._deliveries
    return [worker.process for worker in deliveries._workers]


def threads_of_workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("energon_lite worker")]


def counts_of(run: Ranks) -> Any:
    """What a run counted, without the seconds that it took, and its state without these."""
    found = []
    for loader in run.loaders:
        state = opened(through_json(loader.save_state_rank()))
        found.append({**state, "stats": counts_in_state(state), "checksum": 0})
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert is_so()
