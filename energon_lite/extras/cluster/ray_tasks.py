"""Work on many files on a cluster: `prepare`, `lengths` and `lint` with `--ray`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from energon_lite.extras.cluster.ray_library import RayError, cloudpickle, connect, ray
from energon_lite.extras.prepare import pool
from energon_lite.storage import files

# So often a task is tried on another node where one is lost.
_MAX_RETRIES = 3
# Tasks in flight for each CPU of the cluster.
_TASKS_PER_CPU = 2


def use_cluster(address: str) -> None:
    """Lets this program work on files on a cluster, from now on.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto" or "host:6379".

    Raises:
        ConnectionError: There is none.
    """
    connect(address)
    pool.elsewhere = results_of_cluster


def results_of_cluster(
    function: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int | None = None
) -> Iterator[Any]:
    """Calls a function on each task on a cluster, and yields what it returned, in order.

    Files that a task has `written`, and that are not here, come with its result.

    Args:
        function: a function; those of the program itself, too.
        tasks: its arguments.
        num_workers: how many are worked on at once; None for as many as the cluster has CPUs for.

    Raises:
        RuntimeError: A task was lost several times.
        Exception: What the function raised, in the place of its result.
    """
    options = {"num_cpus": 1, "max_retries": _MAX_RETRIES, "scheduling_strategy": "SPREAD"}
    there: Any = ray.remote(**options)(call)
    content = ray.put(cloudpickle.dumps(function))
    num_cpus = int(ray.cluster_resources().get("CPU", 1))
    most = num_workers or _TASKS_PER_CPU * num_cpus
    rest = (there.remote(content, task) for task in tasks)
    pending = deque(islice(rest, most))
    for task in tasks:
        try:
            result, error, contents = ray.get(pending.popleft())
        except RayError as lost:
            raise RuntimeError(
                f"a task was lost on the cluster {_MAX_RETRIES + 1} times, or could not run "
                f"there: {task!s:.300}. Run the same command again; what was finished is kept. "
                f"{lost}"
            ) from None
        pending.extend(islice(rest, 1))
        if error is not None:
            raise error
        bring(contents)
        yield result


def bring(contents: dict[Path, bytes]) -> None:
    """Writes the files of another node that are not here, or are others."""
    for path, data in contents.items():
        if not files.is_there(path) or files.read_file(path) != data:
            files.write_atomically(path, data)


def call(function: bytes, task: Any) -> tuple[Any, Exception | None, dict[Path, bytes]]:
    """Runs a task; returns its result or error, and the files that it wrote."""
    try:
        result = cloudpickle.loads(function)(task)
    except Exception as error:
        return None, error, {}
    return result, None, {path: files.read_file(path) for path in getattr(result, "written", ())}
