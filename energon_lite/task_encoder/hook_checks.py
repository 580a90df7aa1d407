"""Checks of a task encoder and of sizes, before a pipeline is built."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

from energon_lite.core.topology import WorkerConfig
from energon_lite.task_encoder.base import (
    HOOKS,
    SETTINGS,
    AnyTaskEncoder,
    DefaultTaskEncoder,
    TaskEncoder,
)
from energon_lite.task_encoder.builders import PipelineBuilders

_METHODS = HOOKS | {name for name in vars(PipelineBuilders) if name.startswith("build_")}

# `encode_samples` is similar to `encode_sample`, `encode_image` is not.
_SIMILAR = 0.9
# Energon calls these methods; this library does not, so an override would have no effect.
_NOT_CALLED = {
    "_load_dataset": "override build_cook_crude_sample, or build_train_datasets",
    "_is_overridden": "override `overrides`",
    "cache": "this version has no cache pools",
}


def checked_encoder(encoder: AnyTaskEncoder | None) -> AnyTaskEncoder:
    """Returns the task encoder, by default `DefaultTaskEncoder()`; warns of misspelt hooks.

    Raises:
        TypeError: The object is no task encoder, or overrides a method that is never called.
    """
    value: Any = encoder
    if value is None:
        return DefaultTaskEncoder()
    if isinstance(value, type):
        raise TypeError(
            f"task_encoder={value.__name__} is a class; pass an instance: {value.__name__}()"
        )
    if not isinstance(value, TaskEncoder):
        raise TypeError(
            f"task_encoder={value!r:.80} is no task encoder; derive {type(value).__name__} from "
            "DefaultTaskEncoder"
        )
    own = {
        name: attribute
        for cls in reversed(type(value).__mro__)
        if not cls.__module__.startswith("energon_lite.")
        for name, attribute in vars(cls).items()
    }
    for name, instead in _NOT_CALLED.items():
        if name in own:
            raise TypeError(f"{type(value).__name__} has {name}, which is not called: {instead}")
    for name, attribute in own.items():
        known = _METHODS if callable(attribute) else SETTINGS
        meant = _meant(name, known - own.keys())
        if meant is not None:
            warnings.warn(
                f"{type(value).__name__} has {name!r}, which is not called; did you mean "
                f"{meant!r}?",
                UserWarning,
                stacklevel=4,
            )
    return value


def checked_config(config: WorkerConfig | None) -> WorkerConfig | None:
    """Returns a worker config; None is the default.

    Raises:
        TypeError: The object is no worker config.
    """
    value: Any = config
    if value is None or isinstance(value, WorkerConfig):
        return config
    raise TypeError(
        f"worker_config={value!r:.80} is no WorkerConfig; pass WorkerConfig(rank=..., "
        "world_size=..., num_workers=...) or WorkerConfig.default_worker_config(num_workers), "
        "called"
    )


def _meant(name: str, known: frozenset[str]) -> str | None:
    """Returns the known name that is similar to an unknown name; None if there is none."""
    if name.startswith("_") or name in _METHODS or name in SETTINGS:
        return None
    close = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=_SIMILAR)
    return close[0] if close else None


def check_sizes(**sizes: int | None) -> None:
    """Checks that sizes are whole numbers in their range.

    Args:
        sizes: by the names of the arguments; None stands for the default.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is below its minimum.
    """
    for name, size in sizes.items():
        value: Any = size
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            number = "; write it without quotes" if isinstance(value, str) else ""
            raise TypeError(f"{name}={value!r} must be a whole number or None{number}")
        least, meaning = _LEAST[name]
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}{meaning}")


_LEAST = {
    "batch_size": (1, ", or None for no batches"),
    "packing_buffer_size": (1, ", or None for no packing by a function"),
    "shuffle_buffer_size": (0, "; 0, 1 and None are for no shuffling"),
    "max_samples_per_sequence": (1, ", or None for the mean size of a shard"),
    "virtual_epoch_length": (0, "; 0 is for no end"),
    "limit": (0, "; 0 and None are for no limit"),
}
