"""Batches of the first of several ranks that have the same place, sent to the others.

That costs no other computing, and the network between the ranks at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.workers.codec import WorkerError, packed_delivery, unpacked
from energon_lite.loader.workers.executor import Executor, Limits, Pass, WorkerDied, WorkerSettings
from energon_lite.loader.workers.rank_feed import Delivery


def peer_executor(
    kind: Callable[[WorkerSettings, WorkerConfig], Executor],
    settings: WorkerSettings,
    config: WorkerConfig,
) -> Executor:
    """Returns a worker of the first peer, or what receives its deliveries.

    Args:
        kind: of workers of the first peer.
        settings: of the worker.
        config: of the rank.

    Raises:
        ValueError: The group is not that of the peers, or needs tensors of a GPU.
    """
    group = config.peer_group
    if dist.get_world_size(group) != config.peers or dist.get_rank(group) != config.peer:
        raise ValueError(
            f"peer {config.peer} of {config.peers} is rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)} in peer_group; give the group of these ranks, in order"
        )
    if "gloo" not in str(dist.get_backend(group)):
        raise ValueError(
            f"peer_group has the backend {dist.get_backend(group)}; batches lie in memory of the "
            "CPU: make it by torch.distributed.new_group(ranks, backend='gloo')"
        )
    return _Sender(kind, settings, config) if config.peer == 0 else _Receiver(settings, config)


class _Receiver(Executor):
    """Takes the deliveries of a worker of the first peer."""

    def start(self, job: Pass) -> None:
        """Begins a pass, as the first peer does."""

    def take(self, number: int, for_sec: float) -> Delivery | WorkerError:
        """Returns the next delivery; waits for it as long as the group does."""
        del number, for_sec
        sizes = self._broadcast(torch.zeros(1, dtype=torch.int64))
        sizes = self._broadcast(torch.zeros(int(sizes[0]), dtype=torch.int64))
        content = self._broadcast(torch.empty(int(sizes.sum()), dtype=torch.uint8))
        body, *parts = np.split(content.numpy(), np.cumsum(sizes.numpy())[:-1])
        delivery: Delivery | WorkerError = unpacked(body, parts)
        return delivery

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, group=self.config.peer_group, group_src=0)
        return tensor


class _Sender(_Receiver):
    """A worker of the first peer, each delivery of which goes to the others."""

    def __init__(
        self,
        kind: Callable[[WorkerSettings, WorkerConfig], Executor],
        settings: WorkerSettings,
        config: WorkerConfig,
    ) -> None:
        super().__init__(settings, config)
        self._inner = kind(settings, config)
        self.name = self._inner.name

    def start(self, job: Pass) -> None:
        """Begins a pass."""
        self._inner.start(job)

    def receive(self, number: int, limits: Limits) -> Delivery | WorkerError:
        """Returns the next delivery, or raises its error, as the others do then, too."""
        try:
            delivery = self._inner.receive(number, limits)
        except WorkerDied:
            raise  # another one takes its place
        except Exception:
            self._send(WorkerError(f"in the first peer, by worker {self.name}"))
            raise
        self._send(delivery)
        return delivery

    def _send(self, delivery: Delivery | WorkerError) -> None:
        content = packed_delivery(delivery, f"in worker {self.name}")
        found: list[Any] = [b"".join(content.body), *content.buffers]
        parts = [np.frombuffer(part, np.uint8) for part in found]
        self._broadcast(torch.tensor([len(parts)]))
        self._broadcast(torch.tensor([len(part) for part in parts]))
        self._broadcast(torch.from_numpy(np.concatenate(parts)))

    def leave(self) -> None:
        """Asks the worker to end."""
        self._inner.leave()

    def end(self, for_sec: float) -> None:
        """Ends the worker."""
        self._inner.is_replaced = self.is_replaced
        self._inner.end(for_sec)
