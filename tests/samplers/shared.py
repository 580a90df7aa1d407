"""What the tests of all samplers share. At module level, so that worker processes can import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

Steps = list[list[list[int]]]


def text_lengths(num: int, capacity: int = 4096) -> Any:
    """Lengths as of instruction texts."""
    drawn = np.random.Generator(np.random.Philox(5)).lognormal(np.log(400), 1.0, num)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


def steps_of(samplers: Any) -> Steps:
    """What the ranks give, as [step][rank][place]; asserts that `len()` was right on all."""
    lengths = {len(sampler) for sampler in samplers}
    batches = [list(sampler) for sampler in samplers]
    assert {len(rows) for rows in batches} == lengths
    assert len(lengths) == 1
    return [list(step) for step in zip(*batches, strict=True)]


def distributed(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """Lets torch.distributed say which rank this is."""
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


def check_loader(sampler: Any, num: int, num_workers: int, *, resumes: bool = True) -> None:
    """Asserts that a DataLoader gives each epoch as the sampler does, and goes on in its middle."""
    squares = Squares(num)
    loader: Any = DataLoader(
        squares, batch_sampler=sampler, num_workers=num_workers, collate_fn=list
    )  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        num_batches, batches = len(loader), list(loader)
        assert len(batches) == num_batches > 5
        assert batches == [[squares[i] for i in batch] for batch in sampler]
    for position, _ in enumerate(loader):
        if position == 2:
            state = sampler.state_dict(batches_given=position + 1)
            break
    sampler.load_state_dict(state)
    if resumes:
        assert list(loader) == batches[3:]
