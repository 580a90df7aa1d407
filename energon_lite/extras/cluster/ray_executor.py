"""A worker of a Ray cluster as the training loop has it."""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections import deque
from typing import Any

import numpy as np

from energon_lite.core.topology import WorkerConfig
from energon_lite.extras.cluster.actor_pool import ActorPool
from energon_lite.extras.cluster.ray_library import GetTimeoutError, RayActorError, RayError, ray
from energon_lite.extras.cluster.sent_values import Sent, size_of
from energon_lite.loader.workers.codec import WorkerError, unpacked
from energon_lite.loader.workers.executor import (
    Executor,
    Limits,
    Pass,
    Wait,
    WorkerDied,
    WorkerSettings,
)  # fmt: skip
from energon_lite.loader.workers.rank_feed import Delivery

logger = logging.getLogger(__name__)

# How long an actor may take to describe what it does.
ANSWER_SEC = 1.0
# Between two looks at an actor that starts.
_POLL_SEC = 0.5
_STORE_IS_FULL = (
    "The object store of a node is full, and so is the disk that it spills to: lower max_bytes, "
    "prefetch_factor or the number of batches that the program keeps, or give Ray more "
    "(object_store_memory)"
)


class RayExecutor(Executor):
    """One worker: an actor that yields objects of deliveries, some of which are pulled ahead.

    Args:
        actors: those of the rank.
        settings: of the worker.
        config: of the rank.
    """

    def __init__(self, actors: ActorPool, settings: WorkerSettings, config: WorkerConfig) -> None:
        super().__init__(settings, config)
        self.name = f"ray {settings.info.id}"
        self._actors = actors
        self._actor: Any = None
        self._is_started = False
        self._objects: Any = None
        self._pulled = deque[Any]()
        self._received = deque[Sent]()
        self._largest = 1

    def start(self, job: Pass) -> None:
        """Orders the actor to begin a pass."""
        if self._actor is None:
            self._actor, self._content = self._actors.take(self.settings)
            self._place = self._actor.place.remote()
        self._pulled.clear()
        self._received.clear()
        info = self.settings.info
        known = info.id, info.num_workers, info.seed
        order = time.monotonic_ns()  # later than those of all other executors of the actor
        ahead = self.settings.run.prefetch_factor
        self._objects = self._actor.deliveries.options(
            num_returns="streaming", _generator_backpressure_num_objects=ahead
        ).remote(order, self._content, known, job)

    def take(self, number: int, for_sec: float) -> Delivery | WorkerError | None:
        """Returns the next delivery.

        Raises:
            WorkerDied: The actor, or its node, is gone.
            RuntimeError: The object store is full, or the node cannot run it.
        """
        del number  # `start` drops what is of another pass
        try:
            if not self._received and not self._receive(for_sec):
                return None
        except RayError as error:
            raise self._failure(error) from None
        body, parts = self._received.popleft()
        delivery: Delivery | WorkerError = unpacked(body, map(_writable, parts))
        return delivery

    def _receive(self, for_sec: float) -> bool:
        """Fetches the next object, and lets those after it come; returns whether there was one."""
        if not (self._pulled or self._pull() or (self._is_made(for_sec) and self._pull())):
            return False
        try:
            group = ray.get(self._pulled[0], timeout=for_sec)
        except GetTimeoutError:
            return False
        self._pulled.popleft()
        self._largest = max(self._largest, size_of(group))
        self._received.extend(group)
        self._pull()
        return bool(self._received)

    def _pull(self) -> bool:
        """Asks for objects that are made, so that they are here in time; whether there are some."""
        num_before = len(self._pulled)
        self._ask(self._most_pulled)
        if len(self._pulled) > num_before:
            here = [*self._pulled]
            ray.wait(here, num_returns=len(here), timeout=0, fetch_local=True)
        return bool(self._pulled)

    @property
    def _most_pulled(self) -> int:
        share = self._actors.settings.max_bytes // self.settings.info.num_workers
        return int(max(1, min(self.settings.run.prefetch_factor, share // self._largest)))

    def _ask(self, most: int) -> None:
        """Adds references of objects that are made, up to a number of them."""
        while len(self._pulled) < most and self._is_made(0):
            try:
                self._pulled.append(next(self._objects))
            except StopIteration:
                return

    def _is_made(self, for_sec: float) -> bool:
        """Whether another object is made; waits for it up to a time."""
        return bool(ray.wait([self._objects], timeout=for_sec, fetch_local=False)[0])

    def is_ready(self) -> bool:
        """Whether a delivery can be had at once."""
        first = [*self._pulled][:1]
        return bool(self._received or (first and ray.wait(first, timeout=0)[0]))

    def receive(self, number: int, limits: Limits) -> Delivery | WorkerError:
        """Returns the next delivery; the limits count from when the actor has started.

        Raises:
            WorkerDied: It is stuck, or gone.
            RuntimeError: It has not started for too long, or the wait was too long.
        """
        if not self._is_started:
            self._wait_for_start(limits.report_sec)
        return super().receive(number, limits)

    def _wait_for_start(self, report_sec: float) -> None:
        since, due_sec = time.monotonic(), report_sec or math.inf
        while not ray.wait([self._place], timeout=_POLL_SEC)[0]:
            waited = time.monotonic() - since
            if waited > self._actors.settings.start_timeout_sec:
                text = f"Worker {self.name} has not started for {waited:.0f} s"
                raise RuntimeError(f"{text}. {self._actors.needs()}")
            if waited > due_sec:
                due_sec *= 2
                needs = self._actors.needs()
                logger.warning("Worker %s has not started for %.0f s. %s", self.name, waited, needs)
        try:
            host, process, _ = ray.get(self._place)
        except RayError as error:
            raise self._failure(error) from None
        self.name = f"ray {self.settings.info.id} (process {process} on {host})"
        self._is_started = True

    def look(self, wait: Wait) -> None:
        """Reports what the actor does, where a limit is due.

        Raises:
            WorkerDied: It is stuck.
            RuntimeError: The wait was too long.
        """
        if wait.is_due():
            try:
                report = str(ray.get(self._actor.doing.remote(), timeout=ANSWER_SEC))
            except (GetTimeoutError, RayError) as error:
                report = f"It does not answer: {_first_line(error)}"
            wait.on_report(report)

    def _failure(self, error: RayError) -> Exception:
        text = f"{type(error).__name__}: {error}"
        if "OutOfDisk" in text or "ObjectStoreFull" in text:
            return RuntimeError(
                f"Worker {self.name} failed: {_STORE_IS_FULL}. {_first_line(error)}"
            )
        missing = text.partition("RuntimeError: No module named")[2].partition("\n")[0]
        if missing:  # of `made_settings`; the rest is the traceback of the actor
            return RuntimeError(f"Worker {self.name} cannot be made: No module named{missing}")
        if isinstance(error, RayActorError) and "creation task" in text:
            return WorkerDied(f"{self.name} (it could not be made)", text, may_restart=False)
        return WorkerDied(f"{self.name} ({type(error).__name__})", text)

    def leave(self) -> None:
        """Asks the actor to end what it computes."""
        self._objects = None
        self._pulled.clear()
        if self._actor is not None and ray.is_initialized():
            self._ending = self._actor.stop.remote(time.monotonic_ns())

    def end(self, for_sec: float) -> None:
        """Ends the actor, at the latest after some seconds."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if ray.is_initialized():
            ray.wait([self._ending], timeout=for_sec)
            ray.kill(actor)
        self._actors.give_up(is_replaced=self.is_replaced)


def _writable(part: Any) -> Any:
    """Returns bytes that only this process reads, to be changed as any batch may."""
    memory: Any = (ctypes.c_uint8 * part.nbytes).from_address(part.ctypes.data)
    memory.kept = part
    return np.frombuffer(memory, np.uint8)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
