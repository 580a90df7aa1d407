"""Where two values first differ, all the way down."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


def first_difference(old: Any, new: Any, path: str = "") -> str | None:
    """Describes where two values first differ; None if they are equal all the way down.

    Types must be the same; NaN equals NaN; tensors and arrays are compared by dtype, shape and
    content; objects without an `==` of their own by their attributes.

    Example:
        >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
        "['a'][1]: 2 != 3"
    """
    if old is new:
        return None
    if type(old) is not type(new):
        return f"{path}: {type(old).__name__} {old!r:.80} != {type(new).__name__} {new!r:.80}"
    if isinstance(old, (torch.Tensor, np.ndarray)):
        return _array_difference(old, new, path)
    if isinstance(old, dict):
        if old.keys() != new.keys():
            return f"{path}: keys {list(old)} != {list(new)}"
        pairs = [(f"[{k!r}]", old[k], new[k]) for k in old]
    elif isinstance(old, (list, tuple)):
        if len(old) != len(new):
            return f"{path}: {len(old)} != {len(new)} entries"
        names = getattr(old, "_fields", None)
        pairs = [
            (f".{names[i]}" if names else f"[{i}]", a, b)
            for i, (a, b) in enumerate(zip(old, new, strict=True))
        ]
    elif dataclasses.is_dataclass(old):
        pairs = [
            (f".{f.name}", getattr(old, f.name), getattr(new, f.name))
            for f in dataclasses.fields(old)
        ]
    elif _has_no_equality(old) and hasattr(old, "__dict__"):
        return first_difference(vars(old), vars(new), path)
    else:
        is_same = old == new or (old != old and new != new)
        return None if is_same else f"{path}: {old!r:.200} != {new!r:.200}"
    found = (first_difference(a, b, path + name) for name, a, b in pairs)
    return next((difference for difference in found if difference), None)


def _has_no_equality(value: object) -> bool:
    return all("__eq__" not in vars(kind) for kind in type(value).__mro__[:-1])


def _array_difference(old: Any, new: Any, path: str) -> str | None:
    if old.dtype != new.dtype or old.shape != new.shape:
        shapes = f"{old.dtype} {tuple(old.shape)} != {new.dtype} {tuple(new.shape)}"
        return f"{path}: {shapes}"
    if old.dtype == object:
        return first_difference(old.tolist(), new.tolist(), path)
    different = np.asarray((old != new) & ~((old != old) & (new != new)))
    if not different.any():
        return None
    place = tuple(int(i) for i in np.argwhere(different)[0])
    return f"{path}[{', '.join(map(str, place))}]: {old[place]!r} != {new[place]!r}"
