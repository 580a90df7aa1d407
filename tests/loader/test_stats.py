"""What each source gave: counted exactly, whoever computes, saves, goes on or adds it up."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from energon_lite import (
    DefaultTaskEncoder,
    SampleDecoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import StateError
from energon_lite.core.key_columns import planes_of
from energon_lite.core.keys import leaves
from energon_lite.loader import stats as counting

from ..helpers import (
    Ranks,
    blend_maker,
    number_of,
    signed,
    text_set,
)
from ..rank_processes import in_ranks

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)
SIZES = {"a": 24, "b": 14, "c": 5}
SHARES = {"a/train": 0.5, "b/train": 0.25, "c/train": 0.25}
BLEND = """
    blend:
    - {weight: 2, path: a, loss_weight: 0.2}
    - {weight: 1, path: b}
    - {weight: 1, path: c, loss_weight: 3}
"""


def length_of(sample: TextSample) -> int:
    return 10 + 7 * (number_of(sample) % 5)


class Measuring(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return length_of(sample)


class Skipping(Measuring):
    """Leaves out one sample in five on purpose, and fails on one in seven."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) % 5 == 1:
            raise SkipSample
        if number_of(sample) % 7 == 2:
            raise ValueError(f"cannot encode {sample.__key__}")
        return sample


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stats")
    for name, size in SIZES.items():
        text_set(root / name, size)
    return root


def blend_of(root: Path, split: str = BLEND, encoder: Any = Measuring, **settings: Any) -> Any:
    """A maker of the training dataset of a file with `split`."""
    return blend_maker(
        root, split, encoder, **{"batch_size": 3, "shuffle_buffer_size": 4, **settings}
    )


def recount(batches: Any) -> dict[str, Counter[str]]:
    """What the training loop received, by source."""
    found: dict[str, Counter[str]] = {}
    seen = set()
    for batch in batches:
        keys = batch.__restore_key__[2:]
        for name in {leaf[0] for leaf in leaves(batch.__restore_key__)}:
            found.setdefault(name, Counter())["batches"] += 1
        for key, number in zip(keys, batch.__key__, strict=True):
            (leaf,) = leaves(key)
            counts = found[leaf[0]]
            counts["tokens"] += 10 + 7 * (int(number) % 5)
            counts["samples"] += leaf not in seen
            seen.add(leaf)
    return found


def of(stats: Any, *fields: str) -> dict[str, Counter[str]]:
    return {
        name: Counter({field: getattr(s, field) for field in fields}) for name, s in stats.items()
    }


EXACT = ("samples", "tokens", "batches")


@pytest.mark.parametrize("encoder", [Measuring, Skipping])
def test_counts_are_those_of_the_batches_that_the_loop_received(sets, encoder) -> None:
    run = Ranks(blend_of(sets, encoder=encoder), 1, num_streams=2)
    batches = list(run.slots(60).values())
    stats = run.loaders[0].stats()
    assert of(stats, *EXACT) == recount(batches)
    skipped = run.loaders[0].num_skipped
    assert bool(skipped) == (encoder is Skipping)
    for name, s in stats.items():
        assert s.skipped == skipped.get(name, 0)
        assert s.draws == s.samples + s.skipped
        assert s.epochs == pytest.approx(s.draws / SIZES[name[0]])
        assert s.actual_share == pytest.approx(s.samples / 180)
        assert s.target_share == pytest.approx(SHARES[name])
        weight = {"a": 0.2, "b": 1, "c": 3}[name[0]]
        assert s.loss_weight_sum == pytest.approx(weight * s.samples)
    assert sum(s.loss_weight_sum for s in stats.values()) == pytest.approx(
        sum(batch.loss_weight.sum().item() for batch in batches), rel=1e-6
    )


# ------------------------------------------------------------------------------------- the state


def counts_of(loader: Any) -> dict[str, Any]:
    return of(loader.stats(), *EXACT, "skipped", "draws", "target_share", "loss_weight_sum")


