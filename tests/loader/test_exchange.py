"""Exchanges of ranks through a store: all get the same, or all fail, and the next one works."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import StateError, WorkerConfig
from energon_lite.loader import rank_store
from energon_lite.loader.rank_store import Exchange

from ..conftest import examples

LONG_SEC = 60


class InThreads:
    """The exchanges of several ranks over one store, which are threads here."""

    def __init__(self, world_size: int, patch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self.ranks = [
            Exchange(WorkerConfig(rank=rank, world_size=world_size, num_workers=0), LONG_SEC)
            for rank in range(world_size)
        ]
        patch.setattr(rank_store, "group_store", lambda _: (self.store, False))
        patch.setattr(Exchange, "_is_alone", False)
        patch.setattr(Exchange, "_global_ranks", lambda _: list(range(world_size)))

    def run(self, calls: dict[int, Any], timeout_sec: float) -> dict[int, Any]:
        """What `calls[rank](exchange)` returned or raised, by rank."""
        found: dict[int, Any] = {}

        def call(rank: int) -> None:
            try:
                found[rank] = calls[rank](self.ranks[rank])
            except StateError as error:
                found[rank] = error

        for one in self.ranks:
            one._timeout_sec = timeout_sec
        threads = [threading.Thread(target=call, args=(rank,)) for rank in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert set(found) == set(calls), "a rank hangs"
        return found


def call_of(kind: str, rank: int, place: int, number: int) -> Any:
    value = [rank, number]
    return {
        "all": lambda one: one.gather(value, f"call {number}"),
        "one": lambda one: one.gather(value, f"call {number}", place),
        "from one": lambda one: one.broadcast(value, f"call {number}", place),
    }[kind]


@given(data=st.data())
@examples(25)
def test_all_ranks_get_the_same_or_fail_and_no_failed_call_hinders_the_next(data) -> None:
    world_size = data.draw(st.integers(2, 4))
    everybody = set(range(world_size))
    with pytest.MonkeyPatch.context() as patch:
        ranks = InThreads(world_size, patch)
        for number in range(data.draw(st.integers(1, 6))):
            kind = data.draw(st.sampled_from(["all", "one", "from one"]))
            place = data.draw(st.integers(0, world_size - 1))
            callers = data.draw(
                st.one_of(
                    st.just(everybody), st.sets(st.sampled_from(sorted(everybody)), min_size=1)
                )
            )
            calls = {rank: call_of(kind, rank, place, number) for rank in callers}
            found = ranks.run(calls, LONG_SEC if callers == everybody else 0.01)
            everything = [[rank, number] for rank in range(world_size)]
            for rank, result in found.items():
                if callers != everybody:
                    assert isinstance(result, StateError)
                    (named,) = re.findall(
                        rf"ranks \[(.*)\] did not call call {number} ", str(result)
                    )
                    # And callers that were late, where others had given up before.
                    assert everybody - callers <= set(map(int, named.split(", "))) <= everybody
                elif kind == "all":
                    assert result == everything
                elif kind == "one":
                    assert result == (everything if rank == place else None)
                else:
                    assert result == everything[place]


def test_store_does_not_grow_with_calls(monkeypatch) -> None:
    ranks = InThreads(3, monkeypatch)
    sizes = []
    for number in range(8):
        if number % 2:
            ranks.run({1: call_of("all", 1, 0, number)}, 0.01)
        ranks.run({rank: call_of("all", rank, 0, number) for rank in range(3)}, LONG_SEC)
        sizes.append(ranks.store.num_keys())
    assert max(sizes[2:]) <= sizes[2] + 2
    assert max(sizes) < 8


def test_interrupted_wait_leaves_no_value_behind(monkeypatch) -> None:
    ranks = InThreads(2, monkeypatch)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rank_store.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.ranks[1].gather("old", "call")
    assert isinstance(ranks.run({0: lambda one: one.gather("new", "call")}, 0.01)[0], StateError)
    found = ranks.run({rank: lambda one: one.gather("new", "call") for rank in (0, 1)}, LONG_SEC)
    assert found == {0: ["new", "new"], 1: ["new", "new"]}
