"""The door for workers: what computes the deliveries of a rank, wherever that runs.

The loader knows executors only. Each of them is one worker, and a pool replaces those that die. In
this process (`num_workers=0`), in a thread and in a process are three of them; `register_executor`
adds others.
"""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from energon_lite.core.cache_pool import CachePool
from energon_lite.core.topology import WORKER_TYPES, WorkerConfig
from energon_lite.loader.workers.codec import WorkerError
from energon_lite.loader.workers.deferred_signals import DeferredSignals
from energon_lite.loader.workers.rank_feed import Delivery, PassStart, RankFeed
from energon_lite.names.energon_modules import import_name

logger = logging.getLogger(__name__)

# How long the hooks of a worker have to end when it is to end.
GRACE_SEC = 1.0
_POLL_SEC = 0.5


class Pass(NamedTuple):
    """The work of a worker.

    Attributes:
        number: counts the passes of a loader.
        start: where the pass begins.
        others: the streams of the rank that it does not compute.
    """

    number: int
    start: PassStart
    others: frozenset[int]


class Limits(NamedTuple):
    """The longest wait for a delivery, in seconds; 0 for any time.

    Attributes:
        report_sec: until it is logged what the worker does.
        stall_sec: until it is taken for stuck, and replaced.
        timeout_sec: until the wait is an error.
    """

    report_sec: float = 0
    stall_sec: float = 0
    timeout_sec: float = 0


class RunSettings(NamedTuple):
    """Settings that decide how a rank runs, and no content.

    Attributes:
        prefetch_factor: batches that each worker computes ahead.
        limits: how long a batch of a worker may be waited for.
        first_report_sec: `report_sec` of the first batch.
        restart_workers: how many workers may be replaced within ten minutes.
        max_skip_rate: failures per sample that a stream may have.
        max_pass_rate: failures per sample that a validation pass may have.
        skip_log: file of the samples that were skipped.
        cache_pool: for cookers; None for a `NoCachePool`.
    """

    prefetch_factor: int
    limits: Limits
    first_report_sec: float
    restart_workers: int
    max_skip_rate: float
    max_pass_rate: float
    skip_log: Path | None
    cache_pool: CachePool | None


class WorkerSettings(NamedTuple):
    """The arguments with which a worker starts; can be pickled if the pipeline can.

    Attributes:
        info: its number, how many there are, the seed of its global generators, and the pipeline;
            what `torch.utils.data.get_worker_info` returns in a worker process.
        run: how the rank runs.
    """

    info: WorkerInfo
    run: RunSettings

    def feed(self, job: Pass) -> RankFeed:
        """Returns what computes the deliveries of a pass."""
        dataset: Any = self.info.dataset
        run = self.run
        return RankFeed(dataset, job.start, run.max_skip_rate, job.others, run.cache_pool)


def become(info: WorkerInfo) -> None:
    """Makes this process a worker, as torch and its hooks know it."""
    torch_worker._worker_info = info
    torch.set_num_threads(1)
    random.seed(info.seed)
    torch.manual_seed(info.seed)
    np.random.seed(info.seed % 2**32)


def next_of(feed: RankFeed, where: str) -> Delivery | WorkerError | None:
    """Returns the next delivery of a pass; None at its end.

    In place of an error, which ends the pass, it is what raises it in the training loop.

    Args:
        feed: computes the pass.
        where: names the worker.
    """
    try:
        return next(feed, None)
    except Exception:
        feed.end()
        return WorkerError(where)


class WorkerDied(Exception):
    """A worker ended by itself, or was given up as it was stuck.

    Args:
        name: which, and how it ended.
        report: what it did, as far as that is known.
        may_restart: whether another one may do better.
    """

    def __init__(self, name: str, report: str = "", may_restart: bool = True) -> None:
        super().__init__(name)
        self.report = report
        self.may_restart = may_restart


