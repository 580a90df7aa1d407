"""The command `energon-lite`: reads arguments, calls what does the work, prints."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from energon_lite.inspect.info import dataset_info
from energon_lite.inspect.lint import lint_dataset
from energon_lite.inspect.plan import plan as plan_run
from energon_lite.inspect.plan_text import plan_text
from energon_lite.inspect.text import info_text, lint_text, prepared_text, size_text
from energon_lite.metadataset.schema import metadataset_schema
from energon_lite.prepare import Progress as PrepareProgress
from energon_lite.prepare import prepare_dataset
from energon_lite.prepare.config import CRUDE, fields_of, sample_type_names
from energon_lite.prepare.indexing import first_parts
from energon_lite.prepare.shards import find_shards, local_root
from energon_lite.prepare.splits import parse_ratio
from energon_lite.storage.nvmeta import DEFAULT_DATASET, META, is_prepared

app = typer.Typer(
    name="energon-lite",
    help="Prepares, describes and checks WebDataset folders in the format of Megatron-Energon.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_ENERGON_SHUFFLE_SEED = 42  # of Energon's --shuffle-tars

DatasetPath = Annotated[Path, typer.Argument(metavar="PATH", help="The dataset's folder.")]
Trust = Annotated[bool, typer.Option(help="Run code that the dataset names (sample_loader.py).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
ShowProgress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="By default on if stderr is a terminal."),
]
NumWorkers = Annotated[
    int | None,
    typer.Option("--num-workers", min=0, help="Processes; by default one per core, at most 16."),
]
SplitConfig = Annotated[
    str | None,
    typer.Option("--split-config", help="Split file in .nv-meta.  [default: split.yaml]"),
]
DatasetConfig = Annotated[
    str | None,
    typer.Option("--dataset-config", help="Dataset file in .nv-meta.  [default: dataset.yaml]"),
]

SplitRatio = Annotated[str | None, typer.Option(help="Shares of train,val,test, such as 8,1,1.")]
SplitPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--split-parts", help="name:regex, matched from the start of a shard's path. Repeatable."
    ),
]
SampleType = Annotated[str | None, typer.Option(help="Class of the samples, or CrudeWebdataset.")]
FieldMapTexts = Annotated[
    list[str] | None,
    typer.Option("--field-map", help="JSON: {field: part, ...}, or field=part. Repeatable."),
]
Exclude = Annotated[
    str | None, typer.Option(help="Regex; tars whose relative path holds a match are left out.")
]
ShuffleTars = Annotated[bool, typer.Option("--shuffle-tars", help="Before the ratio split.")]
TarIndexOnly = Annotated[
    bool, typer.Option("--tar-index-only", help="Only index a prepared dataset again.")
]
SkipDatasetYaml = Annotated[
    bool, typer.Option("--skip-dataset-yaml", help="Write no dataset.yaml.")
]
DatasetYamlName = Annotated[str, typer.Option(help="Name of dataset.yaml.")]
ForceOverwrite = Annotated[
    bool, typer.Option("--force-overwrite", help="Prepare again, and replace existing configs.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Read and check all, write nothing.")]
NonInteractive = Annotated[bool, typer.Option("--non-interactive", help="Never ask.")]


def main() -> None:
    """Runs the command line; the entry point of the script `energon-lite`."""
    app()


def _print_version(is_asked: bool) -> None:
    if is_asked:
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


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """Turns errors of data into a text on stderr and exit code 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"Error: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"  {note}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("Stopped. Run the same command again to continue.", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _warnings_in_report() -> Iterator[None]:
    """Keeps warnings out of the log, for a command whose report has them."""
    logger = logging.getLogger("energon_lite")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _bar(wanted: bool | None) -> Iterator[Callable[[str, int, int, str], None] | None]:
    """Gives a function (what, done, total, more) that draws a bar on stderr, or None."""
    console = Console(stderr=True)
    if not (console.is_terminal if wanted is None else wanted):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("{task.fields[more]}"), TimeRemainingColumn(), console=console
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int, more: str) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total, more=more)
            progress.update(tasks[what], completed=done, more=more)

        yield show


