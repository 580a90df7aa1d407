"""The body of an actor, which computes streams somewhere in the cluster."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data._utils.worker import WorkerInfo

from energon_lite.core.topology import current
from energon_lite.extras.cluster.ray_library import ray
from energon_lite.extras.cluster.sent_values import Info, Sent, made_settings, size_of
from energon_lite.loader.workers.codec import WorkerError, packed_delivery
from energon_lite.loader.workers.executor import Pass, RunSettings, WorkerSettings, become, next_of
from energon_lite.loader.workers.rank_feed import Delivery, RankFeed
from energon_lite.loader.workers.watchdog import describe_thread

# Batches that were made within so long travel as one object, up to a number and bytes: each object
# costs about as much as a small batch.
_GROUP_SEC, _MOST_IN_GROUP, _BYTES_OF_GROUP = 0.004, 32, 512 << 10


class StreamActor:
    """Computes the deliveries of one worker; several threads of it are called.

    Args:
        content: the settings of the run, so that all is imported and made before the first order.
    """

    def __init__(self, content: bytes) -> None:
        self._order = 0
        self._feed: RankFeed | None = None
        self._thread = 0
        self._lock = threading.Lock()  # of what computes
        self._known = dict[bytes, tuple[Any, RunSettings]]()
        self._made(content)

    def _made(self, content: bytes) -> tuple[Any, RunSettings]:
        """Returns the pipeline and how the rank runs."""
        if content not in self._known:
            self._known = {content: made_settings(content)}
        return self._known[content]

    def place(self) -> tuple[str, int, str]:
        """Returns where it runs, once it can take orders: host, process, and Ray's node."""
        return socket.gethostname(), os.getpid(), ray.get_runtime_context().get_node_id()

    def deliveries(self, order: int, content: bytes, info: Info, job: Pass) -> Iterator[list[Sent]]:
        """Yields the deliveries of a pass, those that are small and quickly made together.

        Args:
            order: its number; an order that was overtaken by a later one yields nothing.
            content: the settings of the run.
            info: number of the worker, how many there are, and the seed of global generators.
            job: the pass.
        """
        if order < self._order:
            return
        self._order = order
        self.stop_feed()
        with self._lock:
            self._feed = feed = self._begun(content, info, job)
        yield from self._groups(feed, info, order)

    def _begun(self, content: bytes, info: Info, job: Pass) -> RankFeed:
        dataset, run = self._made(content)
        number, num_workers, seed = info
        known = WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=dataset)
        become(known)
        return WorkerSettings(known, run).feed(job)

    def _groups(self, feed: RankFeed, info: Info, order: int) -> Iterator[list[Sent]]:
        """Computes the deliveries of a pass until a later order."""
        where = f"in Ray worker {info[0]} on {socket.gethostname()}"
        group, since, is_over = list[Sent](), perf_counter(), False
        while not is_over and self._order == order:
            with self._lock:
                self._thread = threading.get_ident()
                current.worker_id = info[0]
                try:
                    delivery = next_of(feed, where)
                except SystemExit:  # of a feed that was stopped; or of a hook, which ends the actor
                    if self._order == order:
                        raise
                    return
            is_over = delivery is None
            if delivery is not None:
                group.append(sent_of(delivery, where))
            is_full = size_of(group) >= _BYTES_OF_GROUP or len(group) >= _MOST_IN_GROUP
            if group and (is_over or is_full or perf_counter() > since + _GROUP_SEC):
                yield group
                group, since = [], perf_counter()

    def doing(self) -> str:
        """Describes what it computes."""
        return f"It computes {self._feed or 'nothing'}. {describe_thread(self._thread)}"

    def stop_feed(self) -> None:
        """Lets what is being computed end at its next hook."""
        if self._feed is not None:
            self._feed.stop()

    def stop(self, order: int) -> None:
        """Ends what was ordered before, and returns when it has ended."""
        self._order = order
        self.stop_feed()
        with self._lock:
            self._feed = None


def sent_of(delivery: Delivery | WorkerError, where: str) -> Sent:
    """Returns a delivery as it travels."""
    body, buffers = packed_delivery(delivery, where)
    return b"".join(body), [np.frombuffer(part, np.uint8) for part in buffers]
