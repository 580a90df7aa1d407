"""The setting `workers=RayWorkers(...)` of a loader; Ray is imported on use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from energon_lite.core.arguments import at_least
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.workers.executor import Executor, WorkerSettings
from energon_lite.names.energon_modules import import_name

_PACKAGE = "energon_lite.extras.cluster"


@dataclasses.dataclass(eq=False)
class RayWorkers:
    """Computes the streams of a rank in actors, on any machines of a Ray cluster.

    Batches, slots and states are those of local workers: a run may change from one to the other.

    Args:
        num_workers: actors for each rank.
        resources: of each actor, in Ray's terms: "CPU" (1 unless given), "GPU", "memory" in bytes,
            and the cluster's own names.
        max_bytes: of batches that are brought to this machine before they are asked for.
        spares: actors that wait, with all imported, for one of the others to die.
        local_first: whether CPUs of this machine are taken before those of others.
        start_timeout_sec: after so long without an actor the wait is an error.

    Example:
        `get_savable_loader(dataset, workers=RayWorkers(8, resources={"CPU": 2}))`
    """

    num_workers: int = 0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_bytes: int = 1 << 30
    spares: int = 1
    local_first: bool = False
    start_timeout_sec: float = 300.0

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be."""
        for name, least in (("num_workers", 0), ("max_bytes", 1), ("spares", 0)):
            object.__setattr__(self, name, at_least(name, getattr(self, name), least))
        self._pool: Any = None

    def __reduce__(self) -> Any:
        """Pickles the settings only."""
        return RayWorkers, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __call__(self, settings: WorkerSettings, config: WorkerConfig) -> Executor:
        """Returns a worker of a rank.

        Raises:
            ImportError: Ray is not installed.
        """
        if self._pool is None:
            self._pool = import_name(f"{_PACKAGE}.actor_pool:ActorPool")(self)
        kind = import_name(f"{_PACKAGE}.ray_executor:RayExecutor")
        executor: Executor = kind(self._pool, settings, config)
        return executor


default_workers = RayWorkers()
