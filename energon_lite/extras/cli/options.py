"""Options that several commands have, how they print errors, and how they load what they call.

Importing PyTorch takes a second or two, so no module that defines a command imports what does its
work: `late` does, when the command runs. `--help` needs nothing of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import PurePath
from typing import Any

import typer
from typer import Argument, Option

# Those of `length_index` and `formats.nvmeta`.
LENGTHS_NAME = "default"
DATASET_YAML = "dataset.yaml"

# Their text is enough; that of an ImportError names the package to install.
_PLAIN_ERRORS = ValueError, OSError, RuntimeError, ImportError

# Control characters but line feed and tab, marks of direction, half surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

DATASET_PATH = Argument(metavar="PATH", help="The dataset's folder, or a file of samples.")
DATA_PATH = Argument(metavar="PATH", help="A metadataset file, a folder, or a file of samples.")
SPLIT_PART = Option("train", help="Split of the metadataset or folder.")
META_DIR = Option(
    None, help="Folder with the .nv-meta and tar indexes of a dataset that is read-only."
)
TRUST = Option(
    None, help="Run code that the dataset names (sample_loader.py).  [default: ENERGON_LITE_TRUST]"
)
AS_JSON = Option(False, "--json", help="Print the report as JSON.")
HTML = Option(None, "--output", "-o", help="Write the report as an HTML file; extra [report].")
PROGRESS = Option(None, help="By default on if stderr is a terminal, and off with --json.")
_PROCESSES = "Processes; by default one per core, at most 16."


NUM_WORKERS = Option(None, min=0, help=_PROCESSES)
PARALLEL = Option(None, "--num-workers", "--parallel", min=0, help=_PROCESSES)
MEDIA_BY_GLOB = Option(
    None,
    "--media-metadata-by-glob",
    help="Store metadata of media files of these names, such as '*.jpg,*.mp4'.",
)
MEDIA_BY_HEADER = Option(
    False, "--media-metadata-by-header", help="... of those whose content is that of media."
)
MEDIA_BY_EXTENSION = Option(
    False, "--media-metadata-by-extension", help="... of those with an extension of media."
)
TMP_PATH = Option(None, hidden=True, help="Not needed: the index is built in the dataset.")
TARS = Argument(
    None,
    metavar="TARS",
    help="Tars below the folder: names, brace patterns, globs (quote them).  [default: all]",
)
FIX_DUPLICATES = Option(
    False,
    "--fix-duplicates",
    help="Where tars share sample keys, write new ones with others; keep the old as *.orig.",
)
SPLIT_CONFIG = Option(None, help="Split file in .nv-meta.  [default: split.yaml]")
DATASET_CONFIG = Option(None, help="Dataset file in .nv-meta.  [default: dataset.yaml]")


def late(name: str) -> Any:
    """Imports what does the work of a command: `late("extras.inspect.lint.lint_dataset")`."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"energon_lite.{module}"), attribute)


def is_metadataset(path: PurePath) -> bool:
    """Returns whether a path is that of a metadataset, without importing what reads it."""
    return path.suffix.lower() in (".yaml", ".yml") and not late("storage.files.is_folder")(path)


def bar_of(wanted: bool | None, as_json: bool) -> Any:
    """Returns a context with what draws a bar; with --json only where it was asked for."""
    return late("extras.cli.progress.progress_bar")(False if wanted is None and as_json else wanted)


def print_report(report: Any, text: str, as_json: bool) -> None:
    """Prints a report, or a list of reports, as JSON, or by a function of `inspect.text`.

    A function of another module is named with it: `extras.report.report_tables.report_text`.
    """
    text = text if "." in text else f"extras.inspect.text.{text}"
    if as_json:
        typer.echo(json.dumps(report, indent=2, default=lambda value: value.to_json()))
        return
    for one in report if isinstance(report, list) else [report]:
        typer.echo("\n".join(late(text)(one)))


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Turns errors into a text on stderr; exit code 1 for data and folders, 2 for options."""
    try:
        yield
    except (*_PLAIN_ERRORS, late("core.errors.SampleException")) as error:
        what = error
        if isinstance(error, OSError) and error.filename and error.strerror:
            what = f"{error.filename}: {error.strerror}"  # without the number
        for text in (f"Error: {what}", *(f"  {n}" for n in getattr(error, "__notes__", ()))):
            # Names in a dataset may hold what a terminal obeys, or what cannot be printed.
            shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
            typer.echo(shown, err=True)
        # A plain ValueError is one of the arguments; subclasses are of data and states.
        raise typer.Exit(2 if type(error) is ValueError else 1) from None
    except KeyboardInterrupt:
        typer.echo("Stopped. Run the same command again to continue.", err=True)
        raise typer.Exit(130) from None
