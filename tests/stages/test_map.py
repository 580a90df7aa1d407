"""`MapDataset` and `FilterDataset`: keys, seeds, skips and settings."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from energon_lite import (
    FatalSampleError,
    FilterDataset,
    MapDataset,
    WorkerConfig,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import config_differences
from energon_lite.core.topology import Stream

from ..helpers import in_file_order, number_of

NUM_TEXTS = 10


@stateless
def key(sample: Any) -> str:
    return str(sample.__key__)


@stateless
def letters(sample: Any) -> Any:
    yield from sample.text.split()[0]


def plain(sample: Any) -> Any:
    return sample


def is_odd(sample: Any) -> bool:
    return number_of(sample) % 2 == 1


def test_generator_yields_any_number_of_items_with_keys_of_their_own(texts) -> None:
    dataset = MapDataset(in_file_order(texts), letters)
    run = StreamRun(dataset, Stream(0, 1))
    found = [(item, run.key) for item in run]
    assert [item for item, _ in found] == list("text") * 10
    assert found[5] == ("e", ("map", 1, ("texts/train", 0, 1, 1)))
    assert [dataset.restore_sample(restore_key) for _, restore_key in found] == list("text") * 10


def test_replay_needs_functions_that_are_stateless_by_argument_or_by_mark(texts) -> None:
    source = in_file_order(texts)
    unmarked = MapDataset(source, plain)
    for dataset, can_restore in (
        (MapDataset(source, key), True),
        (unmarked, False),
        (MapDataset(unmarked, key), False),
        (MapDataset(source, plain, stateless_map_fn=True), True),
        (MapDataset(source, key, stateless_map_fn=False), False),
        (FilterDataset(source, filter_fn=is_odd), True),
        (FilterDataset(unmarked, filter_fn=is_odd), False),
    ):
        assert dataset.can_restore_sample() == can_restore


def test_seed_handlers_and_tolerance_come_from_the_arguments(texts) -> None:
    seen: list[Exception] = []
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, seed_offset=7,
        global_error_handler=lambda error, sample, sources: seen.append(error),
    )  # fmt: skip

    def fails(sample: Any) -> Any:
        raise ValueError("no")

    dataset = MapDataset(in_file_order(texts), fails, failure_tolerance=3, worker_config=config)
    assert (dataset.function.seed, dataset.worker_config) == (7, config)
    with pytest.raises(FatalSampleError, match="failed 3 times in a row"):
        list(dataset)
    assert len(seen) == 3


def test_settings_of_the_function_are_part_of_the_config(texts) -> None:
    settings = {"size": 3, "names": ["a", None]}
    for given in (settings, lambda: settings):
        dataset = MapDataset(in_file_order(texts), key, map_fn_config=given)
        assert dataset.config()["map_fn_config"] == settings
        pickle.dumps(dataset)
    changed = MapDataset(in_file_order(texts), key, map_fn_config={**settings, "size": 4})
    assert config_differences(dataset.config(), changed.config()) == [
        "Checkpoint has map_fn_config.size=3 where this pipeline has 4"
    ]
    bare = MapDataset(in_file_order(texts), letters).config()
    assert "map_fn_config" not in bare
    assert (bare["stage"], bare["expands"], bare["seeded"]) == ("map", True, False)
    filtered = FilterDataset(
        in_file_order(texts), filter_fn=plain, filter_fn_config=lambda: {"least": 3}
    )
    assert (filtered.config()["stage"], filtered.config()["filter_fn_config"]) == (
        "filter", {"least": 3},
    )  # fmt: skip


def test_items_with_a_true_answer_are_kept_and_the_others_skipped_on_purpose(texts) -> None:
    run = StreamRun(FilterDataset(in_file_order(texts), filter_fn=is_odd), Stream(0, 1))
    found = list(run)
    assert [sample.__restore_key__[2] for sample in found] == [1, 3, 5, 7, 9]
    records = run.context.take_records()
    assert [record.sample_key for record in records] == [f"{i:05d}" for i in range(0, 10, 2)]
    assert {(record.on_purpose, record.stage) for record in records} == {(True, "filter")}
    for answer in (None, 0, "", False):
        dataset = FilterDataset(in_file_order(texts), filter_fn=lambda _, answer=answer: answer)
        assert list(dataset) == []
