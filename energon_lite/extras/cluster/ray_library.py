"""Ray, as this package uses it."""

from __future__ import annotations

import os

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    text = "Loading on a cluster needs Ray: pip install 'energon_lite[ray]'"
    raise ImportError(text) from None

__all__ = [
    "GetTimeoutError",
    "NodeAffinitySchedulingStrategy",
    "RayActorError",
    "RayError",
    "cloudpickle",
    "connect",
    "ray",
]

_connected_in = 0


def connect(address: str | None = None) -> None:
    """Connects to a cluster, if the program has not done it.

    Args:
        address: as of `ray.init`; None for that of RAY_ADDRESS, or for a new one of this machine.

    Raises:
        RuntimeError: This process was forked from one that is connected.
    """
    global _connected_in
    if _connected_in and _connected_in != os.getpid():
        raise RuntimeError(
            "this process was forked from one that is connected to Ray, and cannot use its "
            "connection; make the loader in the process that iterates it"
        )
    if not ray.is_initialized():
        ray.init(address)  # what actors log, as skipped samples, comes to this program
    _connected_in = os.getpid()
