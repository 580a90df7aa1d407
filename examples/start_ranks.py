"""Starts the ranks of an example on this machine, as torchrun does; Linux, since it forks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch._dynamo  # noqa: F401 - DDP imports it; here once, not in each rank
from torch.multiprocessing import start_processes


def start_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Calls `function(*arguments)` in a process for each rank, and waits for all of them."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    start_processes(
        _run_rank, (function, num_ranks, port, arguments), num_ranks, start_method="fork"
    )


def _run_rank(
    rank: int, function: Callable[..., None], num_ranks: int, port: int, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    function(*arguments)
