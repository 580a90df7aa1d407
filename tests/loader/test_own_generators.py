"""Generators of random numbers that hooks keep are named, wherever they are."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.storage import files

WORKER = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Holder:
    def __init__(self, value: Any) -> None:
        self.held = value


class Attribute(DefaultTaskEncoder):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.kept = value

    def encode_sample(self, sample: Any) -> Any:
        return sample


class Marked(Attribute):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample


class OfClass(DefaultTaskEncoder):
    kept = np.random.default_rng(0)

    def encode_sample(self, sample: Any) -> Any:
        return sample


def in_closure(generator: Any) -> Any:
    class Closure(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            generator.random()
            return sample

    return Closure()


def in_partial(generator: Any) -> Any:
    return Attribute(partial(max, generator))


def warnings_of(texts: Any, encoder: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    files.warn_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            dataset = get_train_dataset(
                texts, batch_size=2, worker_config=WORKER, task_encoder=encoder
            )
            next(iter(get_savable_loader(dataset)))
    return [record.getMessage() for record in caplog.records if "rank draws" in record.getMessage()]


@pytest.mark.parametrize(
    ("encoder", "name"),
    [
        (Attribute(np.random.default_rng(0)), "Attribute"),
        (Attribute(np.random.RandomState(0)), "Attribute"),
        (Attribute(random.Random(0)), "Attribute"),
        (Attribute(torch.Generator()), "Attribute"),
        (Marked(random.Random(0)), "Marked"),
        (Attribute([1, {"flip": Holder(random.Random(0))}]), "Holder"),
        (Attribute(Holder(Holder(torch.Generator()))), "Holder"),
        (in_closure(np.random.default_rng(0)), "in_closure.<locals>.Closure.encode_sample"),
        (OfClass(), "OfClass"),
        (in_partial(random.Random(0)), "partial"),
    ],
)
def test_generators_that_hooks_keep_are_named_once(texts, encoder, name, caplog) -> None:
    (message,) = warnings_of(texts, encoder, caplog)
    assert message.startswith(f"{name} keeps a ")
    assert "sample_rng()" in message


def test_what_is_no_copied_generator_is_left_alone(texts, caplog) -> None:
    ring = Holder(None)
    ring.held = [ring, np.random, random, np.random.Generator, np.random.mtrand._rand]
    many = {number: str(number) for number in range(100_000)}
    for value in (ring, many, random.SystemRandom(), torch.default_generator):
        assert warnings_of(texts, Attribute(value), caplog) == []