# ---------------------------------------------------------------------------------------- prepare


@app.command()
def prepare(
    path: DatasetPath,
    split_ratio: SplitRatio = None,
    split_parts: SplitPatterns = None,
    sample_type: SampleType = None,
    field_map: FieldMapTexts = None,
    exclude: Exclude = None,
    num_workers: NumWorkers = None,
    shuffle_tars: ShuffleTars = False,
    tar_index_only: TarIndexOnly = False,
    skip_dataset_yaml: SkipDatasetYaml = False,
    dataset_yaml_name: DatasetYamlName = DEFAULT_DATASET,
    force_overwrite: ForceOverwrite = False,
    dry_run: DryRun = False,
    non_interactive: NonInteractive = False,
    as_json: AsJson = False,
    progress: ShowProgress = None,
) -> None:
    """Indexes the tars of a folder and writes its .nv-meta; continues after an interruption."""
    # A closed stdin is None.
    can_ask = sys.stdin is not None and sys.stdin.isatty() and not non_interactive
    parts = [_split_part(text) for text in split_parts or ()]
    fields = _field_map(field_map or [])
    with _errors_as_text():
        local_root(path)
        if not tar_index_only:
            if is_prepared(path) and not force_overwrite and can_ask:
                force_overwrite = typer.confirm(f"{path} is already prepared. Do it again?")
            if split_ratio is None and not parts:
                split_ratio = _ask_ratio(can_ask)
            if not skip_dataset_yaml and not (path / META / dataset_yaml_name).is_file():
                sample_type = sample_type or _ask_sample_type(can_ask)
            if sample_type not in (None, CRUDE) and not fields:
                fields = _ask_fields(path, str(sample_type), exclude, can_ask)
        with _bar(progress) as bar:
            report = prepare_dataset(
                path,
                split_ratio=split_ratio,
                split_parts=parts or None,
                sample_type=None if skip_dataset_yaml else sample_type,
                field_map=None if skip_dataset_yaml else fields,
                dataset_config=dataset_yaml_name,
                exclude=exclude,
                num_workers=num_workers,
                shuffle_seed=_ENERGON_SHUFFLE_SEED if shuffle_tars else None,
                tar_index_only=tar_index_only,
                force_overwrite=force_overwrite,
                dry_run=dry_run,
                progress=_indexing_bar(bar),
            )
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else prepared_text(report))


def _indexing_bar(
    bar: Callable[[str, int, int, str], None] | None,
) -> Callable[[PrepareProgress], None] | None:
    if bar is None:
        return None
    return lambda at: bar(
        "Indexing shards",
        at.shards,
        at.num_shards,
        f"{at.samples:,} samples, {size_text(at.size_bytes)} of {size_text(at.total_bytes)}",
    )


def _split_part(text: str) -> tuple[str, str]:
    name, colon, pattern = text.partition(":")
    if not (name and colon and pattern):
        raise typer.BadParameter(f"{text!r} is not name:pattern", param_hint="--split-parts")
    return name, pattern


def _field_map(texts: list[str]) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                fields.update(json.loads(text))
            except json.JSONDecodeError as error:
                message = f"{text!r} is no valid JSON: {error}"
                raise typer.BadParameter(message, param_hint="--field-map") from None
            continue
        name, equals, part = text.partition("=")
        if not (name and equals and part):
            message = f"{text!r} is neither field=part nor a JSON object"
            raise typer.BadParameter(message, param_hint="--field-map")
        fields[name] = part
    return fields or None


def _missing(option: str, what: str) -> typer.BadParameter:
    return typer.BadParameter(f"missing: {what}", param_hint=option)


