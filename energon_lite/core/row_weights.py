"""What the rows of a batch count: `loss_weight` and `valid` of samples and batches."""

from __future__ import annotations

from typing import Any

import torch

# First entry of the restore key of a batch that only fills a step of its rank.
PADDING = "padding"


def _flat(value: Any) -> Any:
    """Takes lists out of a list: batches that were mixed into one have a list for each."""
    if not isinstance(value, list) or not any(isinstance(entry, list) for entry in value):
        return value
    entries = (entry if isinstance(entry, list) else [entry] for entry in value)
    return _flat([inner for entry in entries for inner in entry])


class RowWeightsMixin:
    """Samples and batches have a `loss_weight` and `valid`, unless they have such a field."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """Returns `loss_weight`, float32, or `valid`, bool: (n,) for a batch, () for a sample."""
        # No property: a subclass with a field of this name would take it for the field's default.
        if name == "loss_weight":
            weights = getattr(self, "__loss_weight__", None)
            if weights is None:
                keys = self.__key__
                weights = [1.0] * len(keys) if isinstance(keys, list) else 1.0
            return torch.tensor(_flat(weights), dtype=torch.float32)
        if name == "valid":
            shape = (len(self.__key__),) if isinstance(self.__key__, list) else ()
            return torch.full(shape, self.__restore_key__[:1] != (PADDING,))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
