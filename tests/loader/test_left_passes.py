"""Trainers that know the number of batches leave the `for` of a pass with its last batch."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import text_set


class SomeAreSkipped(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) % 7 == 3:
            raise SkipSample
        return sample


def loader_of(folder: Path, looks_ahead: bool, num_streams: int = 12) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
    dataset = get_train_dataset(
        folder,
        batch_size=2,
        task_encoder=SomeAreSkipped(),
        shuffle_buffer_size=10,
        repeat=False,
        worker_config=config,
    )
    loader = get_savable_loader(dataset)
    loader._run.looks_ahead = looks_ahead  # as with Accelerate
    return loader


def keys_of(loader: Any, num: int | None = None) -> list[Any]:
    """Returns the keys of the next batches; without what Accelerate does around them."""
    return [batch.__key__ for batch in islice(loader._run.iterate(), num)]


@pytest.mark.parametrize("has_epochs", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_pass_that_was_left_with_its_last_batch_does_not_reach_into_the_next_one(
    looks_ahead: bool, has_epochs: bool, tmp_path: Path
) -> None:
    folder = text_set(tmp_path / "texts", 30)
    whole = loader_of(folder, False)
    passes = [keys_of(whole) for _ in range(3)]
    counted = sum(source.skipped for source in whole.stats().values())
    for num in range(1, len(passes[1])):
        loader = loader_of(folder, looks_ahead)
        assert keys_of(loader, len(passes[0])) == passes[0]
        if has_epochs:
            loader.set_epoch(1)
        assert keys_of(loader, num) == passes[1][:num]
        state = json.loads(json.dumps(loader.state_dict()))
        again = loader_of(folder, looks_ahead)
        again.load_state_dict(state)
        assert keys_of(again) == passes[1][num:]
        assert keys_of(again) == passes[2]
        assert sum(source.skipped for source in again.stats().values()) == counted
