"""The order of a user's sampler, and the sharding of batches by accelerate.

`Accelerator.prepare(loader)` puts a `BatchSamplerShard` around the batch sampler: of N processes,
process r keeps every N-th batch, from batch r on. A sampler that yields the batches of one rank
only would lose all but 1/N of them. A batch sampler is not informed of this, but the objects on
the call stack show it.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from energon_lite.core.arrays import Int64Array

_log = logging.getLogger(__name__)


class EpochSampler(Sampler[int]):
    """The `sampler` of a batch sampler, whose `set_epoch` is the batch sampler's.

    accelerate, and with it the Trainer of transformers, sets the epoch of a batch sampler by
    `batch_sampler.sampler.set_epoch(epoch)` only.
    """

    def __init__(self, order: Iterable[int], set_epoch: Callable[[int], None]) -> None:
        self.order = order
        self.set_epoch = set_epoch

    def __iter__(self) -> Iterator[int]:
        """Yields the indices of the user's sampler."""
        return iter(self.order)

    def __len__(self) -> int:
        """Returns the length of the user's sampler."""
        return len(self.order)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the user's sampler."""
        if name.startswith("__") or name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)


def epoch_of(sampler: object) -> int | None:
    """Returns the epoch of a sampler that has `set_epoch`; None for any other."""
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def is_unseeded(sampler: object) -> bool:
    """Whether a sampler draws its order from torch's global generator."""
    # SeedableRandomSampler, which accelerate puts in place of a RandomSampler, has a seed.
    return getattr(sampler, "generator", sampler) is None and not hasattr(sampler, "initial_seed")


def check_sampler(sampler: object, *, has_own_order: bool = False) -> None:
    """Refuses a sampler that differs between ranks; any sampler where the order is `seed`'s.

    Raises:
        TypeError: names the sampler and the remedy.
    """
    if (num_replicas := getattr(sampler, "num_replicas", 1) or 1) > 1:
        raise TypeError(
            f"sampler, a {type(sampler).__name__}, yields other samples on each of {num_replicas} "
            "ranks, which would make different numbers of batches of them. Omit it: ranks get "
            "parts of one plan. If Lightning puts it there, use "
            "Trainer(use_distributed_sampler=False)."
        )
    if has_own_order and sampler is not None:
        raise TypeError(
            f"sampler is a {type(sampler).__name__}, but this batch sampler orders samples itself, "
            "by seed and epoch. Omit it."
        )


def check_seeded(sampler: object, world_size: int) -> None:
    """Refuses an unseeded sampler, where each of several processes would draw another order.

    Raises:
        ValueError: names the sampler and the remedy.
    """
    if world_size > 1 and sampler is not None:
        raise ValueError(
            f"Each of {world_size} processes would draw another order from sampler, a "
            f"{type(sampler).__name__} without generator, and samples would be lost. Omit sampler, "
            "and MultipackBatchSampler shuffles by seed and epoch; or pass the sampler "
            "generator=torch.Generator().manual_seed(seed), the same on each."
        )


def warn_of_copies(world_size: int) -> None:
    """Warns if several processes would train on the same batches."""
    if world_size > 1:
        _log.warning(
            "With sampler= and without rank and world_size, each of %d processes gets all "
            "batches. Pass the loader to Accelerator.prepare(), which shards them, or pass rank "
            "and world_size.", world_size,
        )  # fmt: skip


def order_of(sampler: Iterable[int], num_samples: int) -> Int64Array:
    """Iterates a sampler once, and leaves it in its epoch.

    Raises:
        TypeError: It yields something else than integers.
        ValueError: It yields nothing, or an index that is not in 0..num_samples-1.
    """
    epoch = epoch_of(sampler)
    order = np.fromiter(map(operator.index, sampler), np.int64)
    if epoch_of(sampler) != epoch:
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # accelerate's increments itself
    if not len(order):
        raise ValueError("sampler yields no index; one that can be iterated but once is exhausted.")
    is_bad = (order < 0) | (order >= num_samples)
    if is_bad.any():
        raise ValueError(
            f"sampler yields index {order[is_bad.argmax()]}, but there are {num_samples:,} lengths"
        )
    return order


class Shard(NamedTuple):
    """The way in which accelerate shards the batches that a sampler yields.

    Attributes:
        rank: index of this process.
        world_size: processes that take batches in turn.
        splits: whether each batch is cut into parts instead, one for each process.
    """

    rank: int
    world_size: int
    splits: bool


def find_shard() -> Shard | None:
    """Returns how accelerate shards the batches of this call; None if accelerate did not call.

    The nearest frame of accelerate decides: its object shards the batches of this very call.
    """
    frame: FrameType | None = sys._getframe(1) if "accelerate.data_loader" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            caller: Any = frame.f_locals.get("self")
            if type(caller).__name__ == "BatchSamplerShard":
                return Shard(caller.process_index, caller.num_processes, caller.split_batches)
            if type(caller).__name__ == "DataLoaderDispatcher":
                state = caller.state
                return Shard(state.process_index, state.num_processes, caller.split_batches)
        frame = frame.f_back
    return None


def needs_fixed_size() -> bool:
    """Whether the caller's caller is a `BatchSamplerShard` that takes whole batches.

    With a batch size, accelerate expects that all batches but the last of all have it, and
    `gather_for_metrics` that each has as many samples of the dataset: packs would be lost.
    """
    frame = sys._getframe(2)
    return (
        frame.f_globals.get("__name__") == "accelerate.data_loader"
        and type(frame.f_locals.get("self")).__name__ == "BatchSamplerShard"
        and not frame.f_locals.get("split_batches", False)
        and frame.f_code.co_name == "__init__"
    )
