"""The loss weights of a batch, beside the user's fields."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from energon_lite.core.activity import leaves
from energon_lite.core.dataset import Cursor, SavableDataset, WrapperDataset
from energon_lite.core.samples import Batch, Sample
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream

T = TypeVar("T")


class LossWeightDataset(WrapperDataset[T]):
    """Gives each item a `loss_weight`: a float32 tensor, (n,) for a batch of n samples.

    Samples and batches of our own types have it already, by their `__loss_weight__`. Any other
    object gets it as an attribute, a dict as an entry, where a source has a loss weight other than
    1; an own field of that name is left alone, and so is what can carry none, such as a tuple.

    State: none of its own.
    Length: as below.
    Keys: as below.
    """

    def __init__(self, dataset: SavableDataset[T]) -> None:
        super().__init__(dataset)
        self._set_weights()

    def _set_weights(self) -> None:
        self.weights = {facts.name: facts.loss_weight for facts in self.dataset.sources()}
        self.is_weighted = any(weight != 1 for weight in self.weights.values())

    def with_children(self, children: Any) -> Any:
        """Gives this stage over another dataset."""
        other = super().with_children(children)
        other._set_weights()
        return other

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives a fresh cursor."""
        return _LossWeightCursor(self, self.dataset.cursor(stream))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again, with its loss weights."""
        item: T = self.dataset.restore_sample(restore_key)
        self.weigh(item, restore_key)
        return item

    def weigh(self, item: Any, key: RestoreKey) -> None:
        """Writes the loss weights on an item that has a place for them."""
        if isinstance(item, (Sample, Batch)) or not (self.is_weighted or hasattr(item, "__dict__")):
            return
        if isinstance(item, dict):
            if self.is_weighted and "loss_weight" not in item:
                item["loss_weight"] = self.loss_weight(key)
        elif not isinstance(item, torch.Tensor) and not hasattr(item, "loss_weight"):
            try:
                item.loss_weight = self.loss_weight(key)
            except (AttributeError, TypeError):
                return  # it has slots, or is frozen: no place

    def loss_weight(self, key: RestoreKey) -> torch.Tensor:
        """Gives the loss weights of the samples in a restore key, (n,); () of a single sample."""
        found = [self.weights.get(leaf[0], 1.0) for leaf in leaves(key) if leaf]
        is_batch = key[0] == "batch"
        return torch.tensor(found if is_batch or len(found) != 1 else found[0])

    def config(self) -> dict[str, JSON]:
        """As below: the weights are settings of the sources."""
        return self.dataset.config()


class _LossWeightCursor(Cursor[T]):
    def __init__(self, spec: LossWeightDataset[T], inner: Cursor[T]) -> None:
        self._spec = spec
        self._inner = inner

    def __next__(self) -> T:
        item = next(self._inner)
        self.key = self._inner.key
        self._spec.weigh(item, self.key)
        return item

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._inner.restore(snapshot)
