"""The weighted loss of a causal language model, as the Trainer of transformers calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from energon_lite.core.stacking import IGNORE_INDEX
from energon_lite.loss.means import weighted_mean


class WeightedLabels(dict[str, Tensor]):
    """The labels of a batch and the weights of their losses: `weighted_causal_lm_loss` takes them.

    The Trainer takes `labels` out of a batch and counts those that are not -100, over all
    micro-batches and ranks of a step: here it adds up the weights. They are moved and pinned
    as any dict. A model that is called with them as `labels` raises an error.

    Entries: `labels` (B, L), not shifted, and `loss_weights`, (B, L) or one per row, (B,).

    Example:
        >>> labels = torch.tensor([[-100, 5, 7], [-100, 2, -100]])
        >>> weighted = WeightedLabels(labels=labels, loss_weights=torch.tensor([1.0, 0.5]))
        >>> weighted[..., 1:].ne(-100).sum()
        tensor(2.5000)
    """

    def __getitem__(self, key: Any) -> Any:
        """Returns an entry; of an index or slice, the labels there with their weights."""
        if isinstance(key, str):
            return super().__getitem__(key)
        weights = self.ne(IGNORE_INDEX)
        return WeightedLabels(labels=self["labels"][key], loss_weights=weights[key])

    def ne(self, label: int) -> Tensor:
        """Returns the weight of each label, (B, L) float32; 0 for labels that equal `label`."""
        labels, weights = self["labels"], self["loss_weights"].to(torch.float32)
        weights = weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim))
        return torch.where(labels != label, weights, 0.0)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Refuses functions of torch, which would not know the weights.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{getattr(function, '__name__', function)} was called with labels that carry loss "
            "weights, which a model's own loss does not know. Compute the loss by energon_lite."
            "loss.weighted_causal_lm_loss: Trainer(compute_loss_func=weighted_causal_lm_loss), or "
            "call the model without labels. Or set add_loss_weights = False on the task encoder"
        )


def weighted_causal_lm_loss(
    outputs: Any,
    labels: Tensor | Mapping[str, Tensor],
    num_items_in_batch: Tensor | float | None = None,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns the mean loss of the next tokens, weighted by sample and token.

    It is the `compute_loss_func` of a Trainer of transformers, which calls it with the
    `num_items_in_batch` of a whole step. In a plain loop, `num_items_in_batch` is the result of
    `step_denominator`, from the totals `weight_total(batch.loss_weights, batch.labels.shape)`.

    Args:
        outputs: logits (B, L, V), or the outputs of a model, with `logits`.
        labels: (B, L), not shifted: position t predicts label t + 1. -100 is ignored. Or
            `WeightedLabels`, which have weights.
        num_items_in_batch: divides the weighted sum: the total weight of all micro-batches of all
            ranks, divided by the number of ranks where gradients are averaged. By default the
            total weight of this batch, which is then the whole step.
        weights: (B, L) or (B,), at least 0; by default those of the labels, or 1.

    Returns:
        Shape (); 0 where the total weight is 0.

    Raises:
        TypeError: There are no labels.
        ValueError: Shapes do not fit, or a weight is negative, infinite or NaN.
    """
    if isinstance(labels, WeightedLabels):
        weights = labels["loss_weights"] if weights is None else weights
        labels = labels["labels"]
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels={labels!r:.80} are no tensor; the batch needs an entry `labels`")
    if not isinstance(outputs, Tensor):
        outputs = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    logits, targets = outputs[:, :-1], labels[:, 1:].to(outputs.device)
    if logits.shape[:-1] != targets.shape:
        shapes = f"labels of shape {tuple(labels.shape)} do not fit logits of shape "
        raise ValueError(f"{shapes}{tuple(outputs.shape)}; make them (B, L) and (B, L, V)")
    if weights is None:
        weights = torch.ones(len(labels))
    if weights.ndim > 1:
        weights = weights[:, 1:]
    counts = targets != IGNORE_INDEX
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).view(targets.shape)
    return weighted_mean(losses, weights, mask=counts, denominator=num_items_in_batch)
