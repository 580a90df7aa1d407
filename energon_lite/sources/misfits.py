"""Compares values of fields with the types that a sample class declares."""

from __future__ import annotations

import types
import typing
from typing import Any

import numpy as np
import torch

from energon_lite.core.samples import Sample
from energon_lite.core.stacking import SERVICE_FIELDS
from energon_lite.sources.sample_loader import FieldMapMaker

# The types of values that a declared type takes besides its instances.
_TAKEN: dict[Any, tuple[type, ...]] = {
    int: (int, torch.Tensor),
    float: (int, float, torch.Tensor),
    tuple: (tuple, list),
    **dict.fromkeys((torch.Tensor, np.ndarray), (torch.Tensor, np.ndarray, int, float)),
}
# Values of other types, such as Pillow images, are what a decoder was asked for.
_COMPARED = {bytes, str, bool, int, float, list, tuple, dict, type(None), torch.Tensor, np.ndarray}
_ENTRIES = 8  # of a list that are compared
_declared: dict[type[Any], dict[str, Any]] = {}


def _declared_types(sample_type: type[Any]) -> dict[str, Any]:
    """Returns the declared types of the fields of a sample class; none if they are unknown."""
    if sample_type not in _declared:
        try:
            hints = typing.get_type_hints(sample_type)
        except (NameError, TypeError):  # a name that only type checkers import
            hints = {}
        _declared[sample_type] = {
            field.name: hints[field.name] | None if field.default is None else hints[field.name]
            for field in getattr(sample_type, "__dataclass_fields__", {}).values()
            if field.name in hints and field.name not in SERVICE_FIELDS
        }
    return _declared[sample_type]


def misfits(maker: Any, sample: Any) -> list[str]:
    """Describes the fields of a sample that have values of other types than they declare.

    Args:
        maker: made the sample.
        sample: the sample; crude ones declare no types.
    """
    found = []
    declared_types = _declared_types(type(sample)) if isinstance(sample, Sample) else {}
    for name, declared in declared_types.items():
        value = getattr(sample, name)
        if _may_fit(value, declared):
            continue
        origin = "what the code of the dataset returns"
        if isinstance(maker, FieldMapMaker):
            field_map = maker.field_map
            ways = field_map.paths.get(name, field_map.mapping[name])
            origin = f"its part {' or '.join(repr(str(way)) for way in ways)}"
        shown = declared.__name__ if isinstance(declared, type) else str(declared)
        inner = f" of {type(value[0]).__name__}" if isinstance(value, list) and value else ""
        found.append(
            f"field {name!r} is of type {shown.replace('torch.', '').removesuffix(' | None')}, and "
            f"{origin} becomes {type(value).__name__}{inner}; map it to another part, use another "
            "sample type, or decode it in a cooker"
        )
    return found


def _may_fit(value: Any, declared: Any) -> bool:
    origin, arguments = typing.get_origin(declared) or declared, typing.get_args(declared)
    if type(value) not in _COMPARED or declared is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_may_fit(value, one) for one in arguments)
    if origin not in _COMPARED:
        # Such as a Protocol, or an annotation of jaxtyping: nothing undecoded fits.
        return not isinstance(value, bytes | None)
    if not isinstance(value, _TAKEN.get(origin, origin)):
        return False
    entries: Any = value if origin is list and arguments else ()
    return all(_may_fit(entry, arguments[0]) for entry in entries[:_ENTRIES])
