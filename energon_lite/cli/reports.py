"""The commands that report: `info`, `lint`, `lengths`, `plan`, `balance` and `schema`."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from energon_lite.cli.options import (
    LENGTHS_NAME,
    METADATASETS,
    AsJson,
    DatasetConfig,
    DatasetPath,
    NumWorkers,
    ShowProgress,
    SplitConfig,
    Trust,
    errors_as_text,
    late,
    print_report,
)

DataPath = Annotated[Path, typer.Argument(metavar="PATH", help="A metadataset file, or a folder.")]
SplitPart = Annotated[str, typer.Option(help="Split of the metadataset or folder.")]


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
    print_report(report, "info_text", as_json)


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
    logger = logging.getLogger("energon_lite")
    level = logger.level
    with errors_as_text(), late("cli.progress.progress_bar")(progress) as bar:
        logger.setLevel(logging.ERROR)  # the report has the warnings
        try:
            report = late("inspect.lint.lint_dataset")(
                path, split_parts=split_parts.split(",") if split_parts else None,
                split_config=split_config, dataset_config=dataset_config,
                num_workers=num_workers, decode=decode, trust=trust, progress=bar,
            )  # fmt: skip
        finally:
            logger.setLevel(level)
    print_report(report, "lint_text", as_json)
    raise typer.Exit(0 if report.is_ok else 1)


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
            path, _encoder(encoder), name=name, meta_dir=meta_dir,
            split_parts=split_parts.split(",") if split_parts else None,
            num_workers=num_workers, trust=trust, progress=bar,
        )  # fmt: skip
    print_report(reports, "lengths_text", as_json)


def _encoder(text: str) -> Any:
    """Returns the task encoder that the user names."""
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


def plan(
    path: DataPath,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the run.")],
    split_part: SplitPart = "train",
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
    """Predicts what a training run will read: samples, epochs and bytes of each source."""
    with errors_as_text():
        packing = None
        if capacity is not None:
            make = late("batching.rules.Packing")
            packing = make(capacity, lengths=lengths, overlong=overlong)
        report = late("inspect.forecast.plan")(
            path, steps=steps, split_part=split_part, batch_size=batch_size, repeat=repeat,
            world_size=world_size, num_streams=num_streams, trust=trust, packing=packing,
        )  # fmt: skip
    print_report(report, "plan_text", as_json)


def balance(
    path: DataPath,
    capacity: Annotated[int, typer.Option(min=1, help="Tokens of a pack.")],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    lengths: Annotated[str, typer.Option(help="Name of the length index.")] = LENGTHS_NAME,
    steps: Annotated[int, typer.Option(min=1, help="Steps to look at.")] = 512,
    window: Annotated[int, typer.Option(min=1, help="Packs in a window.")] = 64,
    token: Annotated[float, typer.Option(min=0, help="Cost of a token.")] = 1,
    token_squared: Annotated[
        float, typer.Option(min=0, help="Cost of a pair of tokens of one sample.")
    ] = 1 / 24_576,
    split_part: SplitPart = "train",
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Compares padded batches and orders of packs: padding, imbalance of ranks, idle time."""
    with errors_as_text():
        cost = late("balance.CostModel")(token, token_squared)
        report = late("inspect.forecast.balance_report")(
            path, lengths=lengths, capacity=capacity, ranks=ranks, steps=steps, window=window,
            split_part=split_part, cost=cost, trust=trust,
        )  # fmt: skip
    print_report(report, "balance_text", as_json)


def schema() -> None:
    """Prints the JSON Schema of metadataset files, for editors."""
    typer.echo(json.dumps(late("metadataset.schema.metadataset_schema")(), indent=2))
