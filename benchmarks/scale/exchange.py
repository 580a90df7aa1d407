"""Costs of saving and voting by the number of ranks; another process plays the other ranks."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from benchmarks.peers.probe import cpu_seconds
from benchmarks.scale.rows import Row, print_rows
from benchmarks.scale.states import blend_loader
from energon_lite import WorkerConfig
from energon_lite.core.state import checksum
from energon_lite.loader import rank_store
from energon_lite.loader.count_table import COUNTED, CountTable
from energon_lite.loader.rank_store import Exchange, StoreVotes, Vote
from energon_lite.loader.resume import text_of

FORK = multiprocessing.get_context("fork")
CALL = "state_dict()"
NUM_SOURCES, NUM_STREAMS = 300, 4
NUM_READERS = 8
WAIT_SEC = 60.0


def connect(port: int) -> Any:
    """Connects to the server of a store."""
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False)


def _serve(ports: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    signal.pause()


@contextmanager
def served_store() -> Iterator[int]:
    """Runs the server of a store in a process for itself; yields its port."""
    ports = FORK.Queue()
    process = FORK.Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    try:
        yield ports.get(timeout=WAIT_SEC)
    finally:
        process.kill()


class Clock:
    """A clock that only pauses move."""

    now, num_pauses = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, sec: float) -> None:
        self.now += sec
        self.num_pauses += 1


def checks(num_ranks: int) -> Row:
    """Counts how often ranks that wait ask the store, all together."""
    clock = Clock()
    with patch.object(rank_store, "time", clock):
        rank_store._comes(lambda: b"", WAIT_SEC, num_ranks)
    rate = num_ranks * clock.num_pauses / WAIT_SEC
    return "checks of ranks that wait", f"{num_ranks:,} ranks", rate, "/s"


def votes(num_ranks: int) -> Row:
    """Casts the vote of one rank after the other; those before the last do not wait for it."""
    config = WorkerConfig(rank=0, world_size=num_ranks, num_workers=0)
    with served_store() as port, patch.object(rank_store, "_comes", return_value=b"0"):
        voter = StoreVotes(connect(port), "run", config, num_ranks)
        voter.begin_pass()
        start = perf_counter()
        for rank in range(num_ranks):
            voter._number = 0
            total = voter.cast(Vote(1, rank % 2, 1), 0)
        seconds = perf_counter() - start
    assert total == (num_ranks, num_ranks // 2, num_ranks)
    return "vote of a rank", f"{num_ranks:,} ranks", 1e6 * seconds / num_ranks, "us"


def _save(rank: int, port: int, size: int) -> float:
    dist.init_process_group("gloo", store=connect(port), rank=rank, world_size=2)
    config = WorkerConfig(rank=rank, world_size=2, num_workers=0)
    value = random.Random(rank).randbytes(size // 2).hex()  # compresses to half
    start = perf_counter()
    json.dumps(Exchange(config, WAIT_SEC).gather(value, CALL))
    return perf_counter() - start


def real_ranks(mib: int) -> Row:
    """Saves on two real ranks; seconds of the slower one."""
    with served_store() as port, FORK.Pool(2) as pool:
        ranks = [(rank, port, mib << 20) for rank in range(2)]
        seconds = max(pool.starmap(_save, ranks, chunksize=1))
    return "state_dict on two real ranks", f"{mib} MiB each", seconds, "s"


def states(folder: Path, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yields states of ranks as `state_dict()` sends them: one with other streams and counts."""
    loader = blend_loader(folder, NUM_SOURCES, num_streams=NUM_STREAMS)
    list(islice(loader, 8))
    first, weights = loader._run.state(as_text=False) | {"config": None}, loader._run._weights
    shares, rng = np.array([*weights.values()]) / sum(weights.values()), np.random.default_rng(0)
    for rank in range(num_ranks):
        own = {str(int(index) + rank): value for index, value in first["streams"].items()}
        counts = np.zeros((len(COUNTED), NUM_SOURCES))
        counts[:3] = np.rint(1e5 * shares + rng.normal(0, 1, NUM_SOURCES))
        counts[2] -= rng.binomial(3, 0.02, NUM_SOURCES)
        counts[6] = counts[0]
        counts[[7, 9]] = counts[0] * rng.lognormal(-7, 0.3, (2, NUM_SOURCES))
        stats = CountTable([*weights], 1e5 * num_ranks * shares, counts).to_json(weights)
        state = {**first, "rank": rank, "streams": own, "begun": [*map(int, own)], "stats": stats}
        yield {**state, "checksum": checksum(state)}


def _post_others(port: int, states: list[dict[str, Any]], is_ready: Any) -> None:
    """Posts the values of all ranks but rank 0, and takes them back once it is decided."""
    store, num_ranks = connect(port), len(states)
    others = [rank_store._Round(store, CALL, rank, num_ranks, 0) for rank in range(1, num_ranks)]
    for rank, other in enumerate(others, 1):
        other.post(states[rank])
    is_ready.set()
    rank_store._comes(others[0].is_decided, 10 * WAIT_SEC, num_ranks)
    for other in others:
        other.take_back()


def gathered(folder: Path, num_ranks: int) -> Iterator[Row]:
    """Gathers the states of all ranks on rank 0; then some others read them."""
    size = f"{num_ranks:,} ranks x {NUM_SOURCES} sources"
    all_states = [*states(folder, num_ranks)]
    exchange = Exchange(WorkerConfig(rank=0, world_size=num_ranks, num_workers=0), WAIT_SEC)
    with served_store() as port:
        is_ready = FORK.Event()
        others = FORK.Process(target=_post_others, args=(port, all_states, is_ready), daemon=True)
        others.start()
        assert is_ready.wait(10 * WAIT_SEC)
        store = connect(port)
        with (
            patch.object(rank_store, "group_store", lambda _: (store, num_ranks)),
            patch.object(Exchange, "is_alone", False),
            patch.object(Exchange, "_global_ranks", lambda _: range(num_ranks)),
        ):
            start, since = perf_counter(), process_time()
            text = text_of(exchange.gather_packed(all_states[0], CALL))
            yield "state_dict on rank 0: CPU", size, process_time() - since, "s"
            yield "state_dict on rank 0", size, perf_counter() - start, "s"
        others.join()
        yield "state_dict: text of a rank", size, len(text) / num_ranks, "B"
        since, start = cpu_seconds(), perf_counter()
        for _ in range(NUM_READERS):
            store = dist.PrefixStore("energon_lite/rounds", connect(port))
            assert rank_store._read(store, "0/all")
        spent = (cpu_seconds() - since) / NUM_READERS
        yield "state_dict on another rank: CPU to read and serve", size, spent, "s"
        seconds = (perf_counter() - start) / NUM_READERS * num_ranks
        yield "state_dict: one server sends it to all ranks, projected", size, seconds, "s"


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows; writes texts."""
    yield from map(checks, (8, 1_024, 16_384, 100_000))
    yield from map(votes, (1_000, 20_000, *[100_000] * large))
    yield from map(real_ranks, (4, 20))
    for num_ranks in (256, 4_096, *[16_384] * large):
        yield from gathered(folder, num_ranks)


if __name__ == "__main__":
    print_rows(rows)
