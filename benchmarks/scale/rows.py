"""Rows that all parts print, and times of one call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import TypeVar

# Name, size, value, unit; in place of a value, why there is none.
Row = tuple[str, object, float | str, str]
T = TypeVar("T")


def print_rows(rows: Callable[[Path, bool], Iterator[Row]]) -> None:
    """Runs a part with the arguments of the command line; prints values with three digits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="keeps the datasets that the part writes")
    parser.add_argument("--large", action="store_true", help="also the larger sizes")
    arguments = parser.parse_args()
    for name, size, value, unit in rows(arguments.folder, arguments.large):
        print(name, size, shown(value), unit, sep=", ")


def shown(exact: float | str) -> str:
    """Returns the text of a value, without the ", " that separates columns."""
    if isinstance(exact, str):
        return exact.replace(", ", "; ")
    value = float(f"{exact:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def least_cpu(function: Callable[[], T], rounds: int = 3) -> tuple[float, T]:
    """Returns CPU seconds of this process for a call, the least of several, and its last result."""
    best = float("inf")
    for _ in range(rounds):
        since = process_time()
        found = function()
        best = min(best, process_time() - since)
    return best, found
