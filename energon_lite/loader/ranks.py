"""Whether the ranks of a run are in the same cycle at each step."""

from __future__ import annotations

import logging
from math import gcd
from typing import Any

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import StateError
from energon_lite.core.topology import RankSlots

logger = logging.getLogger(__name__)


def check_steps(
    dataset: SavableDataset[Any], slots: RankSlots, error: type[ValueError] = ValueError
) -> None:
    """Refuses a topology in which ranks are in different cycles at one step, where that matters.

    Args:
        dataset: the pipeline.
        slots: of this rank.
        error: what to raise; `StateError` on a restore.

    Raises:
        ValueError: The world size does not divide the number of streams.
        StateError: The run stands inside a step of this world size.
    """
    if not dataset.traits.lockstep:
        return
    num_streams, world_size = slots.num_streams, slots.world_size
    why = "but batches of one modality must be the same on all ranks at each step"
    if num_streams % world_size:
        raise error(
            f"world_size={world_size} does not divide num_streams={num_streams}, {why}. Start the "
            "run with WorkerConfig(num_streams=...) a multiple of every world size that it may "
            f"have; this one goes on with {_divisors(num_streams)} ranks"
        )
    if slots.base % world_size:
        raise StateError(
            f"The run has given {slots.base} batches, which are no whole steps of world_size="
            f"{world_size}, {why}. Give a state of which all ranks together have given a multiple "
            f"of {world_size} batches, or go on with {_divisors(gcd(slots.base, num_streams))} "
            "ranks"
        )


def warn_of_shared_streams(slots: RankSlots) -> None:
    """Logs what it costs if several ranks share a stream, and which world sizes cost nothing."""
    if slots.stride > 1:
        free = [d for d in range(1, slots.num_streams + 1) if slots.num_streams % d == 0]
        near = sorted(sorted(free, key=lambda d: abs(d - slots.world_size))[:2])
        logger.warning(
            "%d ranks share %d streams, so each batch is computed by %d ranks. World sizes %s "
            "would cost nothing extra; better, make num_streams a multiple of every world size "
            "that you may use.",
            slots.world_size,
            slots.num_streams,
            slots.stride,
            near,
        )


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
