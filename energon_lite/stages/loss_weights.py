"""The loss weights of a batch, beside the user's fields."""

from __future__ import annotations

import dataclasses
import logging
from collections import UserDict
from typing import Any, TypeVar

import torch

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.keys import leaves
from energon_lite.core.samples import Batch, Sample, field_of
from energon_lite.core.stacking import IGNORE_INDEX
from energon_lite.core.stage import PerItemStage, StageCursor
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import Stream
from energon_lite.loss.causal_lm import WeightedLabels
from energon_lite.stages.model_inputs import ModelInputs
from energon_lite.stages.packed_sample import LOSS_MASKS

T = TypeVar("T")

# Batches without a loss until a run warns.
NUM_WITHOUT_LOSS = 100
logger = logging.getLogger(__name__)


def set_loss_weight(item: Any, weight: Any) -> bool:
    """Writes a loss weight on a sample or batch without one.

    Returns:
        Whether the item has a loss weight then; one with slots, or a frozen one, has no place.
    """
    if isinstance(item, (dict, UserDict)):
        item.setdefault("loss_weight", weight)
    elif not isinstance(item, Sample) and not hasattr(item, "loss_weight"):
        try:
            item.loss_weight = weight
        except (AttributeError, TypeError):
            return False
    return True


def warn_of_unused_weights(item: Any) -> None:
    """Warns if an item of a run with loss weights other than 1 does not carry them."""
    is_carried = isinstance(item, torch.Tensor) or hasattr(item, "loss_weight")
    if isinstance(item, dict):
        is_labels = isinstance(item.get("labels"), WeightedLabels)
        names = {"loss_weight", "loss_weights", "__loss_weight__"}
        is_carried = is_labels or not names.isdisjoint(item)
    if not is_carried:
        logger.warning(
            "Sources have loss weights other than 1, and batches (%s) do not carry them. Set "
            'add_loss_weights = True on the task encoder for an entry "loss_weight" in dicts; or '
            "False, to train without weights, or where your own fields have them.",
            type(item).__name__,
        )


class LossWatch:
    """Warns once if no token has a loss in the first batches of a run."""

    num_batches, is_on = 0, True

    def __call__(self, item: Any) -> None:
        """Looks at a batch, up to the first one with a loss."""
        labels = field_of(item, "labels")
        names = ("loss_weight", *LOSS_MASKS)
        values = [field_of(item, name) for name in names]
        if isinstance(labels, WeightedLabels):
            values.append(labels["loss_weights"])
        elif isinstance(labels, torch.Tensor):
            values.append(labels.ne(IGNORE_INDEX))
        weights = [value for value in values if isinstance(value, torch.Tensor)]
        self.num_batches += 1
        if not weights or all(weight.any() for weight in weights):
            self.is_on = False
        elif self.num_batches == NUM_WITHOUT_LOSS:
            self.is_on = False
            logger.warning(
                "No token has a loss in the first %d batches: their loss weights or labels count "
                "nothing. Look at labels and loss_mask (a chat template without generation marks "
                "returns masks of 0), and at the loss_weight of the sources.",
                NUM_WITHOUT_LOSS,
            )


class LossWeightDataset(PerItemStage[T]):
    """Returns each item a `loss_weight`: a float32 tensor, (n,) for a batch of n samples.

    Samples and batches of our own types have it already, by their `__loss_weight__`; a batch that
    was made without gets that. Any other object gets an attribute; a dict keeps its keys, and gets
    an entry with `add_loss_weights=True` only. An own field of that name is left alone, and so is
    what can carry none, such as a tuple, and the arguments of a model. What a generator makes of a
    batch has the weights of all of it.

    State: none.
    Length: as below.
    Keys: as below.
    """

    def __init__(self, dataset: SavableDataset[T], add_loss_weights: bool | None = None) -> None:
        super().__init__(dataset)
        self.add_loss_weights = add_loss_weights
        self.is_nested = False
        self._set_weights()

    def _set_weights(self) -> None:
        self.weights = {facts.name: facts.loss_weight for facts in self.dataset.sources()}
        self.is_weighted = any(weight != 1 for weight in self.weights.values())

    def with_children(self, children: Any) -> Any:
        """Returns this stage over another dataset."""
        other = super().with_children(children)
        other._set_weights()
        return other

    def nested(self) -> SavableDataset[Any]:
        """Returns this dataset as a part of another one: its batches have weights in any case."""
        other: LossWeightDataset[T] = self.with_children((super().nested().children[0],))
        other.is_nested = True
        return other

    def own_traits(self, below: Traits) -> Traits:
        """Adds that items have their loss weights."""
        unused = self.is_weighted and self.add_loss_weights is None
        return dataclasses.replace(super().own_traits(below), weighted=True, unasked_weights=unused)

    def open(self, inner: Cursor[T], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return LossWeightCursor(self, inner)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the item with its loss weights."""
        item: T = self.dataset.restore_sample(restore_key)
        self.weigh(item, restore_key)
        return item

    def weigh(self, item: Any, key: RestoreKey) -> None:
        """Writes the loss weights on an item that has a place for them."""
        if isinstance(item, Batch):
            if (self.is_weighted or self.is_nested) and item.__loss_weight__ is None:
                item.__loss_weight__ = self._of_batch(item, key)
        elif isinstance(item, dict):
            if self.add_loss_weights and not isinstance(item, ModelInputs):
                set_loss_weight(item, self.loss_weight(key))
        elif isinstance(item, (Sample, torch.Tensor)):
            return  # samples have theirs from their sources, tensors no place
        elif self.is_weighted or hasattr(item, "__dict__"):
            set_loss_weight(item, self.loss_weight(key))

    def _of_batch(self, batch: Batch, key: RestoreKey) -> list[float] | None:
        """Returns an entry per sample; None if the batch has not the samples of its key."""
        weights: list[float] = self.loss_weight(key, torch.float64).reshape(-1).tolist()
        return weights if len(weights) == len(batch.__key__) else None

    def loss_weight(self, key: RestoreKey, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the loss weights of the samples in a restore key, (n,); () of a single sample."""
        found = [self.weights.get(leaf[0], 1.0) for leaf in leaves(key) if leaf]
        is_single = len(found) == 1 and not _is_batch(key)
        return torch.tensor(found[0] if is_single else found, dtype=dtype)


def _is_batch(key: RestoreKey) -> bool:
    """Returns whether a restore key is a batch's, or that of what a hook made of one."""
    while key and isinstance(key[-1], tuple):
        if key[0] == "batch":
            return True
        key = key[-1]
    return False


class LossWeightCursor(StageCursor[T]):
    """Writes loss weights on the items of another cursor."""

    def __next__(self) -> T:
        """Returns the next item, with its loss weights."""
        item: T = next(self.inner)
        self.spec.weigh(item, self.inner.key)
        return item
