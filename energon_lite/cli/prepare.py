"""`energon-lite prepare`, with its questions."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from energon_lite.cli.options import (
    AsJson,
    DatasetPath,
    NumWorkers,
    ShowProgress,
    errors_as_text,
    progress_bar,
)
from energon_lite.inspect.text import prepared_text, size_text
from energon_lite.prepare import Progress as PrepareProgress
from energon_lite.prepare import prepare_dataset
from energon_lite.prepare.config import CRUDE, fields_of, sample_type_names
from energon_lite.prepare.indexing import first_parts
from energon_lite.prepare.shards import Shard, find_shards, local_root
from energon_lite.prepare.splits import parse_ratio
from energon_lite.storage.nvmeta import DEFAULT_DATASET, META, is_prepared

_ENERGON_SHUFFLE_SEED = 42  # of Energon's --shuffle-tars

Tars = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARS]...",
        help="Tars below the folder: names, brace patterns, globs (quote them).  [default: all]",
    ),
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


def prepare(
    path: DatasetPath,
    tars: Tars = None,
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
    fields: Mapping[str, str | list[str]] | None = _field_map(field_map or [])
    with errors_as_text():
        local_root(path)
        if not tar_index_only:
            if is_prepared(path) and not force_overwrite and can_ask:
                force_overwrite = typer.confirm(f"{path} is already prepared. Do it again?")
            if split_ratio is None and not parts:
                split_ratio = _ask_ratio(can_ask)
            if not skip_dataset_yaml and not (path / META / dataset_yaml_name).is_file():
                sample_type = sample_type or _ask_sample_type(can_ask)
            if sample_type not in (None, CRUDE) and not fields:
                shards = functools.partial(find_shards, path, exclude, tars or None)
                fields = _ask_fields(shards, str(sample_type), can_ask)
        with progress_bar(progress) as bar:
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
                paths=tars or None,
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


def _field_map(texts: list[str]) -> dict[str, str | list[str]] | None:
    fields: dict[str, str | list[str]] = {}
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


def _ask_fields(
    shards: Callable[[], list[Shard]], sample_type: str, can_ask: bool
) -> dict[str, str]:
    specs = fields_of(sample_type)
    if not can_ask:
        names = ", ".join(spec.name for spec in specs if spec.is_required)
        raise _missing("--field-map", f"the parts for the fields of {sample_type} ({names})")
    parts = first_parts(shards()[0].path)
    typer.echo(f"Parts of the first sample: {', '.join(parts)}. Also possible: json[a][0], jpg,png")
    fields: dict[str, str] = {}
    for spec in specs:
        optional = "" if spec.is_required else ", empty for none"
        question = f"Part for {spec.name!r} ({spec.type_name}{optional})"
        answer = typer.prompt(question, default=None if spec.is_required else "")
        if answer:
            fields[spec.name] = answer
    return fields
