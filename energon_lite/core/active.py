"""What this thread computes, under the names that Energon's `WorkerConfig` has for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from energon_lite.core.failures import append

logger = logging.getLogger(__name__)


class _Current(threading.local):
    context: Any = None
    # Set by `worker_activate`, where a user's code plays the loader.
    config: Any = None
    indices: tuple[int, ...] = ()


current = _Current()


class _ActiveConfig:
    """`WorkerConfig.active_worker_config`, of the class and of instances."""

    def __get__(self, instance: object, owner: type) -> Any:
        return current.config or getattr(current.context, "worker_config", None)


class ActiveWorker:
    """The part of `WorkerConfig` that is about the sample being processed, and about logs."""

    __slots__ = ()

    rank: int
    world_size: int
    num_workers: int
    data_parallel_group: Any
    seed_offset: int
    worker_debug_path: str | None
    worker_log_level: int

    active_worker_config = _ActiveConfig()

    def rank_worker_id(self) -> int:
        """Returns the number of this loader process in its rank; 0 outside of one."""
        info = get_worker_info()
        return 0 if info is None else info.id

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """Returns a number of this loader process in the run, for logs; no content depends on it.

        Args:
            override_local_worker_id: the process in the rank; by default this one.
        """
        local = override_local_worker_id
        return self.rank * self.num_workers + (self.rank_worker_id() if local is None else local)

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """Returns Energon's seed of a loader process, in 0..2^32-1; no content here depends on it.

        Args:
            override_local_worker_id: the process in the rank; by default this one.
        """
        worker = self.global_worker_id(override_local_worker_id) if self.num_workers else self.rank
        digest = hashlib.sha1(f"{worker},{self.seed_offset}".encode()).digest()
        return int.from_bytes(digest[-4:], "big")

    @property
    def active_worker_sample_index(self) -> int:
        """The number of the sample being processed, as `TaskEncoder.current_sample_index`.

        Raises:
            RuntimeError: No sample is being processed.
        """
        self.assert_worker()
        return self._index(-1) if current.indices else int(current.context.current_sample_index())

    @property
    def active_worker_batch_index(self) -> int:
        """The number of the batch being made, as `TaskEncoder.current_batch_index`.

        Raises:
            RuntimeError: No sample is being processed.
        """
        self.assert_worker()
        return self._index(0) if current.indices else int(current.context.batch_index)

    def _index(self, place: int) -> int:
        return current.indices[place] * max(1, self.num_workers) + self.rank_worker_id()

    def assert_worker(self) -> None:
        """Checks that a sample is being processed.

        Raises:
            RuntimeError: None is.
        """
        if current.context is None and not current.indices:
            raise RuntimeError(
                "No sample is being processed: this is known only inside a hook that a loader (or "
                "a `for` over a dataset) calls, or after worker_activate(sample_index)."
            )

    def worker_activate(
        self,
        sample_index: int,
        override_global_rank: int | None = None,
        cache_pool: None = None,
    ) -> None:
        """Makes this the active config until `worker_deactivate`, for code that runs hooks itself.

        Args:
            sample_index: what `active_worker_sample_index` counts from.
            override_global_rank: accepted for Energon's signature; no content depends on it.
            cache_pool: None: this version has no cache pools.

        Raises:
            RuntimeError: One is active.
            NotImplementedError: There is a `cache_pool`.
        """
        del override_global_rank
        if cache_pool is not None:
            raise NotImplementedError("worker_activate(cache_pool=...): there are no cache pools")
        if current.config is not None:
            raise RuntimeError("A worker is active already; call worker_deactivate() first.")
        current.config, current.indices = self, (sample_index,)

    def worker_deactivate(self) -> None:
        """Ends what `worker_activate` began."""
        current.config, current.indices = None, ()

    def worker_push_sample_index(self, sample_index: int) -> None:
        """Makes another index the innermost one."""
        current.indices += (sample_index,)

    def worker_pop_sample_index(self) -> int:
        """Takes the innermost index away, and returns it."""
        *rest, last = current.indices
        current.indices = tuple(rest)
        return last

    def should_log(self, level: int) -> bool:
        """Returns whether lines of this level are wanted."""
        return self.worker_log_level >= level

    def worker_log(self, data: dict[str, Any]) -> None:
        """Writes a line of JSON to the end of `worker_debug_path`; without one, to the logger."""
        line = json.dumps(data, default=str)
        if self.worker_debug_path is None:
            logger.info("%s", line)
            return
        append(self.debug_path(), line + "\n")

    def debug_path(self) -> Path:
        """Returns the file of this process; the ids of rank r start at `r * (num_workers + 1)`."""
        info = get_worker_info()
        local = 0 if info is None else 1 + info.id
        worker_id = self.rank * (self.num_workers + 1) + local
        return Path(str(self.worker_debug_path).format(worker_id=worker_id, pid=os.getpid()))

    def config(self) -> dict[str, Any]:
        """Returns rank, world size, number of workers, and the group as text."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": self.num_workers,
            "data_parallel_group": self.data_parallel_group and str(self.data_parallel_group),
        }
