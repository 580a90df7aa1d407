"""`energon-lite info` and `lint`: what is in a folder, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from energon_lite.cli.options import (
    AsJson,
    DatasetConfig,
    DatasetPath,
    NumWorkers,
    ShowProgress,
    SplitConfig,
    Trust,
    errors_as_text,
    progress_bar,
    warnings_in_report,
)
from energon_lite.inspect.info import dataset_info
from energon_lite.inspect.lint import lint_dataset
from energon_lite.inspect.text import info_text, lint_text


def info(
    path: DatasetPath,
    split_config: SplitConfig = None,
    dataset_config: DatasetConfig = None,
    as_json: AsJson = False,
) -> None:
    """Describes a prepared folder: size, sample type, parts and split parts."""
    with errors_as_text():
        report = dataset_info(path, split_config=split_config, dataset_config=dataset_config)
    typer.echo(json.dumps(report, indent=2) if as_json else info_text(report))


def lint(
    path: DatasetPath,
    split_parts: Annotated[
        str | None, typer.Option(help="Parts to decode, such as train,val.  [default: all]")
    ] = None,
    split_config: SplitConfig = None,
    dataset_config: DatasetConfig = None,
    num_workers: NumWorkers = None,
    decode: Annotated[bool, typer.Option(help="Whether to decode the samples.")] = True,
    trust: Trust = None,
    as_json: AsJson = False,
    progress: ShowProgress = None,
) -> None:
    """Reads a prepared folder and decodes every sample; exit code 1 if anything is wrong."""
    with errors_as_text(), warnings_in_report(), progress_bar(progress) as bar:
        report = lint_dataset(
            path,
            split_parts=split_parts.split(",") if split_parts else None,
            split_config=split_config,
            dataset_config=dataset_config,
            num_workers=num_workers,
            decode=decode,
            trust=trust,
            progress=None if bar is None else lambda what, done, all_: bar(what, done, all_, ""),
        )
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else lint_text(report))
    raise typer.Exit(0 if report.is_ok else 1)