def test_counts_of_an_edited_blend_keep_what_was(sets) -> None:
    run = Ranks(blend_of(sets), 1, num_streams=2)
    first = recount(run.slots(40).values())
    before = run.loaders[0].stats()
    states = run.save()
    edited = blend_of(sets, "blend: [{path: a, loss_weight: 2}, {path: b}]")
    loader = get_savable_loader(edited(WorkerConfig(rank=0, world_size=1, num_workers=0)))
    loader.restore_state_global(states, migrate=True)
    restored = loader.stats()
    for name in SHARES:
        assert of(restored, *EXACT)[name] == first[name]
        assert restored[name].target_share == pytest.approx(before[name].target_share)
        assert restored[name].loss_weight_sum == pytest.approx(before[name].loss_weight_sum)
    second = recount(islice(loader, 40))
    stats = loader.stats()
    for name, s in stats.items():
        both = first[name] + second.get(name, Counter())
        assert Counter({field: getattr(s, field) for field in EXACT}) == both
    target = {"a/train": 60 + 60, "b/train": 30 + 60, "c/train": 30}
    assert stats.target == pytest.approx(target)
    total = 0.2 * first["a/train"]["samples"] + 2.0 * second["a/train"]["samples"]
    assert stats["a/train"].loss_weight_sum == pytest.approx(total)


@pytest.mark.parametrize(
    "damage",
    [
        lambda stats: stats.pop("scales"),
        lambda stats: stats["scales"].pop(),
        lambda stats: stats["scales"].__setitem__(1, float("nan")),
        lambda stats: stats["scales"].__setitem__(1, 1e99),
        lambda stats: stats["scales"].__setitem__(3, "7"),
        lambda stats: stats.update(others=["d/train"]),
        lambda stats: stats.update(others=["a/train"]),
        lambda stats: stats.update(others=7),
        lambda stats: stats["columns"].pop(),
        lambda stats: stats["columns"].append([]),
        lambda stats: stats["columns"].__setitem__(1, ["AAAA"]),
        lambda stats: stats["columns"].__setitem__(1, 7),
        lambda stats: stats["columns"].__setitem__(1, planes_of(np.arange(3)) * 9),
        lambda stats: stats["columns"].__setitem__(1, planes_of(np.array([0, 1 << 62, 0]))),
    ],
)
def test_corrupt_counts_are_refused(sets, damage) -> None:
    run = Ranks(blend_of(sets), 1)
    run.steps(3)
    states = run.save()
    damage(states[0]["stats"])
    states = list(map(signed, states))
    loader = run.loaders[0]
    before = counts_of(loader)
    with pytest.raises(StateError, match="stats"):
        loader.restore_state_global(states)
    assert counts_of(loader) == before


# ----------------------------------------------------------------------------------- targets


def test_finite_passes_ask_for_each_source_once(sets) -> None:
    make = blend_of(sets, "blend_epochized: [{path: a}, {path: b, repetitions: 2}]", repeat=False)
    loader = get_savable_loader(make(ONE))
    for number in range(1, 4):
        list(loader)
        target = loader.stats().target
        assert target == pytest.approx({"a/train": 24 * number, "b/train": 28 * number})


# ---------------------------------------------------------------------------------------- loggers


@pytest.fixture
def stats(sets: Path) -> Any:
    run = Ranks(blend_of(sets), 1)
    run.steps(20)
    return run.loaders[0].stats()


def test_scalars_name_source_and_figure(stats) -> None:
    scalars = stats.scalars()
    assert len(scalars) == 3 * 14
    assert scalars["data/a/train/actual_share"] == stats["a/train"].actual_share
    assert all(type(value) is float for value in scalars.values())
    assert set(stats.scalars("x/")) == {f"x/{name[5:]}" for name in scalars}


def test_figures_are_written_to_loggers_of_both_kinds(stats) -> None:
    class Board:
        def __init__(self) -> None:
            self.found: dict[tuple[str, int], float] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.found[tag, global_step] = scalar_value

    class Wandb:
        def log(self, data: dict[str, float], step: int | None = None) -> None:
            self.found = {(name, step): value for name, value in data.items()}

    for writer in (Board(), Wandb()):
        stats.write_to(writer, 7)
        assert writer.found == {(name, 7): value for name, value in stats.scalars().items()}
    with pytest.raises(TypeError, match=r"list has neither add_scalar.*log"):
        stats.write_to([], 7)


