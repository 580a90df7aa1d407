"""`energon-lite info` and `lint`: what is in a folder, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from energon_lite.cli.options import (
    METADATASETS,
    AsJson,
    DatasetConfig,
    DatasetPath,
    ShowProgress,
    SplitConfig,
    Trust,
    errors_as_text,
    late,
)


def info(
    path: DatasetPath,
    split_config: SplitConfig = None,
    dataset_config: DatasetConfig = None,
    as_json: AsJson = False,
) -> None:
    """Describes a prepared folder or a metadataset: size, sample type, parts and split parts."""
    with errors_as_text():
        if path.suffix in METADATASETS and not path.is_dir():
            report = late("inspect.blend_info.metadataset_info")(path)
        else:
            report = late("inspect.info.dataset_info")(
                path, split_config=split_config, dataset_config=dataset_config
            )
    typer.echo(json.dumps(report, indent=2) if as_json else late("inspect.text.info_text")(report))


def lint(
    path: DatasetPath,
    split_parts: Annotated[
        str | None, typer.Option(help="Parts to decode, such as train,val.  [default: all]")
    ] = None,
    split_config: SplitConfig = None,
    dataset_config: DatasetConfig = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "--num-workers", "--parallel", min=0,
            help="Processes; by default one per core, at most 16.",
        ),
    ] = None,
    decode: Annotated[bool, typer.Option(help="Whether to decode the samples.")] = True,
    trust: Trust = None,
    as_json: AsJson = False,
    progress: ShowProgress = None,
) -> None:  # fmt: skip
    """Reads a prepared folder and decodes every sample; exit code 1 if anything is wrong."""
    shown = late("cli.progress.progress_bar")(progress)
    with errors_as_text(), late("cli.progress.warnings_in_report")(), shown as bar:
        report = late("inspect.lint.lint_dataset")(
            path,
            split_parts=split_parts.split(",") if split_parts else None,
            split_config=split_config,
            dataset_config=dataset_config,
            num_workers=num_workers,
            decode=decode,
            trust=trust,
            progress=late("cli.progress.three")(bar),
        )
    text = late("inspect.text.lint_text")
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else text(report))
    raise typer.Exit(0 if report.is_ok else 1)
