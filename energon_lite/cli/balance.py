"""`energon-lite balance`: how long ranks would wait for each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from energon_lite.cli.options import LENGTHS_NAME, AsJson, Trust, errors_as_text, late


def balance(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A metadataset file, or a folder.")],
    capacity: Annotated[int, typer.Option(min=1, help="Tokens of a pack.")],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    lengths: Annotated[str, typer.Option(help="Name of the length index.")] = LENGTHS_NAME,
    steps: Annotated[int, typer.Option(min=1, help="Steps to look at.")] = 512,
    window: Annotated[int, typer.Option(min=1, help="Packs in a window.")] = 64,
    token: Annotated[float, typer.Option(min=0, help="Cost of a token.")] = 1,
    token_squared: Annotated[
        float, typer.Option(min=0, help="Cost of a pair of tokens of one sample.")
    ] = 1 / 24_576,
    split_part: Annotated[str, typer.Option(help="Split of the metadataset or folder.")] = "train",
    trust: Trust = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the report into this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compares padded batches and orders of packs: padding, imbalance of ranks, idle time."""
    with errors_as_text():
        cost = late("balance.CostModel")(token, token_squared)
        report = late("inspect.balance.balance_report")(
            path, lengths=lengths, capacity=capacity, ranks=ranks, steps=steps, window=window,
            split_part=split_part, cost=cost, trust=trust,
        )  # fmt: skip
        if svg is not None:
            svg.write_text(late("inspect.balance_svg.balance_svg")(report), encoding="utf-8")
    text = late("inspect.text.balance_text")
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else text(report))