def test_text_is_a_table_for_people(stats) -> None:
    lines = str(stats).splitlines()
    assert lines[0].split() == ["source", "target", "actual", "samples", "epochs", "skipped"]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[:3] == ["a/train", "50.00%", f"{stats['a/train'].actual_share:.2%}"]


# ------------------------------------------------------------------------------------------- time


class Clock:
    """A time that passes only in what is slow, so that the tests wait for nothing."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all modules of the library use `CLOCK`, also in forked workers."""
    for name, module in list(sys.modules.items()):
        if name.startswith("energon_lite.") and hasattr(module, "perf_counter"):
            monkeypatch.setattr(module, "perf_counter", CLOCK)


class SlowEncoding(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if sample.__restore_key__[0] == "b/train":
            CLOCK.pass_by(0.005)
        return sample


class SlowDecoder(SampleDecoder):
    """Takes long for texts."""

    def decoder_of(self, part: str) -> Any:
        def decode(raw: bytes) -> str:
            CLOCK.pass_by(0.005)
            return raw.decode()

        return decode


class SlowDecoding(DefaultTaskEncoder):
    decoder = SlowDecoder()


@pytest.mark.parametrize(
    ("encoder", "field"), [(SlowEncoding, "encode_sec"), (SlowDecoding, "read_sec")]
)
def test_slow_work_for_a_source_is_named(tmp_path, clock, encoder, field) -> None:
    text_set(tmp_path / "b", 8)
    run = Ranks(blend_of(tmp_path, "path: b", encoder), 1)
    run.steps(12)
    (stats,) = run.loaders[0].stats().values()
    spent = 0.005 * stats.draws
    assert spent >= 0.025
    assert getattr(stats, field) == pytest.approx(spent)
    assert stats.encode_sec + stats.read_sec == pytest.approx(spent)
    assert stats.wait_sec == pytest.approx(spent)


# ---------------------------------------------------------------------------------- several ranks


def run_rank(rank: int, path: Path) -> dict[str, Any]:
    config = WorkerConfig.default_worker_config(0)
    config.num_streams = 4
    loader = get_savable_loader(get_train_dataset(path, batch_size=3, worker_config=config))
    keys = [batch.__restore_key__ for batch in islice(loader, 6 + 2 * rank)]
    stats = loader.stats().reduced()
    one = dist.new_group([1])
    own = loader.stats().reduced(one) if rank == 1 else loader.stats()
    assert own.scalars() == loader.stats().scalars()
    return {"keys": keys, "stats": stats.scalars("")}


@pytest.mark.processes
def test_reduced_stats_are_those_of_all_ranks_on_each(sets, tmp_path) -> None:
    path = sets / "ranks.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        "    blend: [{path: a}, {path: b}]\n"
    )
    ranks = in_ranks(run_rank, 2, tmp_path / "ranks", path)
    counts = Counter(key[0] for rank in ranks for batch in rank["keys"] for key in batch[2:])
    assert sum(counts.values()) == (6 + 8) * 3
    for rank in ranks:
        for name, number in counts.items():
            assert rank["stats"][f"{name}/samples"] == number
            assert rank["stats"][f"{name}/actual_share"] == pytest.approx(number / 42)


def test_workers_that_would_have_sufficed_follow_from_steps_and_work(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch takes 3 s of work, 1 s of which the loop waits; a step takes 2 s."""
    now = [100.0]
    monkeypatch.setattr(counting, "perf_counter", lambda: now[0])
    counter = counting.Counter(get_train_dataset(texts, batch_size=2, worker_config=ONE), [])
    assert counter.stats(0).workers_needed is None
    for _ in range(101):
        now[0] += 1
        counter.add([("train", 2, 1.0, 2.0, 0, 0, 2, 2, 2)], [], 1.0)
        now[0] += 2
    found = counter.stats(101)
    assert found.waited_sec == 101
    assert found.workers_needed == pytest.approx(303 / 200)
