"""Rows that all parts print, and times of one call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import TypeVar

Row = tuple[str, object, float, str]
T = TypeVar("T")


def print_rows(rows: Callable[[Path, bool], Iterator[Row]]) -> None:
    """Runs a part with the arguments of the command line; prints values with three digits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="keeps the datasets that the part writes")
    parser.add_argument("--large", action="store_true", help="also the larger sizes")
    arguments = parser.parse_args()
    for name, size, exact, unit in rows(arguments.folder, arguments.large):
        value = float(f"{exact:.3g}")
        print(name, size, f"{value:,.0f}" if value >= 100 else f"{value:g}", unit, sep=", ")


def least_cpu(function: Callable[[], T], rounds: int = 3) -> tuple[float, T]:
    """Returns CPU seconds of this process for a call, the least of several, and its last result."""
    best = float("inf")
    for _ in range(rounds):
        since = process_time()
        found = function()
        best = min(best, process_time() - since)
    return best, found
