"""Refuses loaders that torch, or a trainer, makes of a dataset of ours."""

from __future__ import annotations

from typing import NoReturn

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
