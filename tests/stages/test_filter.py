from __future__ import annotations

from typing import Any

import pytest

from energon_lite import (
    FilterDataset,
    MapDataset,
    WorkerConfig,
    sample_rng,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream

from ..helpers import ignore, in_file_order, number_of

NUM_TEXTS = 10


def is_odd(sample: Any) -> bool:
    return number_of(sample) % 2 == 1


def test_items_with_a_true_answer_are_kept_as_they_are(texts) -> None:
    found = list(FilterDataset(in_file_order(texts), filter_fn=is_odd))
    assert [number_of(sample) for sample in found] == [1, 3, 5, 7, 9]
    assert found[0].__restore_key__ == ("texts/train", 0, 1, 1)


@pytest.mark.parametrize("answer", [None, 0, "", False])
def test_none_and_all_that_is_false_is_no(texts, answer) -> None:
    assert list(FilterDataset(in_file_order(texts), filter_fn=lambda sample: answer)) == []


def test_filtered_items_count_as_skipped_on_purpose(texts) -> None:
    run = StreamRun(FilterDataset(in_file_order(texts), filter_fn=is_odd), Stream(0, 1))
    assert len(list(run)) == 5
    records = run.context.take_records()
    assert [record.sample_key for record in records] == [f"{i:05d}" for i in range(0, 10, 2)]
    assert {(record.on_purpose, record.stage) for record in records} == {(True, "filter")}


def test_replay_needs_only_that_what_is_below_can_be_recreated(texts) -> None:
    dataset = FilterDataset(in_file_order(texts), filter_fn=is_odd)
    assert dataset.can_restore_sample()
    assert number_of(dataset.restore_sample(("texts/train", 0, 3, 3))) == 3
    below = MapDataset(in_file_order(texts), lambda sample: sample)
    assert not FilterDataset(below, filter_fn=is_odd).can_restore_sample()


def test_random_filter_follows_the_seed_of_the_run(texts) -> None:
    def kept(seed: int) -> list[int]:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=seed)
        dataset = FilterDataset(
            in_file_order(texts), filter_fn=lambda sample: sample_rng().random() < 0.5,
            worker_config=config,
        )  # fmt: skip
        return [number_of(sample) for sample in dataset]

    assert kept(1) == kept(1)
    assert len({tuple(kept(seed)) for seed in range(6)}) > 3


def test_sample_at_which_the_filter_fails_is_a_failure(texts) -> None:
    def fails_at_four(sample: Any) -> bool:
        return 1 // (number_of(sample) - 4) is not None

    quiet = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
    dataset = FilterDataset(in_file_order(texts), filter_fn=fails_at_four, worker_config=quiet)
    run = StreamRun(dataset, Stream(0, 1), max_skip_rate=1)
    assert len(list(run)) == 9
    (record,) = run.context.take_records()
    assert (record.sample_key, record.on_purpose) == ("00004", False)
    assert "test_filter.py:" in record.error


def test_generator_as_filter_is_refused(texts) -> None:
    def generator(sample: Any) -> Any:
        yield True

    with pytest.raises(TypeError, match=r"generator \(test_filter.py:\d+\) is a generator"):
        FilterDataset(in_file_order(texts), filter_fn=generator)


def test_settings_are_part_of_the_config(texts) -> None:
    @stateless
    def keep(sample: Any) -> bool:
        return True

    dataset = FilterDataset(
        in_file_order(texts), filter_fn=keep, filter_fn_config=lambda: {"least": 3}
    )
    assert dataset.config()["stage"] == "filter"
    assert dataset.config()["filter_fn_config"] == {"least": 3}
    with pytest.raises(TypeError, match=r"config=\{3: 1\} is not a JSON-serialisable dict"):
        FilterDataset(in_file_order(texts), filter_fn=keep, filter_fn_config={3: 1})  # type: ignore[dict-item]
