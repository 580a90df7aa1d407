"""Exchanges of ranks through a store: all get the same, or all fail, and the next one works."""

from __future__ import annotations

import base64
import random
import re
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import StateError, WorkerConfig
from energon_lite.loader import rank_store
from energon_lite.loader.rank_store import Exchange

from ..conftest import examples
from ..rank_processes import in_ranks

LONG_SEC = 120
PIECE = rank_store._PIECE_BYTES


class InThreads:
    """The exchanges of several ranks over one store, which are threads here."""

    def __init__(self, world_size: int, patch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self.ranks = [
            Exchange(WorkerConfig(rank=rank, world_size=world_size, num_workers=0), LONG_SEC)
            for rank in range(world_size)
        ]
        patch.setattr(rank_store, "group_store", lambda _: (self.store, world_size))
        patch.setattr(Exchange, "is_alone", False)
        patch.setattr(Exchange, "_global_ranks", lambda _: list(range(world_size)))

    def run_all(self, call: Any) -> list[Any]:
        """What `call(exchange, rank)` returned or raised, by rank."""
        calls = {rank: lambda one, rank=rank: call(one, rank) for rank in range(len(self.ranks))}
        found = self.run(calls, LONG_SEC)
        return [found[rank] for rank in range(len(self.ranks))]

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


def test_ranks_that_call_different_things_all_fail(monkeypatch) -> None:
    ranks = InThreads(3, monkeypatch)
    found = ranks.run_all(lambda one, rank: one.gather(0, f"call {rank // 2}"))
    assert all("called different things at once" in str(error) for error in found)
    assert ranks.run_all(lambda one, _: one.gather("new", "call")) == [["new"] * 3] * 3


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


def of_size(num_bytes: int, seed: int = 0) -> str:
    """A text of at least as many bytes, which hardly gets smaller where it is packed."""
    return base64.b64encode(random.Random(seed).randbytes(num_bytes * 3 // 4 + 3)).decode()


# ------------------------------------------------------------------------------ values in pieces


def test_values_of_mixed_sizes_are_exchanged_in_pieces_and_leave_nothing(monkeypatch) -> None:
    monkeypatch.setattr(rank_store, "_PIECE_BYTES", 1000)
    ranks = InThreads(4, monkeypatch)
    sizes = [0, 5, 991, 992, 993, 1000, 1001, 30_000]
    for number in range(3):
        values = [of_size(sizes[(number + 3 * rank) % len(sizes)], rank) for rank in range(4)]
        found = ranks.run_all(lambda one, rank, v=values: one.gather(v[rank], "call"))
        assert found == [values] * 4
        found = ranks.run_all(lambda one, rank, v=values: one.broadcast(v[rank], "call", 3))
        assert found == [values[3]] * 4
    ranks.run_all(lambda one, _: one.gather(None, "call"))
    assert ranks.store.num_keys() < 8


def test_too_much_is_an_error_on_all_ranks_at_once_and_the_next_call_works(monkeypatch) -> None:
    ranks = InThreads(3, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(rank_store, "MAX_STATES_BYTES", 1000)
        since = time.monotonic()
        found = ranks.run_all(lambda one, rank: one.gather("x" * 900 * rank, "call"))
        assert time.monotonic() - since < LONG_SEC / 2
        for error in found:
            text = r"rank [12] .*: its .* are more than 1,000; .*save_state_rank"
            assert re.search(text, str(error))
    assert ranks.run_all(lambda one, _: one.gather("new", "call")) == [["new"] * 3] * 3


def large_states(rank: int) -> None:
    exchange = Exchange(WorkerConfig(rank=rank, world_size=2, num_workers=0), LONG_SEC)
    expected = [of_size(6 << 20, number) for number in range(2)]
    assert exchange.gather(expected[rank], "state_dict()") == expected
    found = exchange.gather(expected[rank], "save_state_global()", 1)
    assert found == (expected if rank == 1 else None)
    dist.distributed_c10d._get_default_store().set(f"alive/{rank}", "1")
    assert dist.new_group([0, 1]) is not None  # which asks the same store


@pytest.mark.processes
def test_two_ranks_exchange_states_of_six_mib_and_their_store_lives(tmp_path) -> None:
    in_ranks(large_states, 2, tmp_path, has_server=True)


# ------------------------------------------------------------------------------ thousands of ranks


def test_few_of_thousands_of_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    rounds = [rank_store._Round(store, "call", rank, 4096, 0) for rank in range(4096)]
    for one in rounds[::2]:
        one.post({})
    rounds[0].fail(1)
    with pytest.raises(StateError, match=r"ranks \[1, 3, .*, 39, \.\.\.\] did not") as error:
        rounds[2].result()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("world_size", [8, 1024, 100_000])
def test_waiting_ranks_ask_the_store_no_more_often_the_more_they_are(
    world_size, monkeypatch
) -> None:
    now = 0.0
    times: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(rank_store.time, "monotonic", lambda: now)
    monkeypatch.setattr(rank_store.time, "sleep", sleep)
    assert rank_store._comes(lambda: times.append(now), 300, world_size) is None
    assert now == 300  # on time, whatever the pause
    late = [time for time in times if 100 < time < 300]
    assert world_size * len(late) / 200 < 5500


# ------------------------------------------------------------------------- ranks that come and go


def test_interrupted_rank_that_calls_again_takes_part_in_the_same_round(monkeypatch) -> None:
    ranks = InThreads(2, monkeypatch)
    found: dict[int, Any] = {}
    other = threading.Thread(
        target=lambda: found.update({0: ranks.ranks[0].gather("first", "call")})
    )
    with monkeypatch.context() as patch:

        def interrupt(_: float) -> None:
            raise KeyboardInterrupt

        patch.setattr(rank_store.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.ranks[1].gather("old", "call")
    other.start()
    found[1] = ranks.ranks[1].gather("new", "call")
    other.join(LONG_SEC)
    assert found == {0: ["first", "new"], 1: ["first", "new"]}


def test_rank_that_died_after_its_call_fails_the_next_one_only(monkeypatch) -> None:
    ranks = InThreads(3, monkeypatch)
    dead = rank_store._Round(ranks.store, "call", 2, 3, 0)
    dead.post("last")  # and nothing more is heard of it
    monkeypatch.setattr(rank_store, "_LEAVE_SEC", 0.1)
    found = ranks.run({r: lambda one, r=r: one.gather(r, "call") for r in (0, 1)}, LONG_SEC)
    assert found == {0: [0, 1, "last"], 1: [0, 1, "last"]}
    found = ranks.run({r: lambda one, r=r: one.gather(r, "call") for r in (0, 1)}, 0.1)
    assert all("ranks [2] did not call" in str(error) for error in found.values())
