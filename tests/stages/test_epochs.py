"""Limits and virtual epochs inside other datasets: what each stream gives of each pass."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    LimitDataset,
    MapDataset,
    RepeatDataset,
    SavableDataset,
    WorkerConfig,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.epochs import StretchDataset

from ..helpers import Ranks, assert_same, ignore, number_of, text_set

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)
QUIET = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
THREE = WorkerConfig(rank=1, world_size=3, num_workers=0)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("flow") / "texts", 11)


def source(root: Path, name: str = "a", *, repeat: bool = False, config: Any = ONE) -> Any:
    return load_factory(root, training=True, worker_config=config, name=name).build(repeat=repeat)


def draws(dataset: SavableDataset[Any], num_streams: int, number: int = 0) -> list[list[Any]]:
    """(source, epoch, index) of what each stream gives in a pass."""
    found = []
    for index in range(num_streams):
        run = StreamRun(dataset, Stream(index, num_streams, number))
        found.append([run.key[:3] for _ in islice(run, 500)])
    return found


def together(streams: list[list[Any]]) -> list[Any]:
    return [draw for stream in streams for draw in stream]


@pytest.mark.parametrize("num_streams", range(1, 10))
@pytest.mark.parametrize("total", [1, 2, 4, 11])
@pytest.mark.parametrize("repeat", [False, True])
def test_nested_limit_gives_its_items_once_over_all_streams_in_each_pass(
    root, num_streams, total, repeat
) -> None:
    dataset = ConcatDataset(LimitDataset(source(root, repeat=repeat), total))
    passes = [draws(dataset, num_streams, number) for number in range(5)]
    for number, streams in enumerate(passes):
        items = together(streams)
        assert len(set(items)) == len(items)
        sizes = [len(stream) for stream in streams]
        assert sizes == [
            dataset.num_items(Stream(i, num_streams, number)) for i in range(num_streams)
        ]
        if repeat:
            assert sum(sizes) == total
            assert max(sizes) - min(sizes) <= 1
        else:
            assert sum(sizes) <= total
    everything = [draw for streams in passes for draw in together(streams)]
    assert len(set(everything)) == len(everything) > 0


@pytest.mark.parametrize("num_streams", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_streams_take_turns_in_what_a_limit_leaves_over(root, num_streams, total) -> None:
    stretch = StretchDataset(source(root, repeat=True), total, goes_on=True)
    for index in range(num_streams):
        parts = [stretch.length(Stream(index, num_streams, p)) for p in range(num_streams)]
        assert sum(parts) == total
        # What a pass skips is what the passes before it gave.
        for number in range(num_streams):
            assert stretch.first(Stream(index, num_streams, number)) == sum(parts[:number])


def test_limit_of_one_item_among_many_streams_repeats_for_ever(root) -> None:
    dataset = BlendDataset(
        (LimitDataset(source(root), 1), 1), (source(root, "b"), 1), until="forever"
    )
    for index in range(5):
        keys = [StreamRun(dataset, Stream(index, 5))]
        names = [run.key[0] for run in keys for _ in islice(run, 40)]
        assert abs(names.count("a") - 20) <= 5


@pytest.mark.parametrize("kind", [EpochizeDataset, LimitDataset])
def test_nested_length_counts_each_rank_of_its_worker_config(root, kind) -> None:
    limit = kind(source(root, repeat=True, config=THREE), 2)
    dataset = BlendDataset((limit, 1), (source(root, "b", config=THREE), 1))
    names = [draw[0] for draw in together(draws(dataset, 3))]
    assert names.count("a") == 2 * 3
    assert names.count("b") == 11


def test_nested_epochs_of_endless_data_go_on_in_each_pass(root) -> None:
    dataset = ConcatDataset(EpochizeDataset(source(root, repeat=True), 4), source(root, "b"))
    passes = [together(draws(dataset, 1, number)) for number in range(4)]
    epochs = [draw for items in passes for draw in items if draw[0] == "a"]
    plain = together(draws(source(root, repeat=True), 1))
    assert epochs == plain[:16]
    assert [len(items) for items in passes] == [15] * 4


def test_nested_epochs_of_finite_data_go_on_in_each_pass(root) -> None:
    dataset = ConcatDataset(EpochizeDataset(source(root), 4))
    found = [draw for number in range(6) for draw in together(draws(dataset, 1, number))]
    assert len(found) == len(set(found)) == 24
    assert {index for _, epoch, index in found if epoch == 0} == set(range(11))


def test_limit_longer_than_the_data_is_no_limit(root) -> None:
    limited = draws(ConcatDataset(LimitDataset(source(root), 99)), 3)
    plain = draws(source(root), 3)
    assert limited == plain


def test_pass_in_which_a_stream_has_no_part_of_a_limit_ends_there_at_once(root) -> None:
    dataset = ConcatDataset(LimitDataset(source(root, repeat=True), 2))
    sizes = [len(stream) for stream in draws(dataset, 8)]
    assert sorted(sizes) == [0] * 6 + [1] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_limits_in_blends_give_the_same_slots_on_any_ranks(root, world_size) -> None:
    def make(config: WorkerConfig) -> SavableDataset[Any]:
        limit = LimitDataset(source(root, repeat=True), 5, worker_config=ONE)
        dataset = BlendDataset((limit, 2), (source(root, "b"), 1), worker_config=config)
        return BatchDataset(dataset, 2, _keys, worker_config=config)

    one, other = Ranks(make, 1, num_streams=4), Ranks(make, world_size, num_streams=4)
    for _ in range(3):
        expected = one.rest()
        assert_same(other.rest(), expected)
        for run in (one, other):
            run.iterators = [iter(loader) for loader in run.loaders]


def _keys(samples: list[Any]) -> dict[str, Any]:
    return {"keys": [sample.__restore_key__ for sample in samples]}


def test_repeated_epochs_begin_a_round_without_losing_their_place(root) -> None:
    dataset = RepeatDataset(EpochizeDataset(source(root, repeat=True), 3))
    run = StreamRun(dataset, Stream(0, 1))
    found = [run.key[:3] for _ in islice(run, 30)]
    assert found == together(draws(source(root, repeat=True), 1))[:30]


@pytest.mark.parametrize("length", [0, -1])
def test_length_below_one_is_refused(root, length) -> None:
    with pytest.raises(ValueError, match=f"length={length} must be at least 1"):
        LimitDataset(source(root), length)


def test_two_ends_of_a_pass_are_refused(root) -> None:
    with pytest.raises(ValueError, match="ended below already"):
        EpochizeDataset(LimitDataset(source(root), 3), 2)


@stateless
def odd(sample: Any) -> Any:
    if number_of(sample) % 2 == 0:
        raise ValueError("even")
    return sample


def test_what_earlier_passes_gave_counts_in_these_alone(root) -> None:
    """The stretch of a later pass begins behind those of earlier passes, which count theirs."""
    below = MapDataset(source(root, repeat=True, config=QUIET), odd)
    whole, dataset = (
        StreamRun(below, Stream(0, 1)),
        BatchDataset(EpochizeDataset(below, 4), 4, list),
    )
    for number in range(4):
        run = StreamRun(dataset, Stream(0, 1, number))
        next(run)
        for _ in range(4):
            next(whole)
        one, other = run.context, whole.context
        assert one.fill <= len(one.records)
        assert one.take_records() == other.take_records()
        assert [row[:2] for row in one.take_costs()] == [row[:2] for row in other.take_costs()]
