"""What `repr` returns for samples, batches, datasets and loaders: short, and without reading."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from energon_lite.core.cache_pool import Lazy
from energon_lite.core.stacking import SERVICE_FIELDS
from energon_lite.extras.view.stage_tree import is_tree, tree_lines
from energon_lite.extras.view.words import counted, size_text
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
    name = type(item).__name__[:_MAX_TEXT]
    parts = [*_head(item)]
    fields, length = fields_in_repr(item), sum(map(len, parts))
    for number, (field, value) in enumerate(fields.items()):
        if number == _MAX_FIELDS or length > _MAX_LINE:
            parts.append(f"and {counted(len(fields) - number, 'more field')}")
            break
        shown = field[:_MAX_TEXT] if field.isprintable() else brief(field, 1)
        parts.append(f"{shown}: {brief(value)}")
        length += len(parts[-1])
    return f"{name}({', '.join(parts)})"


def fields_in_repr(item: Any) -> dict[str, Any]:
    """Returns the fields of a sample, batch or dict; without service fields and those at None."""
    if isinstance(item, Mapping):
        found: Iterable[tuple[Any, Any]] = item.items()
    else:
        names = [field.name for field in dataclasses.fields(item) if field.repr]
        found = [(name, getattr(item, name, None)) for name in names]
    hidden = SERVICE_FIELDS | (_PACK_FIELDS if is_pack(item) else set())
    shown = ((str(name), value) for name, value in found if value is not None)
    return {name: value for name, value in shown if name not in hidden}


def is_pack(item: Any) -> bool:
    """Whether an item is a pack, or a batch of packs."""
    return isinstance(item, (PackedSample, PackedBatch))


def _head(item: Any) -> Iterable[str]:
    """Yields the key of a sample, the number of samples of a batch, and how full a pack is."""
    key = item.get("__key__") if isinstance(item, Mapping) else getattr(item, "__key__", None)
    if is_pack(item):
        yield _dimensions(item.input_ids.shape) + ("" if item.input_ids.ndim > 1 else " tokens")
        key = getattr(item, "__keys__", key)
    if isinstance(key, (list, tuple)):
        yield counted(len(key), "sample")
    elif key is not None:
        yield brief(key)
    if is_pack(item):
        if item.images:
            yield counted(len(item.images), "image")
        if item.segment_ids.device.type == "cpu":  # elsewhere it would wait for the device
            fill = float((item.segment_ids > 0).double().mean())
            yield f"{math.floor(fill * 1000) / 10:g} % full"
        else:
            yield f"on {item.segment_ids.device}"


def brief(value: Any, depth: int = 0) -> str:
    """Writes any value in at most 200 characters; opens and decodes nothing, never raises."""
    try:
        text = _brief(value, depth)
        return text if len(text) <= _MAX_BRIEF else f"{text[: _MAX_BRIEF - 3]}..."
    except Exception:
        return type(value).__name__[:_MAX_TEXT]


def _brief(value: Any, depth: int) -> str:
    if isinstance(value, str):
        room = _MAX_TEXT if depth == 0 else _MAX_TEXT // 3
        return repr(value if len(value) <= room else value[: room - 3] + "...")
    if value is None or isinstance(value, (bool, int, float, complex, np.generic)):
        return str(value)[:_MAX_TEXT]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return size_text(memoryview(value).nbytes, 1)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        dtype, device = str(value.dtype).removeprefix("torch."), str(getattr(value, "device", ""))
        where = "" if device in ("", "cpu") else f" on {device}"
        return f"{_dimensions(value.shape)} {dtype[:_MAX_TEXT]}{where}".strip()
    if isinstance(value, Lazy):
        return f"{type(value).__name__}({brief(value.fname, 1)})"
    if isinstance(value, (Mapping, list, tuple)) and depth < _MAX_DEPTH:
        return _brief_entries(value, depth + 1)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return f"{type(value).__name__[:_MAX_TEXT]} of {len(value):,}"
    if hasattr(value, "getbands"):  # Pillow's
        return f"{_dimensions(value.size[::-1])} {value.mode}"
    return type(value).__name__[:_MAX_TEXT]


def _brief_entries(value: Any, depth: int) -> str:
    if isinstance(value, Mapping):
        some = islice(value.items(), _MAX_ENTRIES)
        shown, ends = [f"{brief(k, depth)}: {brief(v, depth)}" for k, v in some], "{}"
    else:
        shown, ends = [brief(entry, depth) for entry in islice(value, _MAX_ENTRIES)], "[]"
    if len(value) > len(shown):
        shown.append(f"and {len(value) - len(shown):,} more")
    return f"{ends[0]}{', '.join(shown)}{ends[1]}"


def _dimensions(shape: Iterable[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
