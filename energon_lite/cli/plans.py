"""`energon-lite plan` and `schema`: what a metadataset will yield, and its grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from energon_lite.cli.options import LENGTHS_NAME, AsJson, Trust, errors_as_text, late


def plan(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A metadataset file, or a folder.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the run.")],
    split_part: Annotated[str, typer.Option(help="Split of the metadataset or folder.")] = "train",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a rank in a step.")] = 1,
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    num_streams: Annotated[
        int | None, typer.Option(min=1, help="Ranks x loader workers.  [default: world size]")
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a pack: batches are of packs.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Name of the length index that packs are planned by.")
    ] = LENGTHS_NAME,
    overlong: Annotated[
        str, typer.Option(help="Of samples longer than a pack: drop, truncate, split, alone, error")
    ] = "drop",
    repeat: Annotated[bool, typer.Option(help="Whether epoch follows epoch for ever.")] = True,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Foresees what a training run will read: samples, epochs and bytes of each source."""
    with errors_as_text():
        packing = None
        if capacity is not None:
            make = late("batching.rules.Packing")
            packing = make(capacity, lengths=lengths, overlong=overlong)
        report = late("inspect.plan.plan")(
            path, steps=steps, split_part=split_part, batch_size=batch_size, repeat=repeat,
            world_size=world_size, num_streams=num_streams, trust=trust, packing=packing,
        )  # fmt: skip
    text = late("inspect.plan_text.plan_text")
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else text(report))


def schema() -> None:
    """Prints the JSON Schema of metadataset files, for editors."""
    typer.echo(json.dumps(late("metadataset.schema.metadataset_schema")(), indent=2))
