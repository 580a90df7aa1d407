"""The mean loss of each source of a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from energon_lite.core.keys import leaves
from energon_lite.core.samples import field_of
from energon_lite.core.stacking import IGNORE_INDEX


class SourceLosses(dict[str, float]):
    """The mean loss of each source, by its name.

    Attributes:
        weights: by source, the sum of the weights of its losses, above 0.
    """

    def __init__(self, totals: Iterable[tuple[str, float, float]] = ()) -> None:
        """Adds up weighted sums of losses, and the sums of their weights, by source."""
        sums, weights = defaultdict[str, float](float), defaultdict[str, float](float)
        for name, total, weight in totals:
            sums[name] += total
            weights[name] += weight
        self.weights = {name: weight for name, weight in weights.items() if weight}
        super().__init__((name, sums[name] / weight) for name, weight in self.weights.items())


def loss_by_source(
    losses: Tensor,
    batch: Any,
    *,
    weights: Tensor | None = None,
    reduce: bool = False,
    group: dist.ProcessGroup | None = None,
) -> SourceLosses:
    """Returns the mean loss of each source in a batch; it waits for the device of the losses.

    Args:
        losses: by token, (B, L) or flat; or without the first token of each row, (B, L - 1), as of
            `labels[:, 1:]`; or by sample, (n,). As from a loss function with `reduction="none"`.
        batch: a batch or packs of the loader; or a dict with `__restore_key__` and, of packs,
            `segment_ids` and `loss_weights`.
        weights: of the losses, in their shape or (n,); by default the loss weights of the batch,
            and 0 where a label is -100.
        reduce: whether ranks add up their losses; then each rank must call it.
        group: these ranks; all by default.

    Returns:
        The means, without sources whose weights are all 0.

    Raises:
        ValueError: The batch does not name its sources, or shapes do not fit.
    """
    names = [leaf[0] for leaf in leaves(field_of(batch, "__restore_key__") or ()) if leaf]
    if not names:
        raise ValueError(
            f"a {type(batch).__name__} without __restore_key__ does not name its sources. Pass the "
            "batch as it came from the loader; for packs as a dict, PackedCollator(packing, "
            'keep=("__restore_key__", "segment_ids", "loss_weights"))'
        )
    found = [*zip(names, *_totals(losses, batch, len(names), weights).tolist(), strict=True)]
    ranks: list[Any] = [found]
    if reduce and dist.is_available() and dist.is_initialized():
        ranks = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, found, group)
    return SourceLosses(chain.from_iterable(ranks))


def _totals(losses: Tensor, batch: Any, num: int, weights: Tensor | None) -> Tensor:
    """Returns the weighted losses of each sample, and their weights, added up; shape (2, n)."""
    segments = field_of(batch, "segment_ids")
    if segments is None or losses.shape == (num,):
        segments, places = None, torch.arange(1, num + 1, device=losses.device)[:, None]
    else:
        segments = segments.to(losses.device).reshape(-1, segments.shape[-1])
        counts = segments.amax(dim=1, keepdim=True)
        places = torch.where(segments > 0, segments + counts.cumsum(0) - counts, 0)  # 0 for padding
    num_rows, length = len(places), losses.numel() // len(places)
    is_whole = segments is None or 0 <= places.shape[1] - length <= 1
    if not is_whole or num_rows * length != losses.numel():
        raise ValueError(
            f"losses of shape {tuple(losses.shape)} are neither of the {num} samples nor of "
            f'the tokens in {num_rows} rows; compute them with reduction="none"'
        )
    rows = losses.detach().reshape(num_rows, length).double()
    factors = _own_weights(batch, rows, segments) if weights is None else weights
    factors = factors.to(rows).reshape(num_rows, -1).expand_as(rows)
    both = torch.stack([torch.where(factors != 0, rows, 0.0) * factors, factors], dim=2)
    flat = places[:, -length:].expand_as(rows).flatten()
    # `bincount` is not deterministic on a GPU, and a sum over all tokens would spread a NaN.
    return rows.new_zeros(num + 1, 2).index_add_(0, flat, both.reshape(-1, 2))[1:].T


def _own_weights(batch: Any, rows: Tensor, segments: Tensor | None) -> Tensor:
    """Returns the weights of losses by their batch: one for each row, or for each loss."""
    if segments is not None:
        of_tokens: Tensor = field_of(batch, "loss_weights")
        return of_tokens.reshape(segments.shape)[:, -rows.shape[1] :]
    weights, labels = (field_of(batch, name) for name in ("loss_weight", "labels"))
    weights = torch.ones(len(rows)) if weights is None else weights
    if (
        isinstance(labels, Tensor)
        and labels.ndim == 2
        and 0 <= labels.shape[1] - rows.shape[1] <= 1
    ):
        labels = labels[:, -rows.shape[1] :]
        weights = weights[:, None].to(labels.device) * (labels != IGNORE_INDEX)
    return weights
