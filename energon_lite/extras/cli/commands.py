"""All commands: `app` for the script, and one object for each name that Energon imports."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import sys
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import typer
import typer.main
from typer import Argument, Option

from energon_lite.extras.cli import options
from energon_lite.extras.cli.command_examples import EXAMPLES
from energon_lite.extras.cli.options import bar_of, errors_as_text, late, print_report

KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ENERGON_SHUFFLE_SEED = 42  # of Energon's --shuffle-tars
_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
# Commands of `energon` that are not here, and what to use.
_INSTEAD = {
    "analyze-debug": "not in this version; use `loader.stats()` for what a run read of each "
    "source, the loader's `skip_log` for the samples that failed, and `energon-lite plan PATH` for "
    "what it will read",
}

app = typer.Typer(
    name="energon-lite",
    help="Prepares, describes and checks WebDataset folders in the format of Megatron-Energon.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"energon-lite {importlib.import_module('energon_lite').__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = Option(
        False, "--version", "-V", callback=_print_version, is_eager=True, help="Print it."
    ),
) -> None:
    del version


# --------------------------------------------------------------------------------------- prepare


@app.command()
def prepare(
    path: Path = Argument(metavar="PATH", help="A folder, a file of samples, or a metadataset."),
    tars: list[str] | None = options.TARS,
    split_ratio: str | None = Option(None, help="Shares of train,val,test, such as 8,1,1."),
    split_parts: list[str] | None = Option(
        None, help="name:regex, matched from the start of a shard's path. Repeatable."
    ),
    sample_type: str | None = Option(None, help="Class of the samples, or CrudeWebdataset."),
    field_map: list[str] | None = Option(
        None, help="JSON: {field: part, ...}, or field=part. Repeatable."
    ),
    exclude: str | None = Option(
        None, help="Regex; tars whose relative path holds a match are skipped."
    ),
    num_workers: int | None = options.NUM_WORKERS,
    shuffle_tars: bool = Option(False, "--shuffle-tars", help="Before the ratio split."),
    tar_index_only: bool = Option(
        False, "--tar-index-only", help="Only index a prepared dataset again."
    ),
    fix_duplicates: bool = options.FIX_DUPLICATES,
    skip_dataset_yaml: bool = Option(False, "--skip-dataset-yaml", help="Write no dataset.yaml."),
    dataset_yaml_name: str = Option(options.DATASET_YAML, help="Name of dataset.yaml."),
    force_overwrite: bool = Option(
        False, "--force-overwrite", help="Prepare again, and replace existing configs."
    ),
    non_interactive: bool = Option(False, "--non-interactive", help="Never ask."),
    follow_links: bool = Option(
        False, "--follow-links", help="Write also where links lead out of the folder."
    ),
    tmp_path: Path | None = options.TMP_PATH,
    media_by_glob: str | None = options.MEDIA_BY_GLOB,
    media_by_header: bool = options.MEDIA_BY_HEADER,
    media_by_extension: bool = options.MEDIA_BY_EXTENSION,
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Indexes the tars of a folder and writes its .nv-meta, or indexes a file of samples."""
    del tmp_path
    media = (media_by_glob, media_by_header, media_by_extension)
    if tar_index_only and any(media):
        text = "not with --tar-index-only; run `energon-lite prepare-media` after it"
        raise typer.BadParameter(text, param_hint="--media-metadata-by-...")
    request = late("extras.prepare.decisions.Request")(
        split_ratio, _split_parts(split_parts or []), sample_type, _field_map(field_map or []),
        dataset_config=dataset_yaml_name, exclude=exclude,
        shuffle_seed=_ENERGON_SHUFFLE_SEED if shuffle_tars else None, follow_links=follow_links,
        force_overwrite=force_overwrite, paths=tars or None, num_workers=num_workers,
        tar_index_only=tar_index_only, fix_duplicates=fix_duplicates,
        media_filter=_media_filter(*media) if any(media) else None,
    )  # fmt: skip
    _prepare(path, request, not skip_dataset_yaml, non_interactive, as_json, progress)


