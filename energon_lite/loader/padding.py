"""Padding: batches that take part in a step, but whose samples do not count.

A padding batch is a batch given before, of which no row is valid. Its mask `valid` is False and
its loss weights are 0, so a loss or a metric that is weighted or masked does not change by it.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch

from energon_lite.core.row_weights import PADDING
from energon_lite.core.samples import Batch, Sample

VALID = "valid"
_WEIGHTS = ("loss_weight", "loss_weights")


def mark_valid(item: Any) -> bool:
    """Writes the mask `valid`, all True, on a batch that has a place for it.

    Our samples and batches have it already. A dict gets an entry, another object an attribute: a
    bool tensor with an entry per row, `()` where no rows are seen. An own field of that name is
    left alone.

    Returns:
        Whether the batch carries the mask.
    """
    if isinstance(item, (Batch, Sample)):
        return not hasattr(type(item), VALID)
    fields = _fields(item)
    if fields is None or VALID in fields or hasattr(type(item), VALID):
        return False
    _set(item, VALID, torch.ones(_rows(fields), dtype=torch.bool))
    return True


def as_padding(item: Any) -> Any:
    """Returns a copy of a batch of which no row is valid; its tensors are shared."""
    padding = copy.copy(item)
    if isinstance(item, (Batch, Sample)):
        _set(padding, "__restore_key__", (PADDING, item.__restore_key__))
        no_weight = [0.0] * len(item.__key__) if isinstance(item.__key__, list) else 0.0
        _set(padding, "__loss_weight__", no_weight)
        fields = {name: getattr(item, name) for name in type(item).__dataclass_fields__}
    else:
        fields = _fields(item) or {}
        _set(padding, VALID, torch.zeros_like(fields[VALID]))
    for name in _WEIGHTS:
        if name in fields:
            _set(padding, name, _zeros(fields[name]))
    return padding


def _fields(item: Any) -> Any:
    """Returns what an object has, by name; None if it can take no more."""
    if isinstance(item, MutableMapping):
        return item
    if isinstance(item, torch.Tensor):
        return None
    return getattr(item, "__dict__", None)


def _set(item: Any, name: str, value: Any) -> None:
    if isinstance(item, MutableMapping):
        item[name] = value
    else:
        object.__setattr__(item, name, value)  # also where it is frozen


def _rows(fields: Any) -> tuple[int, ...]:
    """Returns the shape of a mask: (n,) for the first dimension that all tensors share."""
    tensors = [value for value in fields.values() if isinstance(value, torch.Tensor) and value.ndim]
    keys = fields.get("__key__")
    sizes = {len(tensor) for tensor in tensors} or ({len(keys)} if isinstance(keys, list) else ())
    return tuple(sizes) if len(sizes) == 1 else ()


def _zeros(weights: Any) -> Any:
    if isinstance(weights, torch.Tensor):
        return torch.zeros_like(weights)
    return [0.0] * len(weights) if isinstance(weights, list) else 0.0
