"""Figures of the long forms: printed, and added to a file that SOAK_FIGURES names."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Figures:
    """Results of many trials of one kind; a failure does not end them.

    Args:
        name: what is measured, with its unit.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.num_trials = 0
        self.num_failed = 0

    def add(self, value: float) -> None:
        """Adds a measured value."""
        self.values.append(value)

    def note(self, text: str) -> None:
        """Adds what numbers alone do not say."""
        self.notes.append(text)

    @contextmanager
    def trial(self, what: Any, count: int = 1) -> Iterator[None]:
        """Runs one trial, which counts as several, and notes its failure."""
        self.num_trials += count
        try:
            yield
        except Exception as error:
            self.num_failed += count
            self.failures.append(f"trial {self.num_trials}, {what}: {error!s:.2000}")
            print(self.failures[-1], flush=True)

    def check(self) -> None:
        """Writes the figures as a row of a table; fails if a trial has failed."""
        cells = [self.name, f"{self.num_trials - self.num_failed} of {self.num_trials}"]
        if self.values:
            mean, most = statistics.median(self.values), max(self.values)
            cells.append(f"median {mean:.2f}, most {most:.2f}")
        cells += self.notes
        row = "| " + " | ".join(cells) + " |"
        print(row, flush=True)
        if "SOAK_FIGURES" in os.environ:
            with Path(os.environ["SOAK_FIGURES"]).open("a") as file:
                file.write(row + "\n")
        assert not self.failures, f"{row}\n" + "\n".join(self.failures)