class Wait:
    """One wait for a delivery of a worker, and its limits.

    Args:
        name: of the worker.
        limits: how long it may take.

    Attributes:
        poll_sec: after which time the limits are to be looked at again.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self._since = time.monotonic()
        self._due = sorted(limit for limit in limits if limit)
        self.poll_sec = min([_POLL_SEC, *(limit / 4 for limit in self._due)])

    def is_due(self) -> bool:
        """Returns whether another limit has passed, so that the worker is to report."""
        waited = time.monotonic() - self._since
        if not self._due or waited <= self._due[0]:
            return False
        self._due = [limit for limit in self._due if waited <= limit]
        return True

    def on_report(self, report: str) -> None:
        """Logs what the worker does.

        Raises:
            WorkerDied: It is stuck.
            RuntimeError: The wait was too long.
        """
        waited = time.monotonic() - self._since
        _, stall_sec, timeout_sec = self._limits
        if stall_sec and waited > stall_sec:
            name = f"{self._name} (stuck for {waited:.1f} s, stall_timeout_sec={stall_sec:g})"
            raise WorkerDied(name, report)
        if timeout_sec and waited > timeout_sec:
            why = "fail_on_timeout=True, watchdog_timeout_seconds"
            raise RuntimeError(f"No batch for {timeout_sec:g} s ({why}). {report}")
        logger.warning("No batch of worker %s for %.0f s. %s", self._name, waited, report)


class Executor(ABC):
    """One worker of a rank: computes the deliveries of a pass in their order, maybe ahead.

    Args:
        settings: of the worker.
        config: of the rank.

    Attributes:
        name: names the worker in messages.
        is_replaced: whether, when it ends, another one takes its place.
    """

    is_replaced = False

    def __init__(self, settings: WorkerSettings, config: WorkerConfig) -> None:
        self.settings = settings
        self.config = config
        self.name = f"{config.worker_type} {settings.info.id}"

    @abstractmethod
    def start(self, job: Pass) -> None:
        """Begins a pass; what was computed of the one before is dropped."""

    @abstractmethod
    def take(self, number: int, for_sec: float) -> Delivery | WorkerError | None:
        """Returns the next delivery of a pass, or None; it is not called after the last one.

        Args:
            number: of the pass; a delivery of an earlier one is dropped.
            for_sec: the longest wait for one.

        Raises:
            WorkerDied: The worker has ended; another one takes its place.
        """

    def look(self, wait: Wait) -> None:
        """Looks after the worker between two calls of `take`; reports where a limit is due."""
        if wait.is_due():
            wait.on_report("What it does is not known.")

    def receive(self, number: int, limits: Limits) -> Delivery | WorkerError:
        """Returns the next delivery of a pass.

        Args:
            number: of the pass.
            limits: how long that may take.

        Raises:
            WorkerDied: The worker has ended, or is stuck.
            RuntimeError: The wait was too long.
        """
        if (delivery := self.take(number, 0)) is None:
            wait = Wait(self.name, limits)
            while (delivery := self.take(number, wait.poll_sec)) is None:
                self.look(wait)
        return delivery

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        return False

    def memory_bytes(self) -> int:
        """Returns the memory of the worker alone; 0 if it is not known."""
        return 0

    def leave(self) -> None:  # noqa: B027
        """Asks the worker to end by itself, and waits for nothing."""

    def end(self, for_sec: float) -> None:  # noqa: B027
        """Ends the worker, at the latest after some seconds; it may have ended."""


def end_workers(workers: Sequence[Executor]) -> None:
    """Ends workers, all at once: by themselves, or after some time by what each of them has."""
    with DeferredSignals():
        deadline = time.monotonic() + GRACE_SEC
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.end(max(0.0, deadline - time.monotonic()))


class InlineExecutor(Executor):
    """Computes in the training loop, when it asks for a batch: `num_workers=0`."""

    def start(self, job: Pass) -> None:
        """Begins a pass."""
        self._feed = self.settings.feed(job)

    def take(self, number: int, for_sec: float) -> Delivery:
        """Returns the next delivery; a wait in this thread is left to the watchdog."""
        del number, for_sec
        return next(self._feed)


_EXECUTORS: dict[str, type[Executor]] = {"inline": InlineExecutor}
# Those of the library that are imported on first use.
_HOMES = {
    "broadcast": "energon_lite.extras.cluster.broadcast:peer_executor",
    "ray": "energon_lite.extras.cluster.ray_workers:default_workers",
    "process": "energon_lite.loader.workers.process_executor:ProcessExecutor",
    "thread": "energon_lite.loader.workers.thread_executor:ThreadExecutor",
}


def register_executor(name: str, kind: type[Executor]) -> None:
    """Makes `WorkerConfig(worker_type=name)` stand for workers of a kind, in this process.

    Args:
        name: of the kind.
        kind: its class, which gets `(settings, config)` for each worker.
    """
    _EXECUTORS[name] = kind
    if name not in WORKER_TYPES:
        WORKER_TYPES.append(name)


def executor_kind(config: WorkerConfig) -> Callable[[WorkerSettings, WorkerConfig], Executor]:
    """Returns what makes the workers of a rank."""
    name = config.worker_type if config.num_workers else "inline"
    kind = name if callable(name) else _EXECUTORS.get(name) or import_name(_HOMES[name])
    if config.peer_group is not None:
        return partial(import_name(_HOMES["broadcast"]), kind)
    return kind
