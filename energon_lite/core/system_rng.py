"""The global generators of torch (CPU), numpy and random together, under Energon's names."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_lite.core.seeds import key_of


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
