"""Refuses loaders that torch, or a trainer, makes of a dataset of ours."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

from energon_lite.storage.files import warn_once

# The modules of loaders and trainers that iterate a dataset as it is.
_TRAINERS = ("torch.", "lightning.", "pytorch_lightning.", "accelerate.")

_OWN_LOADER = (
    "Use energon_lite.get_savable_loader(dataset), which is a torch DataLoader, too, and has the "
    "workers of WorkerConfig(num_workers=...). A Trainer of transformers gets it from a method: "
    "`class OwnTrainer(Trainer):` with `def get_train_dataloader(self): return "
    "get_savable_loader(self.train_dataset)` (docs/trainers.md)."
)


def refuse_loader(num_copies: int) -> NoReturn:
    """Refuses a torch `DataLoader` over a dataset that it cannot be right for.

    Args:
        num_copies: worker processes that each iterate the whole dataset; 0 where the loader has a
            batch size, and the items of the dataset are batches or packs.

    Raises:
        RuntimeError: Always.
    """
    why = "make batches of the batches, or packs, that the dataset returns"
    if num_copies:
        why = f"return the whole dataset in each of its {num_copies} worker processes"
    raise RuntimeError(f"This torch DataLoader, or that of a trainer, would {why}. {_OWN_LOADER}")


def check_caller(dataset: Any, frame: FrameType) -> bool:
    """Refuses or warns of torch loaders and trainers that iterate a dataset of ours themselves.

    Args:
        dataset: the dataset.
        frame: of what iterates it.

    Returns:
        Whether what iterates it makes batches of its items.

    Raises:
        RuntimeError: Several worker processes iterate it.
    """
    worker = get_worker_info()
    if worker is not None and worker.dataset is dataset and worker.num_workers > 1:
        refuse_loader(worker.num_workers)
    accelerator = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    is_of_trainer = str(frame.f_globals.get("__name__")).startswith(_TRAINERS)
    if is_of_trainer or getattr(accelerator, "_shared_state", None):
        warn_once(
            "A trainer, or a torch DataLoader, iterates the dataset itself: each rank reads all "
            f"samples, without workers, and no checkpoint has the position. {_OWN_LOADER}"
        )
    # In a DataLoader with a batch_size, the object that makes its batches iterates.
    return bool(getattr(frame.f_locals.get("self"), "auto_collation", False))
