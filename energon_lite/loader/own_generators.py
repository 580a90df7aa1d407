"""Finds generators of random numbers that hooks keep: each worker and rank has a copy of them."""

from __future__ import annotations

import gc
import random
import sys
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from energon_lite.core.dataset import AnyDataset
from energon_lite.storage.files import warn_once

_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_GLOBAL = (np.random.mtrand._rand, random._inst, torch.default_generator)
# Objects that are looked at, and parts of each: the vocabulary of a tokenizer has 100,000.
_MOST, _MOST_PARTS = 5_000, 200
# Their classes keep no generator of a user's, and lead to thousands of objects.
_LIBRARIES = {*sys.stdlib_module_names, "energon_lite", "numpy", "torch"}


def warn_of_own_generators(dataset: AnyDataset) -> None:
    """Warns, once, of each kind of generator that hooks, or the objects that they use, keep."""
    datasets: list[AnyDataset] = [dataset]
    waiting: list[tuple[str, Any]] = []
    for below in datasets:
        datasets += below.children
        waiting += [("A hook", function.function) for function in below.functions]
    seen: dict[int, Any] = {}  # the objects too: an address is used again
    for owner, value in waiting:
        if type(value) in _KINDS and all(value is not other for other in _GLOBAL):
            warn_once(
                f"{owner} keeps a {type(value).__name__} as its generator: every worker and rank "
                "draws the same numbers from its copy, and a resume starts it again. Draw from "
                "energon_lite.sample_rng() in the hook (docs/task_encoder.md)"
            )
        elif gc.is_tracked(value) and id(value) not in seen and len(seen) < _MOST:
            seen[id(value)] = value
            if not isinstance(value, (dict, list, tuple)):
                owner = getattr(value, "__qualname__", type(value).__name__)
            waiting += [(owner, part) for part in _kept_in(value)[:_MOST_PARTS]]


def _kept_in(value: Any) -> list[Any]:
    """Returns what an object keeps; nothing of a module or a class of a library."""
    if isinstance(value, FunctionType):
        return gc.get_referents(*value.__closure__ or ())
    if isinstance(value, type):
        is_of_library = str(value.__module__).partition(".")[0] in _LIBRARIES
        return [] if is_of_library else [*value.__bases__, *vars(value).values()]
    return [] if isinstance(value, ModuleType) else gc.get_referents(value)
