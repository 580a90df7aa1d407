"""Packs as the arguments of a Hugging Face model."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from energon_lite.core.edataclass import PinMemoryMixin
from energon_lite.core.stacking import IGNORE_INDEX, batch_stack
from energon_lite.loss.causal_lm import WeightedLabels
from energon_lite.stages.packed_sample import PackedBatch, counted_positions, sample_bounds

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
        ValueError: The batch has loss weights that are not 0 or 1, and nothing asks for them; or
            images, positions or tensors that do not fit a model.
    """
    weights = batch.loss_weights
    is_applied = add_loss_weights is not None or "loss_weights" in keep
    if not is_applied and not ((weights == 0) | (weights == 1)).all():
        raise ValueError(f"Tokens have loss weights besides 0 and 1, {NOT_APPLIED}")
    labels: Any = batch.labels.masked_fill(weights == 0, IGNORE_INDEX)
    if add_loss_weights:
        labels = WeightedLabels(labels=labels, loss_weights=weights)
    # With a cache, models of transformers do not look where a sample starts.
    inputs = ModelInputs(input_ids=batch.input_ids, labels=labels, use_cache=False)
    inputs["position_ids"] = _position_ids(batch, attention, keep)
    if attention == "mask":
        inputs["attention_mask"] = _mask(batch.segment_ids)
    else:
        inputs.update(_boundaries(batch))
    inputs.update(_of_processors(batch, keep))
    inputs.update({name: getattr(batch, name) for name in keep})
    return inputs


def _boundaries(batch: PackedBatch) -> dict[str, Any]:
    """Returns where samples start in all rows, one after the other, for flash-attention.

    Without it, flash-attention would look at `position_ids` where there is one row only. The
    padding at the end of a row counts as a sample.
    """
    bounds = sample_bounds(batch)
    cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
    found = {"cu_seq_lens": cu_seqlens, "max_length": int(np.diff(bounds).max())}
    return {f"{name}_{side}": value for name, value in found.items() for side in "qk"}


def _position_ids(batch: PackedBatch, attention: Attention, keep: tuple[str, ...]) -> torch.Tensor:
    """Returns positions (B, L); of samples with 3 rows (4, B, L), of which the first has these."""
    own, counted = batch.position_ids, counted_positions(batch)
    if own.ndim == 3:
        return torch.cat([counted[None], own])
    grids = {"image_grid_thw", "video_grid_thw"} & vars(batch).keys()
    if grids and "position_ids" not in keep:
        raise ValueError(
            f"Samples have {min(grids)}, and position_ids of one row. Such models count positions "
            "in three: give each sample `position_ids` (3, t), as of model.get_rope_index"
        )
    if attention == "position_ids" and not torch.equal(own, counted):
        raise ValueError(
            "Samples have position_ids other than 0, 1, 2, ..., so a model cannot see where they "
            'start. Use PackedCollator(packing, attention="mask") in `batch`'
        )
    return own


def _of_processors(batch: PackedBatch, keep: tuple[str, ...]) -> dict[str, Any]:
    """Returns what processors make besides tokens: fields with tensors, and `pixel_values`.

    Texts and numbers of samples are no inputs of a model.
    """
    found = {n: value for n, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    for name, column in vars(batch).items():
        kinds = set(map(type, column)) if name not in found else set()
        if kinds & {torch.Tensor, np.ndarray, list} and name not in keep:
            raise ValueError(
                f"Field {name!r} has no entry per token, nor is it known how a model takes it for "
                "several samples. Leave it away in encode_sample, or make the inputs in `batch`, "
                f"by PackedCollator(packing, keep=({name!r},))"
            )
    if batch.images and "images" not in keep:
        has_patches = "image_grid_thw" in found
        images: list[Any] = batch.images
        shapes = {str(getattr(image, "shape", type(image).__name__)) for image in images}
        is_one = has_patches or len(shapes) == 1
        if not is_one or not isinstance(images[0], torch.Tensor):
            raise ValueError(
                f"Images are not pixel_values of one shape, but {', '.join(sorted(shapes)[:3])}. "
                "Resize them to tensors of one shape"
            )
        found["pixel_values"] = (torch.cat if has_patches else batch_stack)(images)
    return found


def _mask(segment_ids_BL: torch.Tensor) -> torch.Tensor:
    """Returns what is added to attention scores: 0 within a sample and back, else the least."""
    is_seen = (segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]).tril()
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
    return mask[:, None]
