"""`get_loader` and `get_savable_loader`, with Energon's arguments."""

from __future__ import annotations

from os import PathLike
from typing import Any, TypeVar

from energon_lite.core.activity import DEFAULT_MAX_SKIP_RATE
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.loader import SavableDataLoader

T = TypeVar("T")

BasicDataLoader = SavableDataLoader


def get_loader(
    dataset: SavableDataset[T],
    *,
    worker_config: WorkerConfig | None = None,
    prefetch_factor: int = 2,
    cache_pool: None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    max_skip_rate: float = DEFAULT_MAX_SKIP_RATE,
    skip_log: str | PathLike[str] | None = None,
) -> SavableDataLoader[T]:
    """Makes a loader. It is the same as that of `get_savable_loader`: any state can be saved.

    Args:
        dataset: the pipeline.
        worker_config: this process's place in the run; by default the dataset's.
        prefetch_factor: batches that each worker process computes ahead.
        cache_pool: not in this version.
        watchdog_timeout_seconds: after so long without a batch the threads' stacks are logged;
            None for never.
        watchdog_initial_timeout_seconds: the same for the first batch.
        fail_on_timeout: whether such a wait is an error (with worker processes).
        max_skip_rate: failing samples, per sample, that a stream may have over a longer time; 1
            for any number.
        skip_log: a JSONL file to which every sample left out is written; `{rank}` is replaced.

    Raises:
        ValueError: An argument is out of range.
    """
    if cache_pool is not None:
        raise ValueError("cache_pool: this version has no cache pools; leave it at None")
    return SavableDataLoader(
        dataset,
        worker_config=worker_config,
        prefetch_factor=prefetch_factor,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        max_skip_rate=max_skip_rate,
        skip_log=skip_log,
    )


def get_savable_loader(
    dataset: SavableDataset[T],
    *,
    checkpoint_every_sec: float = 60,
    checkpoint_every_min_n_samples: int | None = None,
    n_checkpoints: int | None = None,
    gc_collect_every_n_steps: int = 10,
    **kwargs: Any,
) -> SavableDataLoader[T]:
    """Makes a loader whose state can be saved at any moment.

    Args:
        dataset: the pipeline.
        checkpoint_every_sec: accepted for Energon's signature; every batch carries its snapshot.
        checkpoint_every_min_n_samples: likewise.
        n_checkpoints: likewise.
        gc_collect_every_n_steps: likewise; nothing here leaves reference cycles behind.
        kwargs: as in `get_loader`.
    """
    del checkpoint_every_sec, checkpoint_every_min_n_samples, n_checkpoints
    del gc_collect_every_n_steps
    return get_loader(dataset, **kwargs)
