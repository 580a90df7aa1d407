"""What the tests of all samplers share. At module level, so that worker processes can import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

Steps = list[list[list[int]]]


def text_lengths(num: int, capacity: int = 4096) -> Any:
    """Lengths as of instruction texts."""
    drawn = np.random.Generator(np.random.Philox(5)).lognormal(np.log(400), 1.0, num)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


class EpochOrder:
    """An order that each epoch draws again, the same on all ranks."""

    def __init__(self, num: int) -> None:
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.epoch).permutation(self.num).tolist())


def steps_of(samplers: Any) -> Steps:
    """What the ranks yield, as [step][rank]; asserts that `len()` was right on all."""
    lengths = [len(sampler) for sampler in samplers]
    batches = [list(sampler) for sampler in samplers]
    assert [len(rows) for rows in batches] == lengths == [lengths[0]] * len(lengths)
    return [list(step) for step in zip(*batches, strict=True)]


def distributed(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """Sets the rank that torch.distributed returns."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: world_size)


class Squares:
    """A map-style dataset: of an index its square, of a pack those of its samples."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: Any) -> Any:
        return [i * i for i in index] if isinstance(index, list) else index * index
