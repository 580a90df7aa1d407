"""Who else deals batches to ranks: accelerate, which the Trainer of transformers uses.

`Accelerator.prepare(loader)` puts a `BatchSamplerShard` around the batch sampler: of N processes,
process r keeps each N-th batch, from batch r on. A sampler that yields the batches of one rank only
would lose all but 1/N of them. Nothing tells a batch sampler that this has been done, but it shows
in who asks for batches.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple


class Dealer(NamedTuple):
    """What accelerate will do with the batches that a sampler yields.

    Attributes:
        rank: index of this process.
        world_size: processes that batches are dealt to, in turn.
        splits: whether each batch is cut into parts instead, one for each process.
    """

    rank: int
    world_size: int
    splits: bool


def find_dealer() -> Dealer | None:
    """Returns accelerate's dealer if the call comes from one; None if nobody deals again.

    The nearest caller decides: an object of accelerate that deals the batches of this very call.
    """
    frame: FrameType | None = sys._getframe(1) if "accelerate.data_loader" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            asking: Any = frame.f_locals.get("self")
            kind = type(asking).__name__
            if kind == "BatchSamplerShard":
                return Dealer(asking.process_index, asking.num_processes, asking.split_batches)
            if kind == "DataLoaderDispatcher":
                state = asking.state
                return Dealer(state.process_index, state.num_processes, asking.split_batches)
        frame = frame.f_back
    return None


def is_asked_for_size() -> bool:
    """Whether the caller's caller is accelerate, which takes whole batches as they are.

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
