"""The command `energon-lite`: reads arguments, calls what does the work, prints."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from energon_lite.cli.absent import add_absent
from energon_lite.cli.balance import balance
from energon_lite.cli.lengths import lengths
from energon_lite.cli.plans import plan, schema
from energon_lite.cli.prepare import prepare
from energon_lite.cli.reports import info, lint

app = typer.Typer(
    name="energon-lite",
    help="Prepares, describes and checks WebDataset folders in the format of Megatron-Energon.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (prepare, info, lint, lengths, plan, balance, schema):
    app.command()(command)
add_absent(app)


def main() -> None:
    """Runs the command line; the entry point of the script `energon-lite`."""
    app()


def _print_version(is_asked: bool) -> None:
    if is_asked:
        try:
            version = metadata.version("energon_lite")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"energon-lite {version}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    del version
