"""Checks of arguments that users pass: integers, and names that do not exist."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from energon_lite.core.errors import did_you_mean
from energon_lite.names.energon_modules import import_name

F = TypeVar("F", bound=Callable[..., Any])

# Returns the message for a name that other libraries have; imported on first use.
ELSEWHERE = "energon_lite.extras.trainers.habits:named_elsewhere"


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
                hint = f".{did_you_mean(name, [*known][1:])}"
                raise TypeError(import_name(ELSEWHERE)(f"{owner} has no argument", name, hint))
        if len(values) > len(places):
            raise TypeError(
                f"{owner}: {values[len(places)]!r:.40} needs the name of its argument, such as "
                f"{', '.join(name for name in known if name not in places)}"
            )
        return call(*values, **settings)

    return checked  # type: ignore[return-value]
