"""The commands as objects: what `megatron.energon.tools.prepare.command` and its like stand for."""

from __future__ import annotations

from typing import Any

import typer.main

from energon_lite.cli import app

main: Any = typer.main.get_command(app)


def __getattr__(name: str) -> Any:
    """Returns a command; `prepare_media` is `prepare-media`."""
    command = main.commands.get(name.replace("_", "-"))
    if command is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return command
