"""Votes of ranks on each step: through a store, each rank a thread, and counted beforehand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from energon_lite import WorkerConfig
from energon_lite.loader import rank_store
from energon_lite.loader.rank_store import StoreVotes, Vote


def new_store(timeout_sec: float = 20) -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_sec))
    return store


def voters(store: Any, world_size: int, *, peers: int = 1) -> list[StoreVotes]:
    found = []
    for rank in [rank for rank in range(world_size) for _ in range(peers)]:
        rank_store._num_passes.clear()  # each would be a process of its own
        config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
        found.append(StoreVotes(store, "run", config, world_size * peers))
        found[-1].begin_pass()
    return found


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("peers", [1, 2])
def test_each_rank_learns_the_sums_of_each_step(peers) -> None:
    ranks = voters(new_store(), 3, peers=peers)

    def run(number: int) -> list[Vote]:
        rank = number // peers
        return [
            ranks[number].cast(Vote(step < 2 + rank, step < 3 + rank, rank != 1), step)
            for step in range(6)
        ]

    expected = [(3, 3, 2), (3, 3, 2), (2, 3, 2), (1, 2, 2), (0, 1, 2), (0, 0, 2)]
    assert in_threads([lambda n=n: run(n) for n in range(len(ranks))]) == [expected] * len(ranks)


def test_store_keeps_a_bounded_number_of_votes_over_many_passes(monkeypatch) -> None:
    monkeypatch.setattr(rank_store, "_NUM_KEPT", 5)
    store = new_store()
    ranks = voters(store, 2)

    for number in range(10):
        for one in ranks:
            rank_store._num_passes["run"] = number + 1
            one.begin_pass()
        run = [
            lambda one=one: [one.cast(Vote(1, 1, 1), step) for step in range(4)] for one in ranks
        ]
        in_threads(run)
    assert store.num_keys() == 3 * 5


def test_wait_that_was_interrupted_is_resumed_and_votes_once(monkeypatch) -> None:
    store = new_store()
    first, second = voters(store, 2)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rank_store.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.cast(Vote(1, 1, 1), 0)
    found = in_threads(
        [lambda: first.cast(Vote(1, 1, 1), 0), lambda: second.cast(Vote(0, 0, 1), 0)]
    )
    assert found == [(1, 1, 2)] * 2


def test_wait_ends_with_the_names_of_the_ranks_that_did_not_come() -> None:
    store = new_store(timeout_sec=0.2)
    ranks = voters(store, 4)

    def run(one: StoreVotes) -> str:
        with pytest.raises(RuntimeError) as error:
            one.cast(Vote(1, 1, 1), 0)
        return str(error.value)

    for message in in_threads([lambda one=one: run(one) for one in (ranks[0], ranks[2])]):
        assert "for ranks [1, 3] to ask for their batch" in message
        assert 'end="uneven"' in message


@pytest.mark.parametrize("world_size", [32_767, 32_768, 1_000_000])
def test_votes_of_a_million_ranks_are_counted(world_size, monkeypatch) -> None:
    """All but two have voted already, and have no batch for this step, only for later ones."""
    monkeypatch.setattr(rank_store, "_SHORTEST_OF_RANK_SEC", 0)
    store = new_store()
    first, last = (
        StoreVotes(
            store, "run", WorkerConfig(rank=rank, world_size=world_size, num_workers=0), size
        )
        for rank, size in ((0, world_size), (world_size - 1, world_size))
    )
    for one in (first, last):
        rank_store._num_passes.clear()
        one.begin_pass()
    name = f"{first._pass_name}/0"
    first._store.add(f"{name}/lacking", world_size - 2)
    first._store.add(f"{name}/sum", world_size - 2)
    found = in_threads(
        [lambda: first.cast(Vote(1, 1, 1), 0), lambda: last.cast(Vote(False, False, False), 0)]
    )
    assert found == [(1, world_size - 1, world_size - 1)] * 2
