"""Ray, as this package uses it."""

from __future__ import annotations

import os
import socket

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

# How long the head of a cluster may need to answer; Ray itself tries for minutes. [Unit: second]
_ANSWER_SEC = 10.0
_connected_in = 0


def connect(address: str | None = None) -> None:
    """Connects to a cluster, if the program has not done it.

    Args:
        address: as of `ray.init`; None for that of RAY_ADDRESS, or for a new one of this machine.

    Raises:
        ConnectionError: Nothing answers at the address.
        RuntimeError: This process was forked from one that is connected.
    """
    global _connected_in
    if _connected_in and _connected_in != os.getpid():
        raise RuntimeError(
            "this process was forked from one that is connected to Ray, and cannot use its "
            "connection; make the loader in the process that iterates it"
        )
    if not ray.is_initialized():
        _check_port(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address)  # what actors log, as skipped samples, comes to this program
    _connected_in = os.getpid()


def _check_port(address: str) -> None:
    """Raises an error if nothing answers at `host:port`; other addresses are Ray's to find."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SEC).close()
        except OSError as error:
            raise ConnectionError(
                f"No Ray cluster answers at {address} ({error}). Start it (`ray start --head`), or "
                "correct the address or RAY_ADDRESS"
            ) from None
