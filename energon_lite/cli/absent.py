"""Commands of `energon` that are not here: each says what to use."""

from __future__ import annotations

from collections.abc import Callable

import typer

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


def add_absent(app: typer.Typer) -> None:
    """Adds a hidden command for each that Energon has and this version does not."""
    for name, instead in _INSTEAD.items():
        text = f"energon-lite {name}: not in this version; {instead}"
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(name, hidden=True, context_settings=settings, help=text)(_refusal(text))


def _refusal(text: str) -> Callable[[], None]:
    def refuse() -> None:
        typer.echo(text, err=True)
        raise typer.Exit(2)

    return refuse
