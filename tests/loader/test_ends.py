"""Ranks that end finite passes together: equally many steps, every sample valid once, resumed."""

from __future__ import annotations

import dataclasses
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    FatalSampleError,
    ModalitySplit,
    Packing,
    SavableDataLoader,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.loader import ends, rank_store

from ..conftest import examples
from ..helpers import assert_same, ignore, number_of, text_set, through_json, train
from ..rank_processes import in_ranks

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
    """Returns batches as plain dicts."""

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        return {"numbers": torch.tensor([int(key) for key in batch.__key__])}


class Tuples(Filtered):
    """Returns batches that cannot carry a mask."""

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
    numbers = (
        batch["numbers"].tolist() if isinstance(batch, dict) else list(map(int, batch.__key__))
    )
    valid = batch.get("valid", [True] * len(numbers)) if isinstance(batch, dict) else batch.valid
    return [n for n, is_valid in zip(numbers, valid, strict=True) if is_valid or not only_valid]


class Together:
    """The loaders of all ranks of a run, each in a thread of its own, with one store.

    Args:
        make: a dataset, of a worker config.
        world_size: number of ranks.
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
        states: Any = None,
        **loader: Any,
    ) -> None:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))
        monkeypatch.setattr(ends, "group_store", lambda config: config.data_parallel_group)
        monkeypatch.setattr(rank_store, "_num_passes", PassesOfThreads())
        self.pools = [ThreadPoolExecutor(1) for _ in range(world_size)]
        config = WorkerConfig(
            rank=0,
            world_size=world_size,
            num_workers=num_workers,
            num_streams=num_streams,
            data_parallel_group=(store, world_size),
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
        """Returns the next batches of each rank, or all that are left."""
        return [future.result(timeout=60) for future in self.futures(number)]

    def futures(self, number: int | None = None) -> list[Future[list[Any]]]:
        """Begins to take batches on all ranks."""
        return [
            pool.submit(lambda own: list(islice(own, number)), own)
            for pool, own in zip(self.pools, self.iterators, strict=True)
        ]

    def one_pass(self) -> list[list[Any]]:
        """Returns the batches of a whole pass, by rank."""
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


@pytest.mark.parametrize(
    "seed",  # `make soak` has each kind with each number of samples
    [pytest.param(seed, marks=() if seed < 3 else pytest.mark.soak) for seed in range(12)],
)
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
def test_ranks_without_a_process_group_cannot_end_together(roots, end) -> None:
    config = WorkerConfig(rank=0, world_size=3, num_workers=0)
    loader = get_savable_loader(validation_of(roots)(config), end=end)
    assert len(loader) > 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{end}.*3 ranks share no.*init_process_group"):
            next(iter(loader))
    assert list(get_savable_loader(validation_of(roots)(config), end="uneven", max_skip_rate=1))


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_passes_follow_each_other_also_after_breaks(roots, monkeypatch, end) -> None:
    make = train(roots[61], "expanding", repeat=False)
    run = Together(monkeypatch, make, 4, end=end, num_streams=8)
    passes = [run.one_pass() for _ in range(3)]
    assert len({steps_of(own) for own in passes} | {0}) > 1
    run = Together(monkeypatch, make, 4, end=end, num_streams=8)
    for expected in passes:
        found: list[list[Any]] = [[] for _ in range(4)]
        while len(found[0]) < steps_of(expected):
            run.begin()  # training resumes after a break
            for own, more in zip(found, run.take(2), strict=True):
                own += more
        assert_same(found, expected)
    validations = Together(monkeypatch, validation_of(roots), 4, end=end)
    whole = validations.one_pass()
    validations.begin()
    assert_same(validations.take(1), [own[:1] for own in whole])
    assert_same(validations.one_pass(), whole)


def validation_of(roots: dict[int, Path], **arguments: Any) -> Any:
    return partial(validation, roots[61], encoder_of("batches", 3), **arguments)


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_limit_ends_all_ranks_at_the_same_step(roots, monkeypatch, end) -> None:
    whole = Together(monkeypatch, validation_of(roots), 4, end=end).one_pass()
    for limit in (1, steps_of(whole), steps_of(whole) + 1, 99):
        run = Together(monkeypatch, validation_of(roots, limit=limit), 4, end=end)
        for _ in range(2):
            assert_same(run.one_pass(), [own[:limit] for own in whole])


def test_rank_without_any_batch_pads_with_the_batch_of_another(roots, monkeypatch, caplog) -> None:
    make = partial(validation, roots[23], encoder_of("batches", 3), batch_size=8)
    found = Together(monkeypatch, make, 8).one_pass()
    counts = [sum(bool(batch.valid.any()) for batch in own) for own in found]
    assert counts.count(0) > 3
    assert valid_numbers(found) == encoder_of("batches", 3).left(23)
    assert "has no batch" not in caplog.text
    run = Together(monkeypatch, make, 8, end="drop")
    assert run.one_pass() == [[]] * 8
    assert run.one_pass() == [[]] * 8
    assert caplog.text.count("has no batch in this pass: 23 samples, batch_size=8, 8 ranks") == 1


def test_user_who_takes_a_batch_apart_does_not_spoil_the_padding(roots, monkeypatch) -> None:
    make = partial(validation, roots[61], encoder_of("dicts", 3), batch_size=1)
    run = Together(monkeypatch, make, 8)
    for step in range(max(map(len, Together(monkeypatch, make, 8, end="uneven").one_pass()))):
        for (batch,) in run.take(1):
            assert set(batch) == {"numbers", "valid"}, step
            batch.clear()


def test_padding_can_be_made_again(roots, monkeypatch) -> None:
    run = Together(monkeypatch, validation_of(roots, batch_size=1), 8, end="pad")
    found = run.one_pass()
    padding = [own[-1] for own in found if not own[-1].valid.any()]
    assert padding
    for batch in padding[:3]:
        again = run.loaders[0].restore_sample(through_json(batch.__restore_key__))
        assert_same(again, batch)


def test_batches_without_a_place_for_a_mask_are_dropped_by_default(
    roots, monkeypatch, caplog
) -> None:
    make = partial(validation, roots[61], encoder_of("tuples", 4))
    uneven = Together(monkeypatch, make, 3, end="uneven").one_pass()
    caplog.clear()
    found = Together(monkeypatch, make, 3).one_pass()
    assert_same(found, [own[: min(map(len, uneven))] for own in uneven])
    assert caplog.text.count("cannot carry a mask") == 1
    with pytest.raises(TypeError, match=r'a tuple has no field for it.*use end="drop"'):
        Together(monkeypatch, make, 3, end="pad").take(1)


class Parity(Filtered):
    """Batches of even numbers only or of odd ones only."""

    def __init__(self, end: str) -> None:
        super().__init__(2, ModalitySplit(parity_of, {0: 1, 1: 1}, window=2, end=end))

    def fate(self, number: int) -> float:
        return 1.0


def parity_of(sample: Any) -> int:
    return number_of(sample) % 2


def test_steps_of_one_modality_stay_so_to_the_end(roots, monkeypatch) -> None:
    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(
            roots[163],
            worker_config=config,
            task_encoder=Parity("drop"),
            batch_size=2,
            repeat=False,
            shuffle_buffer_size=50,
        )

    run = Together(monkeypatch, make, 4, num_streams=8)
    predicted = len(run.loaders[0])
    for _ in range(3):
        found = run.one_pass()
        assert 7 < steps_of(found) <= predicted
        for step in zip(*found, strict=True):
            assert len({number % 2 for batch in step for number in numbers_of(batch)}) == 1
    with pytest.raises(ValueError, match='end="pad", but batches of one modality'):
        Together(monkeypatch, make, 4, end="pad", num_streams=8)


class FailsOnce(Filtered):
    """Stops its process the first time that it sees sample 30."""

    has_failed = False

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        if number_of(sample) == 30 and not self.has_failed:
            self.has_failed = True
            raise FatalSampleError("out of luck")
        return sample


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_rank_that_tries_again_after_an_error_stays_in_step(roots, monkeypatch, end) -> None:
    encoders: list[FailsOnce] = []

    def make(config: WorkerConfig) -> Any:
        encoders.append(FailsOnce(0))
        return get_train_dataset(
            roots[61], worker_config=config, task_encoder=encoders[-1], batch_size=2, repeat=False,
            shuffle_buffer_size=9, max_samples_per_sequence=3,
        )  # fmt: skip

    unbroken = Together(monkeypatch, make, 3, end=end)
    for encoder in encoders:
        encoder.has_failed = True
    whole = unbroken.one_pass()
    run = Together(monkeypatch, make, 3, end=end)
    found: list[list[Any]] = [[], [], []]

    def go_on(rank: int) -> None:
        for _ in range(2):
            with suppress(FatalSampleError):
                found[rank].extend(iter(run.loaders[rank]))
                return

    for future in [pool.submit(go_on, rank) for rank, pool in enumerate(run.pools)]:
        future.result(timeout=60)
    assert [encoder.has_failed for encoder in encoders[3:]].count(True) == 1
    assert_same(found, whole)


def test_ranks_that_lost_too_many_samples_together_all_fail(roots, monkeypatch) -> None:
    encoder = Filtered(0)
    encoder.fate = lambda number: 0.31 if number % 8 == 0 else 1.0  # type: ignore[method-assign]
    make = partial(validation, roots[61], encoder)
    run = Together(monkeypatch, make, 8, max_skip_rate=0.01)
    messages = []
    for future in run.futures():
        error = future.exception(timeout=60)
        assert isinstance(error, FatalSampleError)
        messages.append(str(error))
    assert all("Of 61 samples of this validation pass 8 failed" in text for text in messages)
    assert sum("on other ranks" in text for text in messages) == 6
    assert steps_of(Together(monkeypatch, make, 8, max_skip_rate=0.2).one_pass()) == 4


# ------------------------------------------------------------------------------------------- len


@pytest.mark.parametrize("end", ["drop", "pad", "uneven"])
def test_len_is_what_comes_where_nothing_is_skipped(roots, monkeypatch, end) -> None:
    make = partial(get_val_dataset, roots[61], split_part="train", batch_size=2)
    run = Together(monkeypatch, lambda c: make(worker_config=c), 4, end=end, num_streams=7)
    lengths = list(map(len, run.loaders))
    assert lengths == list(map(len, run.one_pass())) == list(map(len, run.loaders))
    assert (len(set(lengths)) == 1) is (end != "uneven")
    limited = Together(monkeypatch, lambda c: make(worker_config=c, limit=3), 4, end=end)
    assert list(map(len, limited.loaders)) == list(map(len, limited.one_pass())) == [3] * 4


class Planned(FilteredPacks):
    """Packs planned by a length index."""

    def __init__(self, **packing: Any) -> None:
        super().__init__(0, packing=Packing(16, lengths="index", **packing))

    def fate(self, number: int) -> float:
        return 1.0


SHARED: dict[str, Any] = {
    "balance": "global_window", "balance_window": 8, "cost": CostModel(token=1, token_squared=0.1)
}  # fmt: skip


@pytest.mark.parametrize(("packing", "end"), [({}, "uneven"), ({}, "drop"), (SHARED, "pad")])
def test_len_of_planned_packs_is_what_comes(
    roots, monkeypatch, tmp_path_factory, packing, end
) -> None:
    folder = tmp_path_factory.getbasetemp() / "indexed"
    if not folder.exists():
        shutil.copytree(roots[97], folder)
        measure_lengths(folder, Planned(), name="index", num_workers=0)

    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(
            folder, worker_config=config, task_encoder=Planned(**packing), batch_size=2,
            repeat=False, shuffle_buffer_size=9,
        )  # fmt: skip

    # Compiles the packers: CPython 3.11 may fail to parse code in several threads at once.
    next(iter(make(WorkerConfig(rank=0, world_size=1, num_workers=0))))
    run = Together(monkeypatch, make, 3, end=end)
    for number in range(3):
        lengths = list(map(len, run.loaders))
        found = run.one_pass()
        assert list(map(len, found)) == lengths, number
        if end != "drop":
            assert valid_numbers(found) == list(range(97))


@pytest.mark.parametrize(
    ("kind", "end"), [("packs", "uneven"), ("buckets", "drop"), ("batches", "pad")]
)
def test_len_is_learned_in_the_first_whole_pass(roots, monkeypatch, kind, end) -> None:
    make = partial(validation, roots[61], encoder_of(kind, 1))
    run = Together(monkeypatch, make, 3, end=end)
    lengths = list(map(len, run.one_pass()))
    assert list(map(len, run.loaders)) == lengths
    run.begin()
    run.take(1)
    assert list(map(len, run.loaders)) == lengths
    assert list(map(len, run.one_pass())) == lengths
    fresh = Together(monkeypatch, make, 3, end=end)
    before = [len(loader) for loader in fresh.loaders]
    assert all(map(int.__ge__, before, lengths))  # samples that are skipped are counted


# -------------------------------------------------------------------------------------- resuming


@examples(6)
@given(
    kind=st.sampled_from(["packs", "buckets", "dicts"]),
    end=st.sampled_from(["drop", "pad"]),
    before=st.integers(1, 5),
    after=st.none() | st.integers(1, 5),
    num_streams=st.integers(1, 7),
    step=st.integers(0, 12),
    seed=st.integers(0, 9),
)
def test_resumed_ranks_make_equally_many_steps_and_no_sample_is_lost_or_twice(
    roots, kind, end, before, after, num_streams, step, seed
) -> None:
    encoder = encoder_of(kind, seed)
    make = partial(validation, roots[23], encoder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = Together(monkeypatch, make, before, num_streams=num_streams, end=end)
        returned_before = run.take(step)
        states = run.save()
        rest_unbroken = run.take()
        resumed = Together(monkeypatch, make, after or before, states=states, end=end)
        rest = resumed.take()
        whole = resumed.one_pass()
    assert steps_of(returned_before) <= step
    numbers = valid_numbers(returned_before)
    if end == "pad":
        assert valid_numbers(whole) == encoder.left(23)
    if steps_of(returned_before) and (
        steps_of(returned_before) < step or not valid_numbers(rest_unbroken)
    ):
        # Nothing was left, so it is the next pass, on all ranks.
        if end == "pad" or after is None:
            assert_same([*map(list, rest), "end"], [*whole, "end"])
        return
    if after is None:
        found = [[numbers_of(batch) for batch in own] for own in rest]
        assert found == [[numbers_of(batch) for batch in own] for own in rest_unbroken]
    if end == "pad":
        assert sorted(numbers + valid_numbers(rest)) == encoder.left(23)
    elif valid_numbers(rest) != valid_numbers(whole):  # else the few that were left are dropped
        steps_of(rest)
        assert max(Counter(numbers + valid_numbers(rest)).values(), default=1) == 1


# ---------------------------------------------------------------------------------- real processes


def run_rank(
    rank: int, folder: Path, kind: str, num_workers: int
) -> tuple[list[tuple[int, list[int]]], int, list[str]]:
    """Steps and valid samples of three validations, the second left early; `len`, and the log."""
    log: list[str] = []
    ends.logger.warning = lambda text, *values: log.append(text % values)  # type: ignore[assignment]
    config = WorkerConfig.default_worker_config(2)
    config.num_streams = 6
    loader = get_savable_loader(
        validation(folder, encoder_of("batches", 3), config), max_skip_rate=1
    )
    passes = []
    for number in range(3):
        numbers: list[int] = []
        steps = 0
        for batch in loader:
            total = batch.valid.sum()
            dist.all_reduce(total)  # would hang, if one rank made more steps
            assert total > 0
            steps += 1
            numbers += numbers_of(batch)
            if number == 1 and steps == 2:
                break
        passes.append((steps, numbers))
    return passes, len(loader), log


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "world_size", "num_workers"), [("batches", 3, 2), ("packs", 8, 0)]
)
def test_ranks_with_a_collective_in_each_step_do_not_hang(
    roots, tmp_path, kind, world_size, num_workers
) -> None:
    found = in_ranks(run_rank, world_size, tmp_path / "meeting", roots[163], kind, num_workers)
    lengths = {length for _, length, _ in found}
    assert len(lengths) == 1
    for number in range(3):
        steps = {passes[number][0] for passes, _, _ in found}
        assert steps == ({2} if number == 1 else lengths)
        numbers = [n for passes, _, _ in found for n in passes[number][1]]
        assert number == 1 or sorted(numbers) == encoder_of(kind, 3).left(163)
    assert [len(log) for _, _, log in found] == [1] + [0] * (world_size - 1)
    assert "end each pass at the same step" in found[0][2][0]
