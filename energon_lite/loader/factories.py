"""`get_loader` and `get_savable_loader`, with Energon's arguments."""

from __future__ import annotations

from os import PathLike
from typing import TypeVar

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.stream_context import DEFAULT_MAX_SKIP_RATE
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.ends import End
from energon_lite.loader.loader import SavableDataLoader
from energon_lite.loader.rank_store import TIMEOUT_SEC

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
    state_timeout_sec: float = TIMEOUT_SEC,
    end: End | None = None,
    restart_workers: int = 3,
    stall_timeout_sec: float | None = None,
) -> SavableDataLoader[T]:
    """Makes a loader. It is the same as that of `get_savable_loader`: any state can be saved.

    Args:
        dataset: the pipeline.
        worker_config: this process's place in the run; by default the dataset's.
        prefetch_factor: batches that each worker process computes ahead.
        cache_pool: not in this version.
        watchdog_timeout_seconds: after so long without a batch stacks are logged; None for never.
        watchdog_initial_timeout_seconds: the same for the first batch.
        fail_on_timeout: whether such a wait is an error (with worker processes).
        max_skip_rate: failing samples, per sample, that a stream may have over a longer time; 1
            for any number.
        skip_log: a JSONL file to which every sample left out is written; `{rank}` is replaced.
        state_timeout_sec: how long a rank waits for the others to save or restore a state of all
            ranks, before that is an error.
        end: how the ranks end a pass over finite data. "pad": all with the last; the others repeat
            a batch whose mask `valid` is False and whose loss weights are 0. "drop": all with the
            first that has no batch left. "uneven": each by itself. By default passes are padded
            where ranks share a process group, or dropped where a batch has no place for the mask;
            else they are uneven.
        restart_workers: how many worker processes that die may be replaced within ten minutes;
            no batch changes.
        stall_timeout_sec: a worker process that is waited for longer, also at its start, is
            reported and replaced; None for never.

    Raises:
        TypeError: `dataset` is not one.
        ValueError: An argument is out of range.
    """
    return SavableDataLoader(
        dataset,
        worker_config=worker_config,
        prefetch_factor=prefetch_factor,
        cache_pool=cache_pool,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        max_skip_rate=max_skip_rate,
        skip_log=skip_log,
        state_timeout_sec=state_timeout_sec,
        end=end,
        restart_workers=restart_workers,
        stall_timeout_sec=stall_timeout_sec,
    )


def get_savable_loader(
    dataset: SavableDataset[T],
    *,
    worker_config: WorkerConfig | None = None,
    checkpoint_every_sec: float = 60,
    checkpoint_every_min_n_samples: int | None = None,
    n_checkpoints: int | None = None,
    gc_collect_every_n_steps: int = 10,
    prefetch_factor: int = 2,
    cache_pool: None = None,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    fail_on_timeout: bool = False,
    max_skip_rate: float = DEFAULT_MAX_SKIP_RATE,
    skip_log: str | PathLike[str] | None = None,
    state_timeout_sec: float = TIMEOUT_SEC,
    end: End | None = None,
    restart_workers: int = 3,
    stall_timeout_sec: float | None = None,
) -> SavableDataLoader[T]:
    """Makes a loader whose state can be saved at any moment.

    Args:
        dataset: the pipeline.
        checkpoint_every_sec: accepted for Energon's signature; every batch carries its snapshot.
        checkpoint_every_min_n_samples: likewise.
        n_checkpoints: likewise.
        gc_collect_every_n_steps: likewise; nothing here leaves reference cycles behind.
        worker_config: as in `get_loader`, like all that follow.
        prefetch_factor: as there.
        cache_pool: as there.
        watchdog_timeout_seconds: as there.
        watchdog_initial_timeout_seconds: as there.
        fail_on_timeout: as there.
        max_skip_rate: as there.
        skip_log: as there.
        state_timeout_sec: as there.
        end: as there.
        restart_workers: as there.
        stall_timeout_sec: as there.
    """
    return SavableDataLoader(
        dataset,
        worker_config=worker_config,
        checkpoint_every_sec=checkpoint_every_sec,
        checkpoint_every_min_n_samples=checkpoint_every_min_n_samples,
        n_checkpoints=n_checkpoints,
        gc_collect_every_n_steps=gc_collect_every_n_steps,
        prefetch_factor=prefetch_factor,
        cache_pool=cache_pool,
        watchdog_timeout_seconds=watchdog_timeout_seconds,
        watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
        fail_on_timeout=fail_on_timeout,
        max_skip_rate=max_skip_rate,
        skip_log=skip_log,
        state_timeout_sec=state_timeout_sec,
        end=end,
        restart_workers=restart_workers,
        stall_timeout_sec=stall_timeout_sec,
    )
