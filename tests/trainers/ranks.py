"""Real rank processes, forked from the test, with the environment that torchrun would give them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

TIMEOUT_SEC = 150.0  # a busy machine is slow


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any):
    """Runs `function(*args, **kwargs)` in a process for each rank; returns what each returned.

    Raises:
        AssertionError: A rank failed, with its traceback, or the ranks did not end in time.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        own = theirs, port, rank, world_size, partial(function, *args, **kwargs)
        process = context.Process(target=_rank_main, args=own)
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    found: dict[int, Any] = {}
    end = monotonic() + TIMEOUT_SEC
    try:
        while pipes:
            ready = wait(list(pipes), max(0.0, end - monotonic()))
            assert ready, f"ranks {sorted(pipes.values())} of {world_size} did not end in time"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    error, found[rank] = pipe.recv()
                except EOFError:
                    error = "the process died"
                assert error is None, f"rank {rank} of {world_size}: {error}"
    finally:
        for process in processes:
            if pipes and process.is_alive():
                os.kill(process.pid or 0, signal.SIGUSR1)
        for process in processes:
            process.join(1 if pipes else 5)
            process.kill()
    return [found[rank] for rank in range(world_size)]


def _rank_main(pipe, port, rank, world_size, function):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size), NODE_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)  # says where a rank hangs
    try:
        pipe.send((None, function()))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the parent would clean up at its exit is the parent's


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
