"""The progress bar of a command, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn


@contextmanager
def progress_bar(wanted: bool | None) -> Iterator[Callable[..., None] | None]:
    """Yields a function that draws a bar on stderr, or None.

    The function takes the name of a task, how much of it is done, of how much, and a text that
    stands behind the bar.

    Args:
        wanted: whether there is a bar; None for one on a terminal.
    """
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
            progress.update(tasks[what], completed=done, total=total, more=more)

        yield show
