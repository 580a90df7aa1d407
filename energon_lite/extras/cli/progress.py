"""The progress bar of a command, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn


class Bar(Protocol):
    """Draws how much of a task is done."""

    def __call__(self, what: str, done: int, total: int, more: str = "") -> None:
        """Draws `done` of `total`, with the text `more` behind it."""


@contextmanager
def progress_bar(wanted: bool | None) -> Iterator[Bar | None]:
    """Yields a function that draws a bar on stderr, or None."""
    console = Console(stderr=True)
    if not (console.is_terminal if wanted is None else wanted):
        yield None
        return
    name, more = "{task.description}", "{task.fields[more]}"
    columns = (name, BarColumn(), MofNCompleteColumn(), more, TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int, more: str = "") -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total, more=more)
            progress.update(tasks[what], completed=done, more=more)

        yield show
