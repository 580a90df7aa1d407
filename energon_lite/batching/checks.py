"""Checks of single values."""

from __future__ import annotations

import operator


def at_least(name: str, value: int, least: int = 1) -> int:
    """Returns a number, if it is an integer that is not too small.

    Raises:
        TypeError: Not an integer.
        ValueError: Below `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r:.80} must be an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number
