"""The order in which a sampler of the user's gives samples, and who tells it the epoch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from energon_lite.core.arrays import Int64Array


class EpochSampler(Sampler[int]):
    """The `sampler` of a batch sampler: passes `set_epoch` on to the batch sampler.

    accelerate, and with it the Trainer of transformers, sets the epoch of a batch sampler by
    `batch_sampler.sampler.set_epoch(epoch)` only.
    """

    def __init__(self, order: Iterable[int], set_epoch: Callable[[int], None]) -> None:
        self.order = order
        self.set_epoch = set_epoch

    def __iter__(self) -> Iterator[int]:
        """Yields what the order of the user's has."""
        return iter(self.order)

    def __len__(self) -> int:
        """Returns the length of the order of the user's."""
        return len(self.order)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the order of the user's."""
        if name.startswith("__") or name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)


def own_epoch(sampler: object) -> int | None:
    """Returns the epoch that a sampler is in; None for one that nobody can set an epoch of."""
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def is_unseeded(sampler: object) -> bool:
    """Whether a sampler draws its order from torch's global generator."""
    # SeedableRandomSampler, which accelerate puts in the place of a RandomSampler, has a seed.
    return getattr(sampler, "generator", sampler) is None and not hasattr(sampler, "initial_seed")


def check_replicas(sampler: object) -> None:
    """Refuses a sampler that gives each rank samples of its own, with a `TypeError`."""
    if (num_replicas := getattr(sampler, "num_replicas", 1) or 1) > 1:
        raise TypeError(
            f"sampler, a {type(sampler).__name__}, gives each of {num_replicas} ranks samples of "
            "its own, of which they would make different numbers of batches. Leave it out: ranks "
            "get parts of one plan. If Lightning puts it there, use "
            "Trainer(use_distributed_sampler=False)."
        )


def refuse_sampler(sampler: object) -> None:
    """Refuses any sampler, with a `TypeError`, where a batch sampler has an order of its own."""
    check_replicas(sampler)
    if sampler is not None:
        raise TypeError(
            f"sampler is a {type(sampler).__name__}, but this batch sampler has an order of its "
            "own, by seed and epoch. Leave it out."
        )


def unseeded_error(sampler: object, world_size: int) -> ValueError:
    """Returns the error for an order that each rank would draw by itself."""
    return ValueError(
        f"Each of {world_size} processes would draw an order of its own from sampler, a "
        f"{type(sampler).__name__} without generator, and samples would be lost. Leave sampler "
        "out, and MultipackBatchSampler shuffles by seed and epoch; or give the sampler "
        "generator=torch.Generator().manual_seed(seed), the same on each."
    )


def order_of(sampler: Iterable[int], num_samples: int) -> Int64Array:
    """Iterates a sampler.

    Raises:
        TypeError: It gives something else than integers.
        ValueError: It gives nothing, or an index that is not in 0..num_samples-1.
    """
    epoch = own_epoch(sampler)
    order = np.fromiter(map(operator.index, sampler), np.int64)
    if own_epoch(sampler) != epoch:
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # accelerate's counts on by itself
    if not len(order):
        raise ValueError("sampler gives no index; one that can be iterated but once is used up.")
    is_bad = (order < 0) | (order >= num_samples)
    if is_bad.any():
        raise ValueError(
            f"sampler gives index {order[is_bad.argmax()]}, but lengths has {num_samples:,} entries"
        )
    return order
