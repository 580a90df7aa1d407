"""Packs as the arguments of a Hugging Face model."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from energon_lite.core.edataclass import PinMemoryMixin
from energon_lite.core.stacking import IGNORE_INDEX
from energon_lite.loss.causal_lm import WeightedLabels
from energon_lite.stages.packed_sample import PackedBatch

Attention = Literal["position_ids", "mask"]

NOT_APPLIED = (
    "of loss=, loss_mask or the sources, which a model's own loss does not know. Set "
    "add_loss_weights=True (on the task encoder, or of PackedCollator) for labels that carry them "
    "to the Trainer's compute_loss_func=energon_lite.loss.weighted_causal_lm_loss; or "
    "add_loss_weights=False to train without them"
)


class ModelInputs(PinMemoryMixin, dict[str, Any]):
    """A dict of the arguments of a model, with no other entries."""


def model_inputs(
    batch: PackedBatch,
    attention: Attention = "position_ids",
    keep: tuple[str, ...] = (),
    *,
    add_loss_weights: bool | None = None,
) -> ModelInputs:
    """Returns a batch of packs as the arguments of a model of transformers.

    Args:
        batch: B rows of L tokens, with labels that are not shifted.
        attention: as of `PackedCollator`.
        keep: as of `PackedCollator`.
        add_loss_weights: True makes the labels `WeightedLabels`; False ignores weights above 0.

    Raises:
        ValueError: The batch has images, or loss weights that are not 0 or 1, and nothing asks
            for them.
    """
    weights = batch.loss_weights
    is_applied = add_loss_weights is not None or "loss_weights" in keep
    if not is_applied and not ((weights == 0) | (weights == 1)).all():
        raise ValueError(f"Tokens have loss weights besides 0 and 1, {NOT_APPLIED}")
    if batch.images and "images" not in keep:
        raise ValueError(
            f"The batch has {len(batch.images)} images, which this model would not get. Use "
            'PackedCollator(packing, keep=("images", "image_segments")), in a task encoder as '
            "`def batch(self, packs)`, and hand them to the model."
        )
    labels: Any = batch.labels.masked_fill(weights == 0, IGNORE_INDEX)
    if add_loss_weights:
        labels = WeightedLabels(labels=labels, loss_weights=weights)
    # With a cache, models of transformers do not look where a sample starts.
    inputs = ModelInputs(
        input_ids=batch.input_ids, labels=labels, position_ids=batch.position_ids, use_cache=False
    )
    if attention == "mask":
        inputs["attention_mask"] = _mask(batch.segment_ids)
    else:
        inputs.update(_boundaries(batch))
    inputs.update({name: getattr(batch, name) for name in keep})
    return inputs


def _boundaries(batch: PackedBatch) -> dict[str, Any]:
    """Returns where samples start in all rows, one after the other, for flash-attention.

    Without it, flash-attention would look at `position_ids` where there is one row only. The
    padding at the end of a row counts as a sample.
    """
    num_rows, length = batch.input_ids.shape
    rows = torch.arange(num_rows) * length
    starts = (batch.cu_seqlens_padded + rows[:, None]).flatten()
    bounds = np.unique(np.append(starts.numpy(), num_rows * length))
    cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
    found = {"cu_seq_lens": cu_seqlens, "max_length": int(np.diff(bounds).max())}
    return {f"{name}_{side}": value for name, value in found.items() for side in "qk"}


def _mask(segment_ids_BL: torch.Tensor) -> torch.Tensor:
    """Returns what is added to attention scores: 0 within a sample and back, else the least."""
    is_seen = (segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]).tril()
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
    return mask[:, None]
