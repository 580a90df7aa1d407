"""Functions run by the rank processes of a real `torch.distributed` group, on gloo."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

LIMIT_SEC = 100


def in_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    has_server: bool = False,
    start_method: str = "fork",
) -> list[Any]:
    """What `function(rank, *args)` returned in a process for each rank, by rank.

    They share a file, or a server on rank 0 as those of torchrun do.
    """
    folder.mkdir(exist_ok=True, parents=True)
    meeting = f"file://{folder / 'meeting'}"
    if has_server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context: Any = multiprocessing.get_context(start_method)
    processes = [
        context.Process(target=_run, args=(function, rank, world_size, folder, meeting, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_SEC)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    files = [folder / f"rank-{rank}" for rank in range(world_size)]
    found = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    for rank, entry in enumerate(found):
        if entry is not None and entry[1] is not None:
            raise AssertionError(f"rank {rank} failed:\n{entry[1]}")
    assert not late, f"{len(late)} of {world_size} ranks hang"
    return [entry[0] for entry in found if entry is not None]


def _run(
    function: Any, rank: int, world_size: int, folder: Path, meeting: str, args: tuple[Any, ...]
) -> None:
    result = failure = None
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
        result = function(rank, *args)
        dist.barrier()
    except BaseException:
        failure = traceback.format_exc()
    (folder / f"rank-{rank}").write_bytes(pickle.dumps((result, failure)))
    if failure is None:
        dist.destroy_process_group()
