"""Validation passes that lose too many samples: an error, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)

from ..helpers import Ranks, ignore, number_of

NUM_TEXTS = 60


class Failing(DefaultTaskEncoder):
    """Fails on the samples whose numbers are `bad`."""

    def __init__(self, bad: Callable[[int], bool], error: type[Exception] = ValueError) -> None:
        super().__init__()
        self.bad = bad
        self.error = error

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if self.bad(number_of(sample)):
            raise self.error("broken")
        return sample


def validation(texts: Path, encoder: Any, config: WorkerConfig, **arguments: Any) -> Any:
    arguments = {"batch_size": 2, "split_part": "train", **arguments}
    return get_val_dataset(texts, worker_config=config, task_encoder=encoder, **arguments)


def first(number: int) -> Callable[[int], bool]:
    return lambda sample: sample < number


def run_of(texts: Path, encoder: Any, world_size: int = 1, **loader: Any) -> Ranks:
    make = partial(validation, texts, encoder)
    return Ranks(make, world_size, **{"max_skip_rate": 0.01, **loader})


# 60 samples: 0.01 * 60 + 0.05 * 60 = 3.6 may fail.
@pytest.mark.parametrize("num_streams", [1, 7, 30])
@pytest.mark.parametrize(("bad", "is_allowed"), [(1, True), (3, True), (4, False), (30, False)])
def test_validation_set_loses_a_few_samples_or_fails(texts, bad, is_allowed, num_streams) -> None:
    run = run_of(texts, Failing(first(bad)), num_streams=num_streams)
    if is_allowed:
        assert sum(len(batch.__key__) for batch in run.rest().values()) == 60 - bad
        return
    with pytest.raises(FatalSampleError, match=r"Of 60 samples of this validation pass \d+ failed"):
        run.rest()
    with pytest.raises(FatalSampleError, match=r"encode_sample: .*broken"):
        list(run.loaders[0])  # a new pass is judged again


def test_what_is_skipped_on_purpose_or_allowed_is_no_failure(texts) -> None:
    half = first(30)
    assert len(run_of(texts, Failing(half, SkipSample)).rest()) == 15
    assert len(run_of(texts, Failing(half), max_skip_rate=1).rest()) == 15
    assert len(run_of(texts, Failing(half), max_skip_rate=0.5).rest()) == 15
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
    dataset = get_train_dataset(
        texts, worker_config=config, task_encoder=Failing(half), batch_size=2, repeat=False,
        shuffle_buffer_size=9,
    )  # fmt: skip
    assert len(list(get_savable_loader(dataset))) == 15


@pytest.mark.parametrize("after", [1, 2, 3])
def test_failures_are_counted_over_a_resume(texts, after) -> None:
    encoder = Failing(lambda number: number in (1, 2, 3, 59))
    run = run_of(texts, encoder, 2, num_streams=6)
    run.steps(5)
    states = run.save()
    assert sum(state["failed"] for state in states) == 3
    resumed = run_of(texts, encoder, after, states=states)
    if after == 1:
        with pytest.raises(FatalSampleError, match="60 samples of this validation pass 4 failed"):
            resumed.rest()
    else:
        # Each rank knows its own part, and has no group to ask; the sum is that of the pass.
        resumed.rest()
        states = resumed.save()
        assert [sum(state[name] for state in states) for name in ("failed", "drawn")] == [4, 60]


def test_limit_is_judged_by_the_samples_of_the_pass(texts) -> None:
    make = partial(validation, texts, Failing(first(2)), limit=4)
    with pytest.raises(FatalSampleError, match="Of 10 samples of this validation pass 2 failed"):
        Ranks(make, 1, max_skip_rate=0.01).rest()


def test_a_handler_of_the_users_decides_unless_there_is_a_rate(texts) -> None:
    half = Failing(first(30))
    for is_own, rate, is_stopped in ((True, None, False), (True, 0.01, True), (False, None, True)):
        handler = {"global_error_handler": ignore} if is_own else {}
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, **handler)
        loader = get_savable_loader(
            get_val_dataset(
                texts, split_part="train", worker_config=config, task_encoder=half, batch_size=2
            ),
            max_skip_rate=rate,
        )
        with pytest.raises(FatalSampleError) if is_stopped else nullcontext():
            assert len(list(loader)) == 15
