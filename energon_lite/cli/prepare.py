"""`energon-lite prepare`: its options; `wizard` asks for what they leave open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from energon_lite.cli.options import (
    DATASET_YAML,
    METADATASETS,
    AsJson,
    NumWorkers,
    ShowProgress,
    errors_as_text,
    late,
    print_report,
)

_ENERGON_SHUFFLE_SEED = 42  # of Energon's --shuffle-tars
_NO_MEDIA = (
    "media metadata are not in this version; prepare without this option. Nothing that reads "
    "pictures needs them"
)

DatasetOrFile = Annotated[
    Path, typer.Argument(metavar="PATH", help="The dataset's folder, or a metadataset to check.")
]
Tars = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARS",
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
    str | None, typer.Option(help="Regex; tars whose relative path holds a match are skipped.")
]
ShuffleTars = Annotated[bool, typer.Option("--shuffle-tars", help="Before the ratio split.")]
TarIndexOnly = Annotated[
    bool, typer.Option("--tar-index-only", help="Only index a prepared dataset again.")
]
FixDuplicates = Annotated[
    bool,
    typer.Option(
        "--fix-duplicates", help="Where tars share sample keys, write the tars again with others."
    ),
]
SkipDatasetYaml = Annotated[
    bool, typer.Option("--skip-dataset-yaml", help="Write no dataset.yaml.")
]
DatasetYamlName = Annotated[str, typer.Option(help="Name of dataset.yaml.")]
ForceOverwrite = Annotated[
    bool, typer.Option("--force-overwrite", help="Prepare again, and replace existing configs.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Read and check all, write nothing.")]
FollowLinks = Annotated[
    bool,
    typer.Option("--follow-links", help="Write also where links lead out of the folder."),
]
NonInteractive = Annotated[bool, typer.Option("--non-interactive", help="Never ask.")]
TmpPath = Annotated[
    Path | None, typer.Option(hidden=True, help="Not needed: the index is built in the dataset.")
]
MediaGlob = Annotated[str | None, typer.Option("--media-metadata-by-glob", hidden=True)]
MediaHeader = Annotated[bool, typer.Option("--media-metadata-by-header", hidden=True)]
MediaExtension = Annotated[bool, typer.Option("--media-metadata-by-extension", hidden=True)]


def prepare(
    path: DatasetOrFile,
    tars: Tars = None,
    split_ratio: SplitRatio = None,
    split_parts: SplitPatterns = None,
    sample_type: SampleType = None,
    field_map: FieldMapTexts = None,
    exclude: Exclude = None,
    num_workers: NumWorkers = None,
    shuffle_tars: ShuffleTars = False,
    tar_index_only: TarIndexOnly = False,
    fix_duplicates: FixDuplicates = False,
    skip_dataset_yaml: SkipDatasetYaml = False,
    dataset_yaml_name: DatasetYamlName = DATASET_YAML,
    force_overwrite: ForceOverwrite = False,
    dry_run: DryRun = False,
    non_interactive: NonInteractive = False,
    follow_links: FollowLinks = False,
    tmp_path: TmpPath = None,
    media_by_glob: MediaGlob = None,
    media_by_header: MediaHeader = False,
    media_by_extension: MediaExtension = False,
    as_json: AsJson = False,
    progress: ShowProgress = None,
) -> None:
    """Indexes the tars of a folder and writes its .nv-meta; continues after an interruption."""
    del tmp_path
    if media_by_glob or media_by_header or media_by_extension:
        raise typer.BadParameter(_NO_MEDIA, param_hint="--media-metadata-by-...")
    parts = [_split_part(text) for text in split_parts or ()]
    fields = _field_map(field_map or [])
    with errors_as_text():
        if path.suffix in METADATASETS and not path.is_dir():
            late("metadataset.energon_api.prepare_metadataset")(path)
            typer.echo(f"{path} is a metadataset without mistakes; there is nothing to prepare")
            return
        request = late("prepare.decisions.Request")(
            split_ratio, parts or None, sample_type, fields, dataset_config=dataset_yaml_name,
            exclude=exclude, shuffle_seed=_ENERGON_SHUFFLE_SEED if shuffle_tars else None,
            force_overwrite=force_overwrite, paths=tars or None, follow_links=follow_links,
            num_workers=num_workers, tar_index_only=tar_index_only,
            fix_duplicates=fix_duplicates, dry_run=dry_run,
        )  # fmt: skip
        if not tar_index_only:
            root = late("prepare.choose_shards.local_root")(path)
            answers = late("cli.wizard.Answers")(not non_interactive, on_stderr=as_json)
            request = late("cli.wizard.complete")(
                root, request, answers, not skip_dataset_yaml, non_interactive
            )
        with late("cli.progress.progress_bar")(progress) as bar:
            report = late("prepare.run.prepare_as")(path, request._replace(progress=_indexing(bar)))
    print_report(report, "prepared_text", as_json)
    _hint(request, skip_dataset_yaml or tar_index_only)


def _indexing(bar: Any) -> Any:
    """Returns a function that draws the `Progress` of `prepare_dataset`; None without a bar."""
    size_text = late("inspect.text.size_text")

    def show(at: Any) -> None:
        size = f"{size_text(at.size_bytes)} of {size_text(at.total_bytes)}"
        bar("Indexing shards", at.shards, at.num_shards, f"{at.samples:,} samples, {size}")

    return None if bar is None else show


def _hint(request: Any, has_config: bool) -> None:
    """Prints what is left to do."""
    if request.loader_parts is not None:
        typer.echo(
            "Edit .nv-meta/sample_loader.py: it makes the fields of a sample, and runs with "
            "trust=True (--trust)",
            err=True,
        )
    elif request.sample_type is None and not has_config:
        typer.echo("No dataset.yaml was written; give --sample-type, or write it", err=True)


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
                fields.update(late("core.json_text.read_json")(text, repr(text)))
            except ValueError as error:
                message = str(error)
                raise typer.BadParameter(message, param_hint="--field-map") from None
            continue
        name, equals, part = text.partition("=")
        if not (name and equals and part):
            message = f"{text!r} is neither field=part nor a JSON object"
            raise typer.BadParameter(message, param_hint="--field-map")
        fields[name] = part
    return fields or None
