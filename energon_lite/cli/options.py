"""Options that several commands have, and how they print errors and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

DatasetPath = Annotated[Path, typer.Argument(metavar="PATH", help="The dataset's folder.")]
Trust = Annotated[
    bool | None,
    typer.Option(
        "--trust/--no-trust",
        help="Run code that the dataset names (sample_loader.py).  [default: ENERGON_LITE_TRUST]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
ShowProgress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="By default on if stderr is a terminal."),
]
NumWorkers = Annotated[
    int | None,
    typer.Option("--num-workers", min=0, help="Processes; by default one per core, at most 16."),
]
SplitConfig = Annotated[
    str | None,
    typer.Option("--split-config", help="Split file in .nv-meta.  [default: split.yaml]"),
]
DatasetConfig = Annotated[
    str | None,
    typer.Option("--dataset-config", help="Dataset file in .nv-meta.  [default: dataset.yaml]"),
]


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Turns errors of data into a text on stderr and exit code 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"Error: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"  {note}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("Stopped. Run the same command again to continue.", err=True)
        raise typer.Exit(130) from None


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
def progress_bar(wanted: bool | None) -> Iterator[Callable[[str, int, int, str], None] | None]:
    """Gives a function (what, done, total, more) that draws a bar on stderr, or None."""
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
