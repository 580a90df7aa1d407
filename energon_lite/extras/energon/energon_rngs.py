"""Generators with Energon's names: of a worker, and torch, numpy and random together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import WorkerConfig

T = TypeVar("T")


class WorkerRng:
    """Energon's generator of a worker: a torch generator with the seed of `worker_config`.

    `sample_rng()` is for hooks: what it draws is the same after a resume.
    """

    def __init__(self, worker_config: WorkerConfig) -> None:
        self.worker_config = worker_config

    @cached_property
    def rng(self) -> torch.Generator:
        """The generator; it is seeded on first use."""
        return torch.Generator().manual_seed(self.worker_config.worker_seed())

    def randbelow(self, n: int) -> int:
        """Draws an integer in 0..n-1."""
        return int(torch.randint(0, n, (), generator=self.rng))

    def choice_idx(self, probs: torch.Tensor) -> int:
        """Draws a position by weights, shape (N,)."""
        if len(probs) == 1:
            return 0
        sums = torch.cumsum(torch.as_tensor(probs, dtype=torch.float32), dim=0)
        drawn = torch.rand(1, generator=self.rng) * sums[-1]
        return min(int(torch.searchsorted(sums, drawn, right=True)), len(probs) - 1)

    def choice(self, l: Sequence[T], probs: torch.Tensor | None = None) -> T:  # noqa: E741
        """Draws an entry, by weights if there are any."""
        return l[self.randbelow(len(l)) if probs is None else self.choice_idx(probs)]

    def rand_pop(self, l: list[T]) -> T:  # noqa: E741
        """Takes a random entry out of a list."""
        return l.pop(self.randbelow(len(l)))

    def shuffle(self, l: Sequence[T]) -> list[T]:  # noqa: E741
        """Returns the entries in a random order."""
        return [l[place] for place in torch.randperm(len(l), generator=self.rng)]

    def save_state(self) -> dict[str, bytes]:
        """Returns where the generator is."""
        return {"rng": bytes(self.rng.get_state().tolist())}

    def restore_state(self, state: dict[str, bytes]) -> None:
        """Puts the generator where it was."""
        self.rng.set_state(torch.tensor(list(state["rng"]), dtype=torch.uint8))


class SystemRngState(NamedTuple):
    """The states of the three generators."""

    torch: Any
    numpy: Any
    random: Any


class SystemRng:
    """Seeds, saves and restores the three generators."""

    @staticmethod
    def get_seed_from_args(*args: Any) -> int:
        """Returns a seed in 0..2^32-1 made of integers and texts; not Energon's number."""
        return key_of("SystemRng", *args) & (2**32 - 1)

    @staticmethod
    def seed(seed: int) -> None:
        """Seeds all three with one number."""
        torch.default_generator.manual_seed(seed & (2**63 - 1))
        np.random.seed(seed & (2**32 - 1))
        random.seed(seed)

    @staticmethod
    def seed_args(*args: Any) -> None:
        """Seeds all three by `get_seed_from_args`."""
        SystemRng.seed(SystemRng.get_seed_from_args(*args))

    @staticmethod
    def save_state() -> SystemRngState:
        """Returns the states of all three."""
        return SystemRngState(torch.get_rng_state(), np.random.get_state(), random.getstate())

    @staticmethod
    def restore_state(state: SystemRngState) -> None:
        """Puts all three where they were."""
        torch.set_rng_state(state.torch)
        np.random.set_state(state.numpy)
        random.setstate(state.random)
