"""Checks of arguments that users pass: integers, and names that do not exist."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from energon_lite.core.errors import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

# The names that other libraries have for a setting -> where it is set here.
_ELSEWHERE = {
    "batch_size": "get_train_dataset(batch_size=n)",
    "collate_fn": "the method `batch` of a task encoder (task_encoder=...)",
    "drop_last": "batch_drop_last=True of get_train_dataset or get_val_dataset",
    "limit": "get_val_dataset(limit=n), or in training virtual_epoch_length=n or subset=(0, n)",
    "num_workers": "worker_config=WorkerConfig.default_worker_config(num_workers=n) of the dataset",
    "prefetch_factor": "get_loader(prefetch_factor=n)",
    "seed": "WorkerConfig(seed_offset=n)",
    "shuffle": "get_train_dataset, which shuffles, with shuffle_buffer_size=n to shuffle more or "
    "shuffle_over_epochs_multiplier=None for file order; get_val_dataset does not shuffle",
    "transform": "the method `encode_sample` of a task encoder (task_encoder=...)",
    **dict.fromkeys(("rank", "world_size"), "WorkerConfig(rank=..., world_size=..., ...)"),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), "get_train_dataset(repeat=n)"),
}


def at_least(name: str, value: Any, least: float = 1, also: str = "") -> int:
    """Returns a number, if it is an integer, also of numpy, that is not too small.

    Args:
        name: of the argument, for messages.
        value: of the argument.
        least: its minimum.
        also: the end of the message, for other values that are allowed.

    Raises:
        TypeError: Not an integer.
        ValueError: Below `least`.
    """
    number = value
    with suppress(TypeError):
        number = value if isinstance(value, int) else operator.index(value)
    if isinstance(number, bool) or not isinstance(number, int):
        hint = "; convert text by int(...)" if isinstance(value, str) else ""
        raise TypeError(f"{name}={value!r:.80} must be an integer{also}{hint}")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}{also}")
    return number


def unknown_argument(text: str, name: str, otherwise: str) -> TypeError:
    """Returns the error for an argument that a function does not have.

    Args:
        text: the start of the message.
        name: of the argument.
        otherwise: the end of the message, if no other function has the argument.
    """
    where = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else otherwise
    return TypeError(f"{text} {name!r}{where}")


def hinting(call: F) -> F:
    """Makes a function, or the `__init__` of a class, name the right argument for a wrong one."""
    if isinstance(call, type):
        setattr(call, "__init__", hinting(vars(call)["__init__"]))  # noqa: B010  mypy
        return call
    known = signature(call).parameters
    places = [p.name for p in known.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    owner = call.__qualname__.removesuffix(".__init__")

    @wraps(call)
    def checked(*values: Any, **settings: Any) -> Any:
        for name in settings:
            if name not in known:
                hint = did_you_mean(name, [*known][1:])
                raise unknown_argument(f"{owner} has no argument", name, f".{hint}")
        if len(values) > len(places):
            named = [p.name for p in known.values() if p.default is p.empty and p.name != "self"]
            raise TypeError(
                f"{owner}: {values[len(places)]!r:.40} needs the name of its argument, as in "
                f"{owner}({', '.join(f'{name}=...' for name in named)})"
            )
        return call(*values, **settings)

    return checked  # type: ignore[return-value]
