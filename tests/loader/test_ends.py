"""Ranks that end finite passes together: equally many steps, every sample valid once, resumed."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    Packing,
    SavableDataLoader,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_val_dataset,
    stateless,
)
from energon_lite.loader import ends, votes

from ..helpers import assert_same, ignore, number_of, text_set, through_json

PRIMES = (61, 97, 127, 163)


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("ends")
    return {number: text_set(folder / str(number), number) for number in (*PRIMES, 23)}


class Filtered(DefaultTaskEncoder):
    """Skips 30 % of the samples on purpose, others by seed, and fails on some."""

    def __init__(self, seed: int, batching: Any = None, packing: Any = None) -> None:
        super().__init__()
        self.seed = seed
        self.batching = batching
        self.packing = packing

    def fate(self, number: int) -> float:
        return random.Random(1000 * self.seed + number).random()

    def left(self, num_samples: int) -> list[int]:
        return [number for number in range(num_samples) if self.fate(number) >= 0.33]

    def sample_length(self, sample: Any) -> int:
        return 1 + number_of(sample) * 7 % 13

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        fate = self.fate(number_of(sample))
        if fate < 0.3:
            raise SkipSample
        if fate < 0.33:
            raise ValueError("cannot be encoded")
        if self.packing is None:
            return sample
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "__sources__": sample.__sources__,
            "input_ids": torch.full((self.sample_length(sample),), number_of(sample)),
        }


class FilteredPacks(Filtered):
    def sample_length(self, sample: Any) -> int:
        if isinstance(sample, dict):
            return len(sample["input_ids"])
        return super().sample_length(sample)


class Dicts(Filtered):
    """Gives batches as plain dicts."""

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        return {"numbers": torch.tensor([int(key) for key in batch.__key__])}


class Tuples(Filtered):
    """Gives batches that have no place for a mask."""

    @stateless
    def encode_batch(self, batch: Any) -> tuple[str, ...]:
        return tuple(batch.__key__)


def encoder_of(kind: str, seed: int) -> Filtered:
    if kind == "packs":
        return FilteredPacks(seed, packing=Packing(16, buffer_size=4))
    if kind == "buckets":
        return Filtered(seed, batching=Buckets(max_tokens=32, window=4))
    return {"batches": Filtered, "dicts": Dicts, "tuples": Tuples}[kind](seed)


def validation(root: Path, encoder: Any, config: WorkerConfig, **arguments: Any) -> Any:
    arguments = {"batch_size": 2, "split_part": "train", **arguments}
    if isinstance(encoder.batching, Buckets):
        arguments["batch_size"] = None
    return get_val_dataset(root, worker_config=config, task_encoder=encoder, **arguments)


def numbers_of(batch: Any, *, only_valid: bool = True) -> list[int]:
    """The numbers of the samples of a batch, by default those of its valid rows."""
    if isinstance(batch, tuple):
        return list(map(int, batch))
    numbers = batch["numbers"].tolist() if isinstance(batch, dict) else map(int, batch.__key__)
    valid = batch["valid"] if isinstance(batch, dict) else batch.valid
    return [n for n, is_valid in zip(numbers, valid, strict=True) if is_valid or not only_valid]


class Together:
    """The loaders of all ranks of a run, each in a thread of its own, with one store.

    Args:
        make: a dataset, of a worker config.
        world_size: number of ranks.
        has_store: whether the ranks can talk.
        loader: arguments of the loaders.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        make: Any,
        world_size: int,
        *,
        num_workers: int = 0,
        num_streams: int | None = None,
        has_store: bool = True,
        states: Any = None,
        **loader: Any,
    ) -> None:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))
        monkeypatch.setattr(ends, "group_store", lambda config: config.data_parallel_group)
        monkeypatch.setattr(votes, "_num_passes", PassesOfThreads())
        self.pools = [ThreadPoolExecutor(1) for _ in range(world_size)]
        config = WorkerConfig(
            rank=0,
            world_size=world_size,
            num_workers=num_workers,
            num_streams=num_streams,
            data_parallel_group=(store, False) if has_store else None,
            global_error_handler=ignore,
        )
        self.loaders: list[SavableDataLoader[Any]] = []
        for rank in range(world_size):
            own = dataclasses.replace(config, rank=rank)
            made = get_savable_loader(make(own), **{"max_skip_rate": 1, **loader})
            if states is not None:
                made.restore_state_global(through_json(states))
            self.loaders.append(made)
        self.iterators: list[Iterator[Any]] = []
        self.begin()

    def begin(self) -> None:
        """Begins the next `for` on all ranks."""
        self.iterators = [iter(loader) for loader in self.loaders]

    def take(self, number: int | None = None) -> list[list[Any]]:
        """Gives the next batches of each rank, or all that are left."""
        futures = [
            pool.submit(lambda own: list(islice(own, number)), own)
            for pool, own in zip(self.pools, self.iterators, strict=True)
        ]
        return [future.result(timeout=60) for future in futures]

    def one_pass(self) -> list[list[Any]]:
        """Gives the batches of a whole pass, by rank."""
        self.begin()
        return self.take()

    def save(self) -> list[dict[str, Any]]:
        return [through_json(loader.save_state_rank()) for loader in self.loaders]


