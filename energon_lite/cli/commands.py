"""All commands: `app` for the script, and one object for each name that Energon imports."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer.main

from energon_lite.cli import reports
from energon_lite.cli.prepare import prepare as _prepare

# Commands of `energon` that are not here, and what to use.
_INSTEAD = {
    "prepare-media": "this version has no media metadata, and needs none for pictures; audio and "
    "video parts stay bytes",
    "preview": "use `energon-lite info PATH` for parts and fields, `energon-lite lint PATH` to "
    "decode all, and `next(iter(get_val_dataset(PATH, batch_size=None)))` to look at a sample",
    "mount": "use `tar -tvf SHARD` and `tar -xOf SHARD MEMBER`, or ratarmount; a shard is a plain "
    "tar",
    "checkpoint": "use one state for all: `loader.state_dict()` is JSON, and is loaded on any "
    "number of ranks and workers, so that nothing has to be redistributed",
    "analyze-debug": "use `loader.stats()` for what a run read, and `energon-lite plan PATH` for "
    "what it will read",
}

app = typer.Typer(
    name="energon-lite",
    help="Prepares, describes and checks WebDataset folders in the format of Megatron-Energon.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
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


def _add_missing(name: str, instead: str) -> None:
    text = f"energon-lite {name}: not in this version; {instead}"
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, hidden=True, context_settings=settings, help=text)
    def refuse() -> None:
        typer.echo(text, err=True)
        raise typer.Exit(2)


app.command()(_prepare)
for _name in ("info", "lint", "lengths", "plan", "balance", "schema"):
    app.command()(getattr(reports, _name))
for _name, _text in _INSTEAD.items():
    _add_missing(_name, _text)

main: Any = typer.main.get_command(app)


def __getattr__(name: str) -> Any:
    """Returns a command; `prepare_media` is `prepare-media`."""
    found = main.commands.get(name.replace("_", "-"))
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return found
