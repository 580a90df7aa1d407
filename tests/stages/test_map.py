from __future__ import annotations

import pickle
from typing import Any

import pytest

from energon_lite import FatalSampleError, MapDataset, WorkerConfig, stateless
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import config_differences
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction

from ..helpers import in_file_order

NUM_TEXTS = 10


@stateless
def key(sample: Any) -> str:
    return str(sample.__key__)


@stateless
def letters(sample: Any) -> Any:
    yield from sample.text.split()[0]


def test_function_is_called_on_each_item_in_order(texts) -> None:
    assert list(MapDataset(in_file_order(texts), key)) == [f"{i:05d}" for i in range(10)]


def test_generator_yields_any_number_of_items_with_keys_of_their_own(texts) -> None:
    dataset = MapDataset(in_file_order(texts), letters)
    run = StreamRun(dataset, Stream(0, 1))
    found = [(item, run.key) for item in run]
    assert [item for item, _ in found] == list("text") * 10
    assert found[5] == ("e", ("map", 1, ("texts/train", 0, 1, 1)))
    assert [dataset.restore_sample(restore_key) for _, restore_key in found] == list("text") * 10


@pytest.mark.parametrize(
    "restore_key", [("map", 9, ("texts/train", 0, 1, 1)), ("other", 0, ()), ()]
)
def test_item_that_a_generator_does_not_yield_is_refused(texts, restore_key) -> None:
    with pytest.raises(ValueError, match=r"makes no item 9|is not a restore key"):
        MapDataset(in_file_order(texts), letters).restore_sample(restore_key)


def test_replayability_needs_every_stage(texts) -> None:
    def unmarked(item: Any) -> Any:
        return item

    assert MapDataset(in_file_order(texts), key).can_restore_sample()
    below = MapDataset(in_file_order(texts), unmarked)
    assert not below.can_restore_sample()
    assert not MapDataset(below, key).can_restore_sample()


def test_function_reports_where_it_was_written(texts) -> None:
    function = UserFunction(key, name="key")
    assert function.where.startswith("key (test_map.py:")
    assert UserFunction(len, name="len").where == "len"
    assert pickle.loads(pickle.dumps(function)).where == function.where


def test_config_distinguishes_generators_and_seeded_functions(texts) -> None:
    config = MapDataset(in_file_order(texts), letters).config()
    assert (config["stage"], config["expands"], config["seeded"]) == ("map", True, False)
    assert config["of"]["name"] == "texts/train"


def plain(sample: Any) -> Any:
    return sample


def test_argument_decides_whether_it_is_stateless_before_the_mark(texts) -> None:
    assert not MapDataset(in_file_order(texts), plain).can_restore_sample()
    assert MapDataset(in_file_order(texts), plain, stateless_map_fn=True).can_restore_sample()
    assert MapDataset(in_file_order(texts), key).can_restore_sample()
    assert not MapDataset(in_file_order(texts), key, stateless_map_fn=False).can_restore_sample()


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
    assert "map_fn_config" not in MapDataset(in_file_order(texts), key).config()
    changed = MapDataset(in_file_order(texts), key, map_fn_config={**settings, "size": 4})
    assert config_differences(dataset.config(), changed.config()) == [
        "Checkpoint has map_fn_config.size=3 where this pipeline has 4"
    ]


@pytest.mark.parametrize(
    "settings", [{1: 2}, {"a": (1, 2)}, {"a": float("nan")}, [1], {"a": object()}]
)
def test_settings_that_are_not_plain_json_are_refused(texts, settings) -> None:
    with pytest.raises(TypeError, match=r"^map_fn_config=.* JSON-serialisable"):
        MapDataset(in_file_order(texts), key, map_fn_config=settings)


def test_user_function_has_its_settings_itself(texts) -> None:
    function = UserFunction(key, name="key")
    MapDataset(in_file_order(texts), function, map_fn_config={"a": 1})
    for settings in ({"failure_tolerance": 3}, {"stateless_map_fn": True}):
        with pytest.raises(TypeError, match=r"key \(test_map.py:\d+\) is a UserFunction"):
            MapDataset(in_file_order(texts), function, **settings)
