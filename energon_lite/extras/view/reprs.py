"""Texts of `repr` for samples, batches, datasets and loaders: short, and without reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from energon_lite.core.cache_pool import Lazy
from energon_lite.extras.view.fields import fields_of
from energon_lite.extras.view.stage_tree import is_tree, tree_lines
from energon_lite.extras.view.words import array_text, counted, shape_text, size_text
from energon_lite.stages.packed_sample import PackedBatch, PackedSample

# Characters of a text or name, entries of a list, fields of a sample, characters of all of them.
_MAX_TEXT, _MAX_ENTRIES, _MAX_FIELDS, _MAX_LINE = 60, 3, 20, 300
_MAX_DEPTH, _MAX_BRIEF = 2, 200
_PACK_FIELDS = {field.name for field in dataclasses.fields(PackedSample)}


def text_of(value: Any) -> str:
    """Describes a sample, a batch, a dataset or a loader; reads, opens and decodes nothing.

    Returns:
        For a sample or batch at most 800 characters in one line; for a dataset or loader the tree
        of its stages. For a value that cannot be described, what `object` returns.
    """
    try:
        return "\n".join(tree_lines(value)) if is_tree(value) else _item_text(value)
    except Exception:  # a repr stands in error messages and debuggers, also of half-made objects
        return object.__repr__(value)


def _item_text(item: Any) -> str:
    parts, fields = [*_head_of(item)], _fields_in_repr(item)
    for number, (name, value) in enumerate(fields.items()):
        if number == _MAX_FIELDS or sum(map(len, parts)) > _MAX_LINE:
            parts.append(f"and {counted(len(fields) - number, 'more field')}")
            break
        shown = name[:_MAX_TEXT] if name.isprintable() else brief(name, 1)
        parts.append(f"{shown}: {brief(value)}")
    return f"{type(item).__name__[:_MAX_TEXT]}({', '.join(parts)})"


def _fields_in_repr(item: Any) -> dict[str, Any]:
    """Returns the fields of a sample, batch or dict; without service fields and those at None."""
    hidden = _PACK_FIELDS if _is_pack(item) else ()
    shown = {n: value for n, value in fields_of(item).items() if value is not None}
    return {n: value for n, value in shown.items() if n not in hidden and n[:2] != "__"}


def _is_pack(item: Any) -> bool:
    """Whether an item is a pack, or a batch of packs."""
    return isinstance(item, (PackedSample, PackedBatch))


def _head_of(item: Any) -> Iterator[str]:
    """Yields the key of a sample, the number of samples of a batch, and how full a pack is."""
    key = item.get("__key__") if isinstance(item, Mapping) else getattr(item, "__key__", None)
    if _is_pack(item):
        yield shape_text(item.input_ids.shape) + ("" if item.input_ids.ndim > 1 else " tokens")
        key = getattr(item, "__keys__", key)
    if key is not None:
        yield counted(len(key), "sample") if isinstance(key, (list, tuple)) else brief(key)
    if _is_pack(item):
        if item.images:
            yield counted(len(item.images), "image")
        device = item.segment_ids.device  # one that is not the CPU would have to be waited for
        filled = int((item.segment_ids > 0).sum()) if device.type == "cpu" else None
        per_mille = None if filled is None else 1000 * filled // item.segment_ids.numel()
        yield f"on {device}" if per_mille is None else f"{per_mille / 10:g} % full"


def brief(value: Any, depth: int = 0) -> str:
    """Writes any value in at most 200 characters; opens and decodes nothing, never raises."""
    try:
        text = _brief(value, depth)
        return text if len(text) <= _MAX_BRIEF else f"{text[: _MAX_BRIEF - 3]}..."
    except Exception:
        return type(value).__name__[:_MAX_TEXT]


def _brief(value: Any, depth: int) -> str:
    kind = type(value).__name__[:_MAX_TEXT]
    if isinstance(value, str):
        room = _MAX_TEXT if depth == 0 else _MAX_TEXT // 3
        return repr(value if len(value) <= room else value[: room - 3] + "...")
    if value is None or isinstance(value, (bool, int, float, complex, np.generic)):
        return str(value)[:_MAX_TEXT]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return size_text(memoryview(value).nbytes, 1)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return array_text(value)
    if isinstance(value, Lazy):
        return f"{kind}({brief(value.fname, 1)})"
    if hasattr(value, "getbands"):  # Pillow's
        return f"{shape_text(value.size[::-1])} {value.mode}"
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return kind
    if depth == _MAX_DEPTH or isinstance(value, (set, frozenset)):
        return f"{kind} of {len(value):,}"
    pairs = value.items() if isinstance(value, Mapping) else ((entry,) for entry in value)
    some = [": ".join(brief(e, depth + 1) for e in pair) for pair in islice(pairs, _MAX_ENTRIES)]
    some += [f"and {len(value) - len(some):,} more"] if len(value) > len(some) else []
    return f"{{{', '.join(some)}}}" if isinstance(value, Mapping) else f"[{', '.join(some)}]"
