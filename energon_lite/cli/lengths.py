"""`energon-lite lengths`: measures every sample once, and stores its length."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from energon_lite.cli.options import (
    LENGTHS_NAME,
    AsJson,
    NumWorkers,
    ShowProgress,
    Trust,
    errors_as_text,
    late,
)


def lengths(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder, or a metadataset file.")],
    encoder: Annotated[
        str,
        typer.Option(
            "--with",
            help="module:Class of a task encoder with sample_length, or module:function of a "
            "sample; modules of the current folder are found, too.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the index, such as a tokenizer's.")] = LENGTHS_NAME,
    meta_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the index, where the dataset itself is read-only."),
    ] = None,
    split_parts: Annotated[
        str | None, typer.Option(help="Parts to measure, such as train,val.  [default: all]")
    ] = None,
    num_workers: NumWorkers = None,
    trust: Trust = None,
    as_json: AsJson = False,
    progress: ShowProgress = None,
) -> None:
    """Stores the length of every sample, for blends by tokens; continues after an interruption."""
    with errors_as_text(), late("cli.progress.progress_bar")(progress) as bar:
        reports = late("length_index.measure_lengths")(
            path,
            _encoder(encoder),
            name=name,
            meta_dir=meta_dir,
            split_parts=split_parts.split(",") if split_parts else None,
            num_workers=num_workers,
            trust=trust,
            progress=late("cli.progress.three")(bar),
        )
    if as_json:
        typer.echo(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        text = late("inspect.text.lengths_text")
        typer.echo("\n".join(text(report) for report in reports))


def _encoder(text: str) -> Any:
    """Makes the task encoder that the user names."""
    module_name, colon, attribute = text.partition(":")
    if not (module_name and colon and attribute):
        raise typer.BadParameter(
            f"{text!r} is neither module:Class nor module:function", param_hint="--with"
        )
    # At the end: a dataset in the current folder cannot take the place of installed modules.
    sys.path.append(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{text}: {error}", param_hint="--with") from None
    encoder = late("task_encoder.base.TaskEncoder")
    if isinstance(found, type) and issubclass(found, encoder):
        return found()
    if isinstance(found, encoder):
        return found
    if callable(found) and not isinstance(found, type):
        return late("length_index.LengthFunction")(found)
    raise typer.BadParameter(
        f"{text} is a {type(found).__name__}, neither a task encoder nor a function",
        param_hint="--with",
    )
