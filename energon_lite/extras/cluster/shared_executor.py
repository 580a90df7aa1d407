"""A worker whose deliveries are computed once for all ranks of the same place, or stream."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from typing import Any

import numpy as np

from energon_lite.core.state import digest
from energon_lite.core.topology import WorkerConfig
from energon_lite.extras.cluster.actor_pool import ActorPool
from energon_lite.extras.cluster.ray_executor import ANSWER_SEC, RayExecutor
from energon_lite.extras.cluster.ray_library import RayError, ray
from energon_lite.extras.cluster.sent_values import Info, is_of_several, own_streams
from energon_lite.loader.workers.executor import Pass, WorkerDied, WorkerSettings

# How long one that has died may be found by its name.
_NAME_SEC, _PAUSE_SEC = 30.0, 0.2
# By these, set by torchrun, runs in one cluster differ.
_RUN = "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"


class SharedRayExecutor(RayExecutor):
    """One worker: an actor with a name, which several ranks share.

    Args:
        actors: those of the rank.
        settings: of the worker.
        config: of the rank; its peers make the same.
    """

    def __init__(self, actors: ActorPool, settings: WorkerSettings, config: WorkerConfig) -> None:
        super().__init__(actors, settings, config)
        self._consumer = uuid.uuid4().hex
        self._asked = deque[Any]()
        self._num_asked = 0

    def _taken(self, job: Pass) -> tuple[Any, Any]:
        info, slots = self.settings.info, job.start.slots
        group, place = f"rank {slots.rank}", f"{info.id} of {info.num_workers}"
        if is_of_several(job):
            (stream,) = own_streams(job)
            group, place = "streams", f"{stream}"
        dataset: Any = info.dataset
        run = [os.environ.get(name, "") for name in _RUN], slots.world_size, slots.num_streams
        group = digest({"run": run, "group": group, "config": dataset.config()})
        name = self._shared_name = f"{group}/{place}"
        return self._actors.take_shared(self.settings, group, name, self.config.peers)

    def _begin(self, order: int, info: Info, job: Pass) -> None:
        self._job = job
        self._asked.clear()
        self._num_asked = 0
        self._actor.begin.remote(self.config.peers, self._consumer, order, info, job)

    def _ask(self, most: int) -> None:
        while len(self._asked) + len(self._pulled) < most:
            asked = self._actor.take.remote(self._consumer, self._order, self._num_asked)
            self._asked.append(asked)
            self._num_asked += 1
        while self._is_made(0):
            share = ray.get(self._asked.popleft())
            if share is None:
                most = self._actors.settings.max_bytes
                raise WorkerDied(
                    f"{self.name} (its peers are further ahead than max_bytes={most:,} of batches: "
                    "what this rank lacks is computed again; raise max_bytes of RayWorkers)",
                    counts=False,
                )
            due, found = share
            self._pulled.extend((reference, due) for reference in found)

    def _is_made(self, for_sec: float) -> bool:
        return bool(self._asked and ray.wait([self._asked[0]], timeout=for_sec)[0])

    def _wait_for_start(self, report_sec: float) -> None:
        """Waits for the actor; its name may lead to one that has just died."""
        deadline = time.monotonic() + _NAME_SEC
        while not self._is_started:
            try:
                super()._wait_for_start(report_sec)
            except WorkerDied as error:
                if not error.may_restart or time.monotonic() > deadline:
                    raise
                self._actors.shared.lose(self._shared_name, self._actor)
                time.sleep(_PAUSE_SEC)
                self._actor = None
                self.start(self._job)

    @staticmethod
    def _own(part: Any) -> Any:
        """Returns a copy: peers on this machine map the same memory."""
        return np.array(part)

    def leave(self) -> None:
        """Reports to the actor that this rank needs it no more."""
        self._asked.clear()
        self._pulled.clear()
        if self._actor is not None and ray.is_initialized():
            self._actor.leave.remote(self._consumer)

    def end(self, for_sec: float) -> None:
        """Waits for the others, as the actor ends with the rank that started it."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if ray.is_initialized():
            deadline = time.monotonic() + for_sec
            num_left = 0 if self._has_died else self._num_left(actor)
            while num_left and not self.is_replaced and time.monotonic() < deadline:
                time.sleep(_PAUSE_SEC)
                num_left = self._num_left(actor)
            if self.is_replaced and not num_left:
                self._actors.shared.lose(self._shared_name, actor)
        self._actors.give_up(is_replaced=self.is_replaced)

    def _num_left(self, actor: Any) -> int:
        try:
            return int(ray.get(actor.leave.remote(self._consumer), timeout=ANSWER_SEC))
        except RayError:  # it has ended
            return 0
