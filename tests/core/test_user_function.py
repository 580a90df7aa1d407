from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import DefaultTaskEncoder, SkipSample, TextSample, WorkerConfig, stateless
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction

from ..helpers import ignore

KEY = ("source", 0, 3, 3)


def test_stateless_is_used_bare_and_with_arguments() -> None:
    @stateless
    def bare() -> None: ...

    @stateless(restore_seeds=True, failure_tolerance=4)
    def full() -> None: ...

    def plain() -> None: ...

    found = [UserFunction(function, name="f") for function in (bare, full, plain)]
    assert [f.is_stateless for f in found] == [True, True, False]
    assert [f.restore_seeds for f in found] == [False, True, False]
    assert [f.failure_tolerance for f in found] == [100, 4, 100]


class PlayedConfig:
    """Stands for the config of a worker, in a unit test of an encoder."""

    active_worker_sample_index = 0

    def worker_seed(self) -> int:
        return 42


def test_a_seeded_function_that_is_called_directly_is_seeded_by_the_active_config(monkeypatch):
    class Encoder(DefaultTaskEncoder):
        @stateless(restore_seeds=True)
        def pack(self, samples: list[int], *, more: int = 0) -> tuple[list[int], float, float]:
            order = samples.copy()
            random.shuffle(order)
            return order, float(torch.rand(1)), float(np.random.rand()) + more

    encoder, samples = Encoder(), list(range(50))
    assert Encoder.pack.__name__ == "pack"
    assert encoder.pack(samples) != encoder.pack(samples)  # no config: as it stands
    monkeypatch.setattr(WorkerConfig, "active_worker_config", PlayedConfig())
    before = random.getstate()
    found = encoder.pack(samples, more=0)
    assert found == encoder.pack(samples)
    assert random.getstate() == before
    PlayedConfig.active_worker_sample_index = 1
    assert found != encoder.pack(samples)
    PlayedConfig.active_worker_sample_index = 0
    # In a pipeline the sample counts, whatever the config.
    run, context = run_of(encoder.pack, seed=5)
    with context_of(context):
        first, same, other = (run.call(key, samples) for key in (KEY, KEY, ("source", 0, 4, 4)))
    assert first == same != other
    assert first != found


def run_of(function: Any, **settings: Any) -> tuple[FunctionRun, StreamContext]:
    spec = UserFunction(function, name="hook", **settings)
    spec.on_error = ignore
    return FunctionRun(spec), StreamContext(Stream(0, 1))


def test_result_gets_the_restore_key_where_it_has_a_place_for_it() -> None:
    sample = TextSample(__key__="a", __restore_key__=(), text="x")
    for made in (sample, {"__restore_key__": None}):
        run, context = run_of(lambda value, made=made: made)
        with context_of(context):
            result = run.call(KEY, 1)
        found = result["__restore_key__"] if isinstance(result, dict) else result.__restore_key__
        assert found == KEY
    for plain in (5, "text", (1, 2), {"a": 1}):
        run, context = run_of(lambda value, plain=plain: plain)
        with context_of(context):
            assert run.call(KEY, 1) == plain


def test_skipped_samples_are_recorded_with_key_stage_and_error() -> None:
    def fail(value: Any) -> Any:
        raise SkipSample if value == 1 else ValueError("bad value")

    run, context = run_of(fail)
    sample = TextSample(__key__="name", __restore_key__=KEY, text="x")
    with context_of(context):
        assert run.call(KEY, 1) is SKIPPED
        assert run.call(KEY, sample) is SKIPPED
    skipped, failed = context.take_records()
    assert (skipped.on_purpose, failed.on_purpose) == (True, False)
    assert (failed.restore_key, failed.sample_key, failed.source) == (KEY, "name", "source")
    assert failed.stage == "hook"
    assert "ValueError: bad value; stage hook, " in failed.error
    assert "test_user_function.py" in failed.error


def test_generator_is_seeded_as_one_and_leaves_the_global_generator_alone() -> None:
    @stateless(restore_seeds=True)
    def draw(value: Any) -> Any:
        yield random.random()
        yield random.random()

    run, context = run_of(draw)
    with context_of(context):
        state = random.getstate()
        items = []
        for _, item in run.expand(KEY, 1):
            assert random.getstate() == state
            items.append(item)
            random.random()  # what comes between does not matter
            state = random.getstate()
        again = [item for _, item in run.expand(KEY, 1)]
    assert items == again
    assert len(set(items)) == 2


def test_sample_of_a_batch_of_failures_counts_all_its_samples() -> None:
    def fail(value: Any) -> Any:
        raise ValueError

    run, context = run_of(fail)
    with context_of(context):
        run.call(("batch", 0, KEY, ("source", 0, 4, 4)), [])
    (record,) = context.take_records()
    assert record.num_samples == 2
    assert context.fill == 2


@pytest.mark.parametrize("tolerance", [0, 3])
def test_handler_that_raises_ends_the_run_with_its_own_error(tolerance) -> None:
    def fail(value: Any) -> Any:
        raise ValueError("first")

    def handler(error: Exception, sample: Any, sources: Any) -> None:
        raise KeyError("own")

    run, context = run_of(fail, failure_tolerance=tolerance)
    run.spec.on_error = handler
    with context_of(context), pytest.raises(KeyError, match="own"):
        run.call(KEY, 1)
