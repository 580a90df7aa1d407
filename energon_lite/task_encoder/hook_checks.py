"""What is checked of a task encoder and of sizes before a pipeline is built."""

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

# As alike as `encode_samples` and `encode_sample`, not as `encode_image`.
_ALIKE = 0.9
# Energon calls these; here nothing does, so that an override would change nothing.
_NOT_CALLED = {
    "_load_dataset": "override build_cook_crude_sample, or build_train_datasets",
    "_is_overridden": "override `overrides`",
    "cache": "this version has no cache pools",
}


def checked_encoder(encoder: AnyTaskEncoder | None) -> AnyTaskEncoder:
    """Returns the task encoder, by default `DefaultTaskEncoder()`; warns of misspelt hooks.

    Raises:
        TypeError: It is none, or overrides what is never called.
    """
    given: Any = encoder
    if given is None:
        return DefaultTaskEncoder()
    if isinstance(given, type):
        raise TypeError(
            f"task_encoder={given.__name__} is a class; give an instance: {given.__name__}()"
        )
    if not isinstance(given, TaskEncoder):
        raise TypeError(
            f"task_encoder={given!r:.80} is no task encoder; derive {type(given).__name__} from "
            "DefaultTaskEncoder"
        )
    own = {
        name: value
        for cls in reversed(type(given).__mro__)
        if not cls.__module__.startswith("energon_lite.")
        for name, value in vars(cls).items()
    }
    for name, instead in _NOT_CALLED.items():
        if name in own:
            raise TypeError(f"{type(given).__name__} has {name}, which is not called: {instead}")
    for name, value in own.items():
        known = _METHODS if callable(value) else SETTINGS
        meant = _meant(name, known - own.keys())
        if meant is not None:
            warnings.warn(
                f"{type(given).__name__} has {name!r}, which is not called; did you mean "
                f"{meant!r}?",
                UserWarning,
                stacklevel=4,
            )
    return given


def checked_config(config: WorkerConfig | None) -> WorkerConfig | None:
    """Returns a worker config, or None for the default.

    Raises:
        TypeError: It is something else.
    """
    given: Any = config
    if given is None or isinstance(given, WorkerConfig):
        return config
    raise TypeError(
        f"worker_config={given!r:.80} is no WorkerConfig; give WorkerConfig(rank=..., "
        "world_size=..., num_workers=...) or WorkerConfig.default_worker_config(num_workers), "
        "called"
    )


def _meant(name: str, known: frozenset[str]) -> str | None:
    """Returns the known name that a name is nearly, up to capitals and underscores."""
    if name.startswith("_") or name in _METHODS or name in SETTINGS:
        return None
    close = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=_ALIKE)
    return close[0] if close else None


def check_sizes(**sizes: int | None) -> None:
    """Checks that sizes are whole numbers in their range.

    Args:
        sizes: by the names of the arguments; None is for the default of each.

    Raises:
        TypeError: One is no whole number.
        ValueError: One is below its least value.
    """
    for name, size in sizes.items():
        given: Any = size
        if given is None:
            continue
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            number = "; write it without quotes" if isinstance(given, str) else ""
            raise TypeError(f"{name}={given!r} must be a whole number or None{number}")
        least, meaning = _LEAST[name]
        if given < least:
            raise ValueError(f"{name}={given} must be at least {least}{meaning}")


_LEAST = {
    "batch_size": (1, ", or None for no batches"),
    "packing_buffer_size": (1, ", or None for no packing by a function"),
    "shuffle_buffer_size": (0, "; 0, 1 and None are for no shuffling"),
    "max_samples_per_sequence": (1, ", or None for the mean size of a shard"),
    "virtual_epoch_length": (0, "; 0 is for no end"),
    "limit": (0, "; 0 and None are for no limit"),
}