@app.command("prepare-media")
def prepare_media(
    path: Path = Argument(metavar="PATH", help="A prepared dataset, or a folder of files."),
    by_glob: str | None = options.MEDIA_BY_GLOB,
    by_header: bool = options.MEDIA_BY_HEADER,
    by_extension: bool = options.MEDIA_BY_EXTENSION,
    num_workers: int | None = options.NUM_WORKERS,
    tmp_path: Path | None = options.TMP_PATH,
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Stores size, length and format of images, videos and recordings, without decoding them."""
    del tmp_path
    media_filter = _media_filter(by_glob, by_header, by_extension)
    with errors_as_text(), bar_of(progress, as_json) as bar:
        report = late("extras.prepare.prepare_media.prepare_media")(
            path, media_filter, num_workers=num_workers, progress=_indexing(bar, "files")
        )
    print_report(report, "media_text", as_json)


def _media_filter(by_glob: str | None, by_header: bool, by_extension: bool) -> Any:
    with errors_as_text():
        make = late("extras.media.media_headers.MediaFilterConfig")
        return make.parse(by_glob, by_header, by_extension)


def _prepare(
    path: Path,
    request: Any,
    needs_config: bool,
    non_interactive: bool,
    as_json: bool,
    progress: bool | None,
) -> None:
    with errors_as_text():
        if options.is_metadataset(path):
            workers = request.num_workers
            found = late("extras.energon.energon_api.prepare_metadataset")(path, workers)
            lines = late("extras.inspect.text.joins_text")(path, found)
            if (
                as_json
            ):  # by the file of a join: how its samples match, or null for one that was there
                joins = {str(file): own and {**vars(own), "path": str(file)} for file, own in found}
                lines = [json.dumps({"path": str(path), "joins": joins}, indent=2)]
            typer.echo("\n".join(lines))
            return
        is_file = late("formats.known.format_of")(path).only_part is not None
        if not (request.tar_index_only or is_file):
            root = late("extras.prepare.choose_shards.data_root")(path)
            answers = late("extras.cli.wizard.Answers")(not non_interactive, on_stderr=as_json)
            request = late("extras.cli.wizard.complete")(
                root, request, answers, needs_config, non_interactive
            )
        with bar_of(progress, as_json) as bar:
            report = late("extras.prepare.run.prepare_as")(
                path, request._replace(progress=_indexing(bar))
            )
    print_report(report, "prepared_text", as_json)
    if request.loader_parts is not None:
        typer.echo(
            "Edit .nv-meta/sample_loader.py: it makes the fields of a sample, and runs with "
            "trust=True (--trust)",
            err=True,
        )
    elif request.sample_type is None and needs_config and not (request.tar_index_only or is_file):
        typer.echo("No dataset.yaml was written; give --sample-type, or write it", err=True)


def _indexing(bar: Any, unit: str = "samples") -> Any:
    """Returns a function that draws the `Progress` of `prepare_dataset`; None without a bar."""
    size_text = late("extras.view.words.size_text")

    def show(at: Any) -> None:
        size = f"{size_text(at.size_bytes)} of {size_text(at.total_bytes)}"
        bar("Indexing shards", at.shards, at.num_shards, f"{at.samples:,} {unit}, {size}")

    return None if bar is None else show


def _pair(text: str, separator: str, problem: str, option: str) -> tuple[str, str]:
    """Cuts a text at the first separator; neither part may be empty."""
    name, found, value = text.partition(separator)
    if not (name and found and value):
        raise typer.BadParameter(f"{text!r} is {problem}", param_hint=option)
    return name, value


def _split_parts(texts: list[str]) -> list[tuple[str, str]] | None:
    return [_pair(text, ":", "not name:pattern", "--split-parts") for text in texts] or None


def _field_map(texts: list[str]) -> dict[str, str | list[str]] | None:
    fields: dict[str, str | list[str]] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                fields.update(late("core.json_text.read_json")(text, repr(text)))
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--field-map") from None
        else:
            problem = "neither field=part nor a JSON object"
            fields.update([_pair(text, "=", problem, "--field-map")])
    return fields or None


# --------------------------------------------------------------------------------------- reports


@app.command()
def info(
    path: Path = options.DATASET_PATH,
    split_config: str | None = options.SPLIT_CONFIG,
    dataset_config: str | None = options.DATASET_CONFIG,
    as_json: bool = options.AS_JSON,
) -> None:
    """Describes a prepared folder or a metadataset: size, sample type, parts and split parts."""
    with errors_as_text():
        if options.is_metadataset(path):
            report = late("extras.inspect.blend_info.metadataset_info")(path)
        else:
            report = late("extras.inspect.info.dataset_info")(
                path, split_config=split_config, dataset_config=dataset_config
            )
    print_report(report, "info_text", as_json)


@app.command()
def lint(
    path: Path = options.DATASET_PATH,
    split_parts: str | None = Option(
        None, help="Parts to decode, such as train,val.  [default: all]"
    ),
    split_config: str | None = options.SPLIT_CONFIG,
    dataset_config: str | None = options.DATASET_CONFIG,
    num_workers: int | None = options.PARALLEL,
    decode: bool = Option(True, help="Whether to decode the samples."),
    trust: bool | None = options.TRUST,
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Reads a dataset and decodes every sample; exit code 1 if anything is wrong."""
    logger = logging.getLogger("energon_lite")
    with errors_as_text(), ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # the report has the warnings
        bar = stack.enter_context(bar_of(progress, as_json))
        report = late("extras.inspect.lint.lint_dataset")(
            path, split_parts=split_parts.split(",") if split_parts else None,
            split_config=split_config, dataset_config=dataset_config,
            num_workers=num_workers, decode=decode, trust=trust, progress=bar,
        )  # fmt: skip
    print_report(report, "lint_text", as_json)
    raise typer.Exit(0 if report.is_ok else 1)


@app.command()
def preview(
    path: Path = options.DATA_PATH,
    split_parts: str | None = Option(
        None, "--split", "--split-parts", help="Split; in the terminal several: train,val."
    ),
    dataset_config: str | None = options.DATASET_CONFIG,
    trust: bool | None = options.TRUST,
    encoder: str | None = Option(None, "--with", help="module:Class of the task encoder."),
    batch_size: int | None = Option(None, min=1, help="Samples, or packs, of a batch."),
    state: Path | None = Option(None, help="State of a run, or a trainer's folder with it."),
    slot: int | None = Option(None, min=0, help="Batch of the run to begin with."),
    num_streams: int | None = Option(None, min=1, help="Streams of the run.  [default: --ranks]"),
    ranks: int | None = Option(None, min=1, help="Data-parallel ranks of the run.  [default: 1]"),
    port: int | None = Option(None, min=0, max=65535, help="Of the page.  [default: a free one]"),
    browser: bool = Option(True, help="Whether to open the page in the browser."),
    terminal: bool = Option(False, "--terminal", help="Print samples here, one by one."),
) -> None:
    """Shows samples, batches and charts on a page, for this machine only; extra [preview]."""
    is_asked = bool(encoder or state or ranks or num_streams or not browser)
    is_asked = is_asked or (slot, port) != (None, None)
    with errors_as_text():
        if terminal or (
            why := late("extras.preview.open_page.why_not")(is_asked, sys.stdout.isatty())
        ):
            if not terminal:
                typer.echo(why, err=True)
            _print_samples(path, split_parts or "train", dataset_config, trust)
            return
        late("extras.preview.open_page.open_page")(
            str(path), split_parts, encoder=_encoder(encoder) if encoder else None, state=state,
            slot=slot, num_streams=num_streams, ranks=ranks, batch_size=batch_size, trust=trust,
            dataset_config=dataset_config, port=port or 0, browser=browser, ready=typer.echo,
        )  # fmt: skip


def _print_samples(path: Path, splits: str, dataset_config: str | None, trust: bool | None) -> None:
    """Prints samples one by one, and asks after each whether to continue."""
    with suppress(typer.Abort):  # the end of the answers is a no
        for part in splits.split(","):
            try:
                samples = late("extras.preview.terminal.sample_texts")(
                    path, part, dataset_config=dataset_config, trust=trust
                )
                for number, text in enumerate(samples):
                    typer.echo(f"{part}, sample {number}: {text}")
                    if not typer.confirm("Continue?"):
                        return
            except late("core.errors.EmptyDatasetError"):
                typer.echo(f"{part} is empty")


@app.command()
def lengths(
    path: Path = Argument(metavar="PATH", help="A folder, or a metadataset file."),
    encoder: str = Option(
        ...,
        "--with",
        help="module:Class of a task encoder with sample_length, or module:function of a "
        "sample; modules of the current folder are found, too.",
    ),
    name: str = Option(options.LENGTHS_NAME, help="Of the index, such as a tokenizer's."),
    meta_dir: Path | None = Option(
        None, help="Folder for the index, where the dataset itself is read-only."
    ),
    split_parts: str | None = Option(
        None, help="Parts to measure, such as train,val.  [default: all]"
    ),
    num_workers: int | None = options.NUM_WORKERS,
    trust: bool | None = options.TRUST,
    media_metadata: bool = Option(
        False,
        "--media-metadata",
        help="Pass sizes and durations in the place of images and videos, which are not decoded.",
    ),
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Stores the length of every sample, for blends by tokens; continues after an interruption."""
    with errors_as_text(), bar_of(progress, as_json) as bar:
        reports = late("extras.lengths.length_index.measure_lengths")(
            path, _encoder(encoder), name=name, meta_dir=meta_dir,
            split_parts=split_parts.split(",") if split_parts else None,
            num_workers=num_workers, trust=trust, media_metadata=media_metadata, progress=bar,
        )  # fmt: skip
    print_report(reports, "lengths_text", as_json)


def _encoder(text: str) -> Any:
    """Returns the task encoder that the user names."""
    module_name, attribute = _pair(text, ":", "neither module:Class nor module:function", "--with")
    # At the end: a dataset in the current folder cannot take the place of installed modules.
    sys.path.append(str(Path.cwd()))
    found: Any = None
    try:
        found = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        names = () if found is None else {*dir(found), *getattr(found, "__all__", ())}
        close = get_close_matches(attribute.rpartition(".")[2], names, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise typer.BadParameter(f"{text}: {error}{hint}", param_hint="--with") from None
    encoder = late("task_encoder.base.TaskEncoder")
    if isinstance(found, type) and issubclass(found, encoder):
        return found()
    if isinstance(found, encoder):
        return found
    if callable(found) and not isinstance(found, type):
        return late("extras.lengths.length_index.LengthFunction")(found)
    problem = f"{text} is a {type(found).__name__}, neither a task encoder nor a function"
    raise typer.BadParameter(problem, param_hint="--with")


@app.command()
def plan(
    path: Path = options.DATA_PATH,
    steps: int = Option(min=1, max=10**12, help="Optimizer steps of the run."),
    split_part: str = options.SPLIT_PART,
    batch_size: int = Option(1, min=1, help="Samples of a rank in a step."),
    world_size: int = Option(1, min=1, help="Data-parallel ranks."),
    num_streams: int | None = Option(
        None, min=1, help="Ranks x loader workers.  [default: world size]"
    ),
    capacity: int | None = Option(None, min=1, help="Tokens of a pack: batches are of packs."),
    lengths: str = Option(
        options.LENGTHS_NAME, help="Name of the length index that packs are planned by."
    ),
    overlong: str = Option(
        "drop", help="Of samples longer than a pack: drop, truncate, split, alone, error"
    ),
    repeat: bool = Option(True, help="Whether epoch follows epoch for ever."),
    shuffle_buffer_size: int = Option(0, min=0, help="Samples of a stream's shuffle window."),
    node_groups: int = Option(1, min=1, help="As WorkerConfig(node_groups=...)."),
    trust: bool | None = options.TRUST,
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Predicts what a training run will read: samples, epochs and bytes of each source."""
    with errors_as_text(), bar_of(progress, as_json) as bar:
        packing = None
        if capacity is not None:
            make = late("batching.rules.Packing")
            packing = make(capacity, lengths=lengths, overlong=overlong)
        report = late("extras.inspect.forecast.plan")(
            path, steps=steps, split_part=split_part, batch_size=batch_size, repeat=repeat,
            world_size=world_size, num_streams=num_streams, trust=trust, packing=packing,
            shuffle_buffer_size=shuffle_buffer_size, node_groups=node_groups, progress=bar,
        )  # fmt: skip
    print_report(report, "plan_text", as_json)


@app.command()
def report(
    files: list[Path] = Argument(
        metavar="STATS.jsonl",
        help="What `loader.stats().write_to(path, step)` wrote, of each rank, with the skip log "
        "of the loader.",
    ),
    output: Path | None = options.HTML,
    as_json: bool = options.AS_JSON,
) -> None:
    """Reports what a run did: shares, epochs, rates, skips, its bottleneck and what to change."""
    with errors_as_text():
        _check_page(output)
        _show_report(late("extras.report.run_report.run_report")(files), output, as_json)


@app.command()
def bench(
    path: Path = options.DATA_PATH,
    encoder: str | None = Option(None, "--with", help="module:Class of a task encoder."),
    batch_size: int = Option(8, min=1, help="Samples, or packs, of a batch."),
    num_workers: int | None = Option(None, min=0, help="Worker processes.  [default: at most 4]"),
    seconds: float = Option(60, min=1, help="How long it measures."),
    step_sec: float = Option(0, min=0, help="Seconds of a training step, which are slept."),
    split_part: str = options.SPLIT_PART,
    output: Path | None = options.HTML,
    trust: bool | None = options.TRUST,
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Runs a pipeline without a model: what its parts take, and how many workers would do."""
    with errors_as_text():
        _check_page(output)
        with bar_of(progress, as_json) as bar:
            found = late("extras.report.dry_run.dry_run")(
                path, _encoder(encoder) if encoder else None, batch_size=batch_size,
                num_workers=num_workers, seconds=seconds, step_sec=step_sec,
                split_part=split_part, trust=trust, progress=bar,
            )  # fmt: skip
        _show_report(found, output, as_json)


def _check_page(output: Path | None) -> None:
    """Refuses, before minutes of work, a page that cannot be written."""
    if output is None:
        return
    is_folder = late("storage.files.is_folder")
    if is_folder(output) or not is_folder(output.parent):
        problem = "is a folder" if is_folder(output) else "is in no folder; make the folder first"
        raise typer.BadParameter(f"{output} {problem}", param_hint="--output")
    late("extras.report.report_page.plotly_source")()


def _show_report(report: Any, output: Path | None, as_json: bool) -> None:
    """Prints a report of a run, and writes its page."""
    if output is not None:
        late("extras.report.report_page.write_page")(report, output)
    print_report(report, "extras.report.report_tables.report_text", as_json)


checkpoint_app = typer.Typer(
    name="checkpoint", help="Describes saved states of loaders.", no_args_is_help=True
)
app.add_typer(checkpoint_app)


@checkpoint_app.command("info")
def checkpoint_info(
    files: list[Path] = Argument(
        metavar="FILES", help="States in JSON or torch files, or folders of a trainer."
    ),
    as_json: bool = options.AS_JSON,
    progress: bool | None = options.PROGRESS,
) -> None:
    """Describes saved states: their ranks and streams, and how far each of them is."""
    with errors_as_text(), bar_of(progress, as_json) as bar:
        report = late("extras.inspect.checkpoints.checkpoint_info")(files, bar)
    print_report(report, "extras.inspect.checkpoints.checkpoint_lines", as_json)


@app.command()
def mount(
    path: Path = options.DATASET_PATH,
    mountpoint: Path = Argument(metavar="MOUNTPOINT", help="An empty folder."),
    detach: bool = Option(False, "--detach", "-d", help="Serve the files in the background."),
    sample_folders: bool = Option(
        False, "--sample-folders", "-s", help="KEY/PART, a folder for each sample, not KEY.PART."
    ),
    allow_slow: bool = Option(
        False, "--allow-slow", "-w", help="Read tars where an old index lacks parts (needs -s)."
    ),
) -> None:
    """Shows the parts of all samples as files, read-only; needs FUSE, extra [mount]."""
    with errors_as_text():
        files = late("extras.inspect.file_view.DatasetFiles")(path, sample_folders, allow_slow)
        typer.echo(f"Mounting {files.root} at {mountpoint}...")
        late("extras.inspect.mounting.mount_dataset")(
            files, mountpoint, detach=detach,
            on_ready=lambda: typer.echo(f"Mount is ready to go. End with `umount {mountpoint}`."),
        )  # fmt: skip


def _add_missing(name: str, instead: str) -> None:
    text = f"energon-lite {name}: {instead}"

    @app.command(name, hidden=True, context_settings=_ANY_ARGUMENTS, help=text)
    def refuse() -> None:
        typer.echo(text, err=True)
        raise typer.Exit(2)


@checkpoint_app.command("redist", hidden=True, context_settings=_ANY_ARGUMENTS)
def checkpoint_redist() -> None:
    """Does nothing: states are loaded as they are on any number of ranks and workers."""
    typer.echo(
        "Nothing to do: the states are loaded as they are on any number of ranks and workers. Pass "
        "those of all ranks to `restore_state_global`, or what `state_dict()` returned to "
        "`load_state_dict`."
    )


for _name, _text in _INSTEAD.items():
    _add_missing(_name, _text)


def _add_meta_dirs() -> None:
    """Lets all commands that read a dataset take the folder of its metadata."""
    for command in app.registered_commands:
        run: Any = command.callback
        own = inspect.signature(run)
        if "path" in own.parameters and "meta_dir" not in own.parameters:
            command.callback = functools.wraps(run)(functools.partial(_run_at, run))
            more = inspect.Parameter("meta_dir", KEYWORD, default=options.META_DIR)
            vars(command.callback)["__signature__"] = own.replace(
                parameters=[*own.parameters.values(), more]
            )
            vars(command.callback)["__annotations__"] = {
                **get_type_hints(run), "meta_dir": Path | None,
            }  # fmt: skip


def _run_at(run: Any, path: Path, meta_dir: Path | None, **others: Any) -> None:
    if meta_dir is not None:
        with errors_as_text():
            path = late("storage.local_paths.with_meta_dir")(path, meta_dir)
    run(path=path, **others)


_add_meta_dirs()


def _add_examples(commands: typer.Typer, group: str = "") -> None:
    for command in commands.registered_commands:
        name = command.name or str(getattr(command.callback, "__name__", ""))
        if text := EXAMPLES.get(group + name):
            command.epilog = f"\b\nExample:\n  {text}"  # \b: as it is, not filled to lines


_add_examples(app)
_add_examples(checkpoint_app, "checkpoint ")

main: Any = typer.main.get_command(app)
# Here, names are commands, not functions; `prepare_media` is `prepare-media`.
globals().update({name.replace("-", "_"): command for name, command in main.commands.items()})
_of_checkpoint = main.commands["checkpoint"].commands
globals().update({f"checkpoint_{name}": command for name, command in _of_checkpoint.items()})
