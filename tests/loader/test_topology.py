"""The topology law: slot m holds the same batch whoever computes it, before and after a resume.

Runs that are resumed at random are in tests/properties.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import get_savable_loader, get_train_dataset
from energon_lite.core.topology import RankSlots, WorkerConfig

from ..helpers import (
    Ranks,
    keys_of,
    text_set,
    through_json,
    train,
)
from ..rank_processes import in_ranks


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("topology")
    return {n: text_set(root / f"texts-{n}", n) for n in (3, 40, 65, 1000)}


def from_start(make: Any, num_streams: int, num_slots: int, **loader: Any) -> dict[int, Any]:
    """The first slots of a run, by one rank."""
    return Ranks(make, 1, num_streams=num_streams, **loader).slots(num_slots)


def part(slots: dict[int, Any], start: int, number: int) -> dict[int, Any]:
    found = {m: item for m, item in slots.items() if start <= m < start + number}
    assert len(found) == number
    return found


def test_run_of_more_streams_than_any_cluster_has_workers_is_saved_and_restored(texts) -> None:
    def loader() -> Any:
        config = WorkerConfig(rank=77, world_size=16_384, num_workers=8, worker_type="thread")
        return get_savable_loader(train(texts[65])(config))

    with loader() as first:
        batches = iter(first)
        before = [keys_of(next(batches)) for _ in range(3)]
        state = through_json(first.save_state_rank())
        assert state["num_streams"] == 131_072
        expected = [keys_of(next(batches)) for _ in range(3)]
    with loader() as resumed:
        resumed.restore_state_rank(state)
        assert [keys_of(batch) for batch in islice(resumed, 3)] == expected != before


def test_default_number_of_streams_is_ranks_times_workers(texts) -> None:
    make = train(texts[40])
    states = [
        Ranks(make, 2, num_workers=workers).loaders[0].save_state_rank() for workers in (0, 1, 3)
    ]
    assert [state["num_streams"] for state in states] == [2, 2, 6]


@pytest.mark.processes
def test_order_of_a_default_run_is_the_same_on_any_number_of_cores(texts, monkeypatch) -> None:
    def run(cores: int, steps: int, state: Any = None) -> tuple[list[Any], Any, int]:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
        with warnings.catch_warnings(), get_savable_loader(get_train_dataset(
            texts[65], batch_size=3, worker_config=WorkerConfig.default_worker_config()
        )) as loader:  # fmt: skip
            warnings.simplefilter("error")  # torch's, of more workers than cores
            if state is not None:
                loader.restore_state_rank(state)
            found = [keys_of(batch) for batch in islice(loader, steps)]
            num_processes = len(multiprocessing.active_children())
            return found, loader.save_state_rank(), num_processes

    before = len(multiprocessing.active_children())
    runs = {cores: run(cores, 12) for cores in (1, 2, 8)}
    assert [found[2] - before for found in runs.values()] == [1, 2, 4]
    assert runs[1][0] == runs[2][0] == runs[8][0]
    assert {found[1]["num_streams"] for found in runs.values()} == {4}
    head, state, _ = run(8, 5)
    assert head + run(1, 7, state)[0] == runs[2][0]


def run_rank(rank: int, folder: Path) -> list[tuple[list[str], int]]:
    """The first keys, and how many warnings there were: by default, as copied, with a group."""
    alone = [dist.new_group([other]) for other in range(2)][rank]
    found, records = [], list[Any]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("energon_lite").addHandler(handler)
    for config in (
        WorkerConfig.default_worker_config(0),
        WorkerConfig(rank=0, world_size=1, num_workers=0),
        WorkerConfig(rank=0, world_size=1, num_workers=0),
        WorkerConfig(rank=0, world_size=1, num_workers=0, data_parallel_group=alone),
    ):
        config.num_streams = 2
        loader = get_savable_loader(get_train_dataset(folder, batch_size=3, worker_config=config))
        found.append((keys_of(next(iter(loader))), len(records)))
        records.clear()
    return found


@pytest.mark.processes
def test_ranks_that_all_have_rank_0_are_warned_once(texts, tmp_path) -> None:
    ranks = in_ranks(run_rank, 2, tmp_path / "ranks", texts[65])
    assert [[number for _, number in rank] for rank in ranks] == [[0, 1, 0, 0]] * 2
    defaults, *copied = zip(*[[keys for keys, _ in rank] for rank in ranks], strict=True)
    assert defaults[0] != defaults[1]
    assert all(keys == (defaults[0], defaults[0]) for keys in copied)


def test_ranks_that_share_streams_log_what_it_costs(texts, caplog) -> None:
    run = Ranks(train(texts[40]), 3, num_streams=8)
    run.next(0)
    assert [record.getMessage() for record in caplog.records] == [
        "3 ranks share streams, as 8 streams cannot be dealt evenly: rank 0 computes 1.12 batches "
        "for each one that it returns. 1, 2, 4 or 8 ranks would cost nothing extra; the more "
        "streams a run has for each rank, the less it costs."
    ]


def test_seed_changes_the_order(texts) -> None:
    make = train(texts[65])
    orders = [
        [keys_of(item) for item in Ranks(make, 1, num_streams=2, seed=seed).slots(20).values()]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@given(
    base=st.integers(0, 200), world_size=st.integers(1, 30), num_streams=st.integers(1, 60),
    first=st.integers(0, 5),
)  # fmt: skip
def test_ranks_return_the_next_slots_in_each_step(base, world_size, num_streams, first) -> None:
    ranks = [RankSlots(base, r, world_size, num_streams, first) for r in range(world_size)]
    period = ranks[0].num_turns
    for n in range(2 * period):
        step = [rank.slot(n) for rank in ranks]
        start = base + (first + n) * world_size
        assert sorted(step) == list(range(start, start + world_size))
        assert [rank.rank_of(slot) for rank, slot in zip(ranks, step, strict=True)] == [
            *range(world_size)
        ]
        assert {rank.turn_of(slot) for rank, slot in zip(ranks, step, strict=True)} == {first + n}
    for rank in ranks:
        slots = [*islice(rank.turns(), 2 * period)]
        turns = [slot % num_streams for slot in slots]
        assert turns == 2 * turns[:period]
        assert slots[period] - slots[0] == period * world_size
        assert sorted(set(turns)) == sorted(rank.streams())
        for stream in rank.streams():
            own = [slot for slot in slots if slot % num_streams == stream]
            assert rank.next_slot(stream, base + first * world_size) == own[0]
            assert rank.next_slot(stream, own[0] + 1) == [*own, own[0] + period * world_size][1]
            if not rank.is_shared(stream):  # all batches of it
                assert [b - a for a, b in pairwise(own)] == [num_streams] * (len(own) - 1)
        counts = {index: 2 + index % 3 for index in range(num_streams)}
        left = [s for s in slots if s // num_streams < counts[s % num_streams]]
        if slots[-1] >= 5 * num_streams:
            assert rank.count(counts) == len(left)
    if num_streams % world_size == 0:
        assert [rank.slot(n) for rank in ranks] == [*range(start, start + world_size)]
    if num_streams >= world_size:
        assert max(len(rank.streams()) for rank in ranks) <= num_streams // world_size + 2
        each = Counter(stream for rank in ranks for stream in rank.streams())
        assert all(each[i] == 1 for i in range(num_streams) if not ranks[0].is_shared(i))


@pytest.mark.parametrize(
    ("num_streams", "world_size", "mean", "most"),
    [
        (1024, 1024, 1, 1), (1024, 1016, 2, 2), (1023, 1000, 2, 3), (2048, 1016, 1.5, 2),
        (8192, 1016, 1.13, 1.25), (8192, 1023, 1.13, 1.25), (12288, 1016, 1.09, 1.16),
    ],
)  # fmt: skip
def test_ranks_compute_little_more_than_they_return(num_streams, world_size, mean, most) -> None:
    ranks = [RankSlots(0, r, world_size, num_streams) for r in range(world_size)]
    costs = [rank.cost for rank in ranks]
    assert sum(costs) / world_size <= mean
    assert max(costs) <= most