class PassesOfThreads(threading.local):
    """Counts passes by thread, as each rank is a process else."""

    def __init__(self) -> None:
        self.counter: Counter[str] = Counter()

    def __getitem__(self, name: str) -> int:
        return self.counter[name]

    def __setitem__(self, name: str, number: int) -> None:
        self.counter[name] = number


def steps_of(ranks: list[list[Any]]) -> int:
    """How many steps all ranks made."""
    (steps,) = set(map(len, ranks))
    return steps


def valid_numbers(ranks: list[list[Any]]) -> list[int]:
    return sorted(number for own in ranks for batch in own for number in numbers_of(batch))


# ---------------------------------------------------------------------------- equally many steps


@pytest.mark.parametrize("seed", range(20))
def test_eight_ranks_make_equally_many_steps_and_every_sample_is_valid_once(
    roots, monkeypatch, seed
) -> None:
    kind = ("packs", "buckets", "batches")[seed % 3]
    num_samples = PRIMES[seed % 4]
    encoder = encoder_of(kind, seed)
    make = partial(validation, roots[num_samples], encoder)
    uneven = Together(monkeypatch, make, 8, end="uneven").one_pass()
    counts = list(map(len, uneven))

    padded = Together(monkeypatch, make, 8).one_pass()
    assert steps_of(padded) == max(counts)
    assert valid_numbers(padded) == encoder.left(num_samples)
    for own, count in zip(padded, counts, strict=True):
        assert [bool(batch.valid.any()) for batch in own] == [i < count for i in range(len(own))]

    dropped = Together(monkeypatch, make, 8, end="drop").one_pass()
    assert steps_of(dropped) == min(counts)
    assert_same([*dropped, "end"], [*(own[: min(counts)] for own in uneven), "end"])


@pytest.mark.parametrize("end", ["drop", "pad"])
@pytest.mark.parametrize("kind", ["packs", "buckets", "dicts"])
def test_ranks_that_cannot_talk_count_and_give_the_same(roots, monkeypatch, kind, end) -> None:
    make = partial(validation, roots[61], encoder_of(kind, 5))
    agreed = Together(monkeypatch, make, 3, end=end, num_streams=4)
    alone = Together(monkeypatch, make, 3, end=end, num_streams=4, has_store=False)
    for _ in range(2):
        expected = agreed.one_pass()
        assert steps_of(expected) > 2
        found = [list(loader) for loader in alone.loaders]  # one after the other
        assert_same(found, expected)


# ---------------------------------------------------------------------------------- real processes

RANK = """
import json, sys
import torch, torch.distributed as dist
from energon_lite import DefaultTaskEncoder, SkipSample, WorkerConfig, get_loader, get_val_dataset

class Encoder(DefaultTaskEncoder):
    def encode_sample(self, sample):
        if int(sample.__key__) < 16:
            raise SkipSample
        return sample

folder, meeting = sys.argv[1:3]
rank, world, num_workers = map(int, sys.argv[3:])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
config = WorkerConfig.default_worker_config(num_workers)
config.num_streams = 2 * world
dataset = get_val_dataset(
    folder, split_part="train", batch_size=2, worker_config=config, task_encoder=Encoder()
)
loader = get_loader(dataset)
passes = []
for number in range(3):
    keys, steps = [], 0
    for batch in loader:
        total = batch.valid.sum()
        dist.all_reduce(total)  # would hang, if one rank made more steps
        assert total > 0
        steps += 1
        keys += [key for key, is_valid in zip(batch.__key__, batch.valid) if is_valid]
        if number == 1 and steps == 2:
            break
    passes.append((steps, keys))
print(json.dumps([passes, len(loader)]))
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_ranks_with_a_collective_in_each_step_do_not_hang(roots, tmp_path) -> None:
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", RANK, str(roots[61]), str(tmp_path / "meeting")),
                *map(str, (rank, 3, 2)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, outputs[0][1]
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    for number, steps in ((0, 8), (1, 2), (2, 8)):
        assert [passes[number][0] for passes, _ in found] == [steps] * 3
        if steps == 8:
            keys = [int(key) for passes, _ in found for key in passes[number][1]]
            assert sorted(keys) == list(range(16, 61))
    assert [length for _, length in found] == [8] * 3
    assert outputs[0][1].count("end each pass at the same step") == 1
    assert "end each pass" not in outputs[1][1]
