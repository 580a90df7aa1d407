from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from energon_lite import (
    FatalSampleError,
    IterMapDataset,
    MapDataset,
    SkipSample,
    WorkerConfig,
    get_loader,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.topology import Stream

from ..helpers import ignore, in_file_order, number_of

NUM_TEXTS = 20


def numbers(samples: Iterator[Any]) -> Iterator[int]:
    return map(number_of, samples)


def expanding(samples: Iterator[Any]) -> Iterator[str]:
    for sample in samples:
        number = number_of(sample)
        for part in range(number % 4):
            yield f"{number}.{part}"


def running_sum(samples: Iterator[Any]) -> Iterator[int]:
    yield from itertools.accumulate(map(number_of, samples))


def begun(dataset: Any, number: int) -> Any:
    """A run of one stream that has returned some items."""
    run = StreamRun(dataset, Stream(0, 1))
    for _ in range(number):
        next(run)
    return run


def test_running_again_is_said_once_with_the_number_of_items(texts, caplog) -> None:
    dataset = IterMapDataset(in_file_order(texts), running_sum)
    run = begun(dataset, 5)
    with caplog.at_level(logging.INFO, logger="energon_lite.extras.energon.iter_map"):
        StreamRun(dataset, Stream(0, 1)).restore(run.snapshot())
    (record,) = caplog.records
    assert "running_sum (test_iter_map.py:" in record.message
    assert "over the 5 items" in record.message


def test_input_that_fails_after_its_items_counts_once(texts) -> None:
    def failing_late(samples: Iterator[Any]) -> Iterator[int]:
        for sample in samples:
            yield number_of(sample)
            if number_of(sample) % 6 == 5:
                raise SkipSample

    loader = get_loader(IterMapDataset(in_file_order(texts), failing_late))
    assert list(loader) == [*range(NUM_TEXTS)]
    stats = loader.stats()["texts/train"]
    assert (stats.samples, stats.epochs, stats.skipped) == (NUM_TEXTS, 1, 3)


def test_whole_pass_cannot_be_replayed_by_key(texts) -> None:
    dataset = IterMapDataset(in_file_order(texts), numbers)
    run = begun(dataset, 1)
    assert run.key == ("iter_map", 0, ("texts/train", 0, 0, 0))
    assert not dataset.can_restore_sample()
    with pytest.raises(ValueError, match="give stateless_iter_fn=True if"):
        dataset.restore_sample(run.key)


def test_stateless_function_is_run_again_on_one_input(texts) -> None:
    dataset = IterMapDataset(in_file_order(texts), expanding, stateless_iter_fn=True)
    assert dataset.can_restore_sample()
    assert dataset.restore_sample(("iter_map", 1, ("texts/train", 0, 6, 6))) == "6.1"
    with pytest.raises(ValueError, match="makes no item 2"):
        dataset.restore_sample(("iter_map", 2, ("texts/train", 0, 6, 6)))
    below = MapDataset(in_file_order(texts), lambda sample: sample)
    assert not IterMapDataset(below, numbers, stateless_iter_fn=True).can_restore_sample()


def test_length_is_what_its_function_returns(texts) -> None:
    dataset = IterMapDataset(in_file_order(texts), expanding, len_map_fn=lambda length: 3 * length)
    assert len(dataset) == 60
    assert dataset.num_items(Stream(0, 3)) == 21
    assert len(IterMapDataset(in_file_order(texts), numbers)) == 20


@pytest.mark.parametrize("is_stateless", [True, False])
def test_one_item_starts_the_count_of_failures_again(texts, is_stateless) -> None:
    @stateless(failure_tolerance=2)
    def odd(samples: Iterator[Any]) -> Iterator[int]:
        for sample in samples:
            if number_of(sample) % 2:
                raise ValueError("odd")
            yield number_of(sample)

    quiet = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
    dataset = IterMapDataset(
        in_file_order(texts), odd, stateless_iter_fn=is_stateless, worker_config=quiet
    )
    assert list(StreamRun(dataset, Stream(0, 1), max_skip_rate=1)) == [*range(0, 20, 2)]


def test_errors_before_it_reads_and_from_below_end_the_run(texts) -> None:
    def broken(samples: Iterator[Any]) -> Iterator[Any]:
        raise ValueError("no model")

    def from_below(sample: Any) -> Any:
        raise FatalSampleError("from below")

    with pytest.raises(FatalSampleError, match=r"failed before it read anything: .*no model"):
        list(IterMapDataset(in_file_order(texts), broken))
    with pytest.raises(FatalSampleError, match=r"^map: FatalSampleError: from below; stage map"):
        list(IterMapDataset(MapDataset(in_file_order(texts), from_below), numbers))


def test_function_that_yields_less_than_before_is_refused(texts) -> None:
    run = begun(IterMapDataset(in_file_order(texts), numbers), 9)
    shorter = IterMapDataset(in_file_order(texts), lambda samples: itertools.islice(samples, 4))
    with pytest.raises(StateError, match="returned 9 items before, and 4 now"):
        StreamRun(shorter, Stream(0, 1)).restore(run.snapshot())


def test_seeded_function_over_a_whole_pass_is_refused(texts) -> None:
    @stateless(restore_seeds=True)
    def seeded(samples: Iterator[Any]) -> Iterator[Any]:
        yield from samples

    IterMapDataset(in_file_order(texts), seeded, stateless_iter_fn=True)
    with pytest.raises(ValueError, match=r"Use sample_rng\(\) instead"):
        IterMapDataset(in_file_order(texts), seeded)


def test_settings_are_in_the_config_and_a_state_stays_short(texts) -> None:
    dataset = IterMapDataset(in_file_order(texts), numbers, iter_map_fn_config={"a": [1]})
    config = dataset.config()
    assert (config["stage"], config["stateless_iter_fn"]) == ("iter_map", False)
    assert config["iter_map_fn_config"] == {"a": [1]}
    run = StreamRun(dataset, Stream(0, 1))
    assert max(len(json.dumps(run.snapshot().to_json())) for _ in run) < 200
