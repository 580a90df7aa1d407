"""What a command shows beside its report: a bar on stderr, and no warnings that the report has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

Bar = Callable[[str, int, int, str], None]


@contextmanager
def warnings_in_report() -> Iterator[None]:
    """Keeps warnings out of the log, for a command whose report has them."""
    logger = logging.getLogger("energon_lite")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def progress_bar(wanted: bool | None) -> Iterator[Bar | None]:
    """Yields a function (what, done, total, more) that draws a bar on stderr, or None."""
    console = Console(stderr=True)
    if not (console.is_terminal if wanted is None else wanted):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("{task.fields[more]}"), TimeRemainingColumn(), console=console
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int, more: str) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total, more=more)
            progress.update(tasks[what], completed=done, more=more)

        yield show


def three(bar: Bar | None) -> Callable[[str, int, int], None] | None:
    """Returns a bar as a function without the text behind it."""
    return None if bar is None else lambda what, done, total: bar(what, done, total, "")
