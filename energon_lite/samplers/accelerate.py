"""Detects that accelerate shards the batches of a sampler, as in the Trainer of transformers.

`Accelerator.prepare(loader)` puts a `BatchSamplerShard` around the batch sampler: of N processes,
process r keeps every N-th batch, from batch r on. A sampler that yields the batches of one rank
only would lose all but 1/N of them. A batch sampler is not informed of this, but the objects on
the call stack show it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple


class Shard(NamedTuple):
    """What accelerate does with the batches that a sampler yields.

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
