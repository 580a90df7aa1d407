"""The actors of loaders that have one `RayWorkers`: started, and kept as spares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.extras.cluster.ray_library import NodeAffinitySchedulingStrategy, connect, ray
from energon_lite.extras.cluster.ray_workers import RayWorkers
from energon_lite.extras.cluster.sent_values import packed_settings
from energon_lite.extras.cluster.stream_actor import StreamActor
from energon_lite.loader.workers.executor import WorkerSettings

# Threads of an actor: orders that overtake each other, reports, and the order to end.
_NUM_THREADS = 8


class ActorPool:
    """Actors as they are needed.

    Args:
        settings: how many, and where.

    Attributes:
        settings: as above.
        spare: actors that have all imported, and no streams.
    """

    def __init__(self, settings: RayWorkers) -> None:
        self.settings = settings
        self.spare: list[Any] = []
        self._num_in_use = 0
        self._sent: tuple[Any, Any, Any] = None, None, None

    def take(self, worker: WorkerSettings) -> tuple[Any, Any]:
        """Returns an actor, one that waited where there is one, and the settings that it has."""
        connect()
        content = self._content(worker)
        actor = self.spare.pop(0) if self.spare else self._started(content)
        self._num_in_use += 1
        while len(self.spare) < self.settings.spares:
            self.spare.append(self._started(content))
        return actor, content

    def give_up(self, *, is_replaced: bool) -> None:
        """Counts a worker that ended; with the last one, the spares end."""
        self._num_in_use -= 1
        if not (self._num_in_use or is_replaced):
            self.spare, self._sent = [], (None, None, None)  # Ray ends what nothing refers to

    def _content(self, worker: WorkerSettings) -> Any:
        """Returns a reference to the settings, which are sent once."""
        key = worker.info.dataset, worker.run
        if self._sent[0] is not key[0] or self._sent[1] != key[1]:
            self._sent = (*key, ray.put(packed_settings(*key)))
        return self._sent[2]

    def _started(self, content: Any) -> Any:
        kind: Any = ray.remote(StreamActor)
        options = _ray_options(self.settings.resources)
        return kind.options(
            **options,
            max_restarts=0,
            scheduling_strategy=self._place(),
            max_concurrency=_NUM_THREADS,
        ).remote(content)

    def _place(self) -> Any:
        """Returns where an actor goes: never into a placement group that a trainer was put in."""
        if not self.settings.local_first:
            return "SPREAD"
        here = ray.get_runtime_context().get_node_id()
        return NodeAffinitySchedulingStrategy(here, soft=True, _spill_on_unavailable=True)

    def needs(self) -> str:
        """Describes what an actor needs, and what is free."""
        free, whole = ray.available_resources(), ray.cluster_resources()
        names = sorted(name for name in whole if ":" not in name)
        found = ", ".join(f"{name} {free.get(name, 0):g} of {whole[name]:g}" for name in names)
        asked = {"CPU": 1, **self.settings.resources}
        needed = ", ".join(f"{name} {number:g}" for name, number in asked.items())
        return (
            f"It needs {needed}; free in the cluster: {found}. Give RayWorkers(resources=...) what "
            "one node has, fewer workers or spares, or add nodes; what a placement group of the "
            "trainer holds is not free"
        )


def _ray_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of an actor that needs some resources."""
    rest = dict(resources)
    known = {"num_cpus": rest.pop("CPU", 1), "num_gpus": rest.pop("GPU", 0)}
    return {**known, "memory": rest.pop("memory", None), "resources": rest}
