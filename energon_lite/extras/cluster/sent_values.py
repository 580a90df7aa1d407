"""Values on their way to actors and from them: settings of a run, and objects of deliveries."""

from __future__ import annotations

import pickle
import platform
from importlib import import_module
from typing import Any

from energon_lite.extras.cluster.ray_library import cloudpickle
from energon_lite.loader.workers.codec import settings_bytes
from energon_lite.loader.workers.executor import RunSettings

# A pickled delivery: the bytes, and the memory beside them.
Sent = tuple[bytes, list[Any]]
# Number of a worker, how many there are, and the seed of its global generators.
Info = tuple[int, int, int]


def size_of(group: list[Sent]) -> int:
    """Returns the bytes of an object of deliveries."""
    return sum(len(body) + sum(map(len, parts)) for body, parts in group)


def packed_settings(dataset: Any, run: RunSettings) -> bytes:
    """Returns the bytes of a pipeline, and of how a rank runs.

    Raises:
        TypeError: A part of it cannot be sent; names it.
    """
    content = settings_bytes(cloudpickle.CloudPickler, (dataset, run))
    return pickle.dumps((_versions(), content))


def made_settings(content: bytes) -> tuple[Any, RunSettings]:
    """Returns the pipeline, and how a rank runs, in the process of an actor.

    Raises:
        RuntimeError: The program has other versions than this node, or modules that it lacks.
    """
    versions, inner = pickle.loads(content)
    if versions != _versions():
        raise RuntimeError(
            f"the training program has {_readable(versions)}, this node {_readable(_versions())}: "
            "install the same on all nodes, or give the cluster a runtime_env"
        )
    try:
        made: tuple[Any, RunSettings] = cloudpickle.loads(inner)
    except ImportError as error:
        raise RuntimeError(
            f"{error} on this node, which the training program has on its sys.path. Call "
            "ray.init(runtime_env={'working_dir': <the folder with it>}) before the loader is "
            "made, or install it on all nodes"
        ) from None
    return made


def _versions() -> tuple[str, str]:
    version: str = import_module("energon_lite").__version__
    return version, ".".join(platform.python_version_tuple()[:2])


def _readable(versions: tuple[str, str]) -> str:
    return "energon_lite {} and Python {}".format(*versions)
