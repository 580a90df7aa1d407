"""`energon-lite plan` and `schema`: what a metadataset will give, and how one is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from energon_lite.cli.options import AsJson, Trust, errors_as_text
from energon_lite.inspect.plan import plan as plan_run
from energon_lite.inspect.plan_text import plan_text
from energon_lite.length_index import DEFAULT_NAME
from energon_lite.metadataset.schema import metadataset_schema
from energon_lite.packing.settings import Packing


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
    ] = DEFAULT_NAME,
    overlong: Annotated[
        str, typer.Option(help="Of samples longer than a pack: drop, truncate, split, alone, error")
    ] = "drop",
    repeat: Annotated[bool, typer.Option(help="Whether epoch follows epoch for ever.")] = True,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Says what a training run will give: samples, epochs and bytes of each source."""
    with errors_as_text():
        packing = None
        if capacity is not None:
            policy: Any = overlong
            packing = Packing(capacity, lengths=lengths, overlong=policy)
        report = plan_run(
            path, steps=steps, split_part=split_part, batch_size=batch_size, repeat=repeat,
            world_size=world_size, num_streams=num_streams, trust=trust, packing=packing,
        )  # fmt: skip
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else plan_text(report))


def schema() -> None:
    """Prints the JSON Schema of metadataset files, for editors."""
    typer.echo(json.dumps(metadataset_schema(), indent=2))
