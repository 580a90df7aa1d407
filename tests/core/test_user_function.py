from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from energon_lite import DefaultTaskEncoder, WorkerConfig, stateless
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import FunctionRun, UserFunction

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