def _ask_ratio(can_ask: bool) -> str:
    if not can_ask:
        raise _missing("--split-ratio", "shares of train,val,test, or give --split-parts")
    while True:
        ratio: str = typer.prompt("Split into train,val,test", default="8,1,1")
        try:
            parse_ratio(ratio)
        except ValueError as error:
            typer.echo(f"{error}", err=True)
        else:
            return ratio


def _ask_sample_type(can_ask: bool) -> str:
    names = sample_type_names()
    if not can_ask:
        raise _missing("--sample-type", f"one of {', '.join(names)}; or give --skip-dataset-yaml")
    for number, name in enumerate(names):
        typer.echo(f"{number:3}. {name}")
    while True:
        answer = typer.prompt("Sample type (number or name)")
        if answer in names:
            return str(answer)
        if answer.isdigit() and int(answer) < len(names):
            return names[int(answer)]
        typer.echo(f"{answer!r} is not in the list", err=True)


def _ask_fields(path: Path, sample_type: str, exclude: str | None, can_ask: bool) -> dict[str, str]:
    specs = fields_of(sample_type)
    if not can_ask:
        names = ", ".join(spec.name for spec in specs if spec.is_required)
        raise _missing("--field-map", f"the parts for the fields of {sample_type} ({names})")
    parts = first_parts(find_shards(path, exclude)[0].path)
    typer.echo(f"Parts of the first sample: {', '.join(parts)}. Also possible: json[a][0], jpg,png")
    fields: dict[str, str] = {}
    for spec in specs:
        optional = "" if spec.is_required else ", empty for none"
        question = f"Part for {spec.name!r} ({spec.type_name}{optional})"
        answer = typer.prompt(question, default=None if spec.is_required else "")
        if answer:
            fields[spec.name] = answer
    return fields


# ----------------------------------------------------------------------------------- info and lint


@app.command()
def info(
    path: DatasetPath,
    split_config: SplitConfig = None,
    dataset_config: DatasetConfig = None,
    as_json: AsJson = False,
) -> None:
    """Describes a prepared folder: size, sample type, parts and split parts."""
    with _errors_as_text():
        report = dataset_info(path, split_config=split_config, dataset_config=dataset_config)
    typer.echo(json.dumps(report, indent=2) if as_json else info_text(report))


@app.command()
def lint(
    path: DatasetPath,
    split_parts: Annotated[
        str | None, typer.Option(help="Parts to decode, such as train,val.  [default: all]")
    ] = None,
    split_config: SplitConfig = None,
    dataset_config: DatasetConfig = None,
    num_workers: NumWorkers = None,
    decode: Annotated[bool, typer.Option(help="Whether to decode the samples.")] = True,
    trust: Trust = False,
    as_json: AsJson = False,
    progress: ShowProgress = None,
) -> None:
    """Reads a prepared folder and decodes every sample; exit code 1 if anything is wrong."""
    with _errors_as_text(), _warnings_in_report(), _bar(progress) as bar:
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


# -------------------------------------------------------------------------------- plan and schema


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A metadataset file, or a folder.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the run.")],
    split_part: Annotated[str, typer.Option(help="Split of the metadataset or folder.")] = "train",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a rank in a step.")] = 1,
    world_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    num_streams: Annotated[
        int | None, typer.Option(min=1, help="Ranks x loader workers.  [default: world size]")
    ] = None,
    repeat: Annotated[bool, typer.Option(help="Whether epoch follows epoch for ever.")] = True,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Says what a training run will give: samples, epochs and bytes of each source."""
    with _errors_as_text():
        report = plan_run(
            path, steps=steps, split_part=split_part, batch_size=batch_size, repeat=repeat,
            world_size=world_size, num_streams=num_streams, trust=trust,
        )  # fmt: skip
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else plan_text(report))


@app.command()
def schema() -> None:
    """Prints the JSON Schema of metadataset files, for editors."""
    typer.echo(json.dumps(metadataset_schema(), indent=2))


if __name__ == "__main__":
    main()
