"""The questions of `prepare`, in Energon's order and with its numbers.

A script that pipes its answers to `energon prepare` can pipe them here. All questions come before a
tar is indexed, and questions that an option answers are not asked.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from energon_lite.core.errors import DatasetFormatError
from energon_lite.prepare.choose_shards import Shard, find_shards
from energon_lite.prepare.decisions import (
    CRUDE,
    Request,
    decide_splits,
    fields_of,
    prepared_already,
    sample_type_names,
    sample_type_of,
)
from energon_lite.prepare.indexing import first_parts
from energon_lite.storage.field_access import FieldMap, FieldSpec
from energon_lite.storage.nvmeta import META, is_prepared

# A script that has not answered within this time never answers.
LIMIT_SEC = 60
_ABSTRACT = "Sample"
_IN_ENERGON = (
    "CaptioningSample", "ImageClassificationSample", "ImageSample", "InterleavedSample",
    "MultiChoiceVQASample", "OCRSample", _ABSTRACT, "SimilarityInterleavedSample", "TextSample",
    "VQASample", "VidQASample", CRUDE,
)  # fmt: skip


class NoAnswerError(Exception):
    """There is no answer: stdin has ended, or asking is forbidden."""


class Answers:
    """Asks questions.

    Args:
        can_ask: whether questions are allowed at all.
        on_stderr: whether questions go to stderr, because stdout has a report to read by programs.
    """

    def __init__(self, can_ask: bool, on_stderr: bool = False) -> None:
        # A closed stdin is None.
        self._is_open = can_ask and sys.stdin is not None
        self._on_stderr = on_stderr
        self._left = b""

    @property
    def are_typed(self) -> bool:
        """Whether a person at a terminal answers, who can be asked again."""
        return self._is_open and sys.stdin.isatty()

    def say(self, text: str) -> None:
        """Prints what belongs to a question."""
        if self._is_open:
            typer.echo(text, err=self._on_stderr)

    def text(self, question: str) -> str:
        """Asks, and returns the answer; "" for Enter alone.

        Raises:
            NoAnswerError: There is no answer.
        """
        if not self._is_open:
            raise NoAnswerError
        if sys.stdin.isatty():
            return str(
                typer.prompt(
                    question, default="", show_default=False, prompt_suffix="", err=self._on_stderr
                )
            ).strip()
        typer.echo(question, nl=False, err=self._on_stderr)
        line = self._line()
        typer.echo(line.rstrip("\n"), err=self._on_stderr)
        if not line:
            self._is_open = False
            raise NoAnswerError
        return line.strip()

    def yes(self, question: str, default: bool) -> bool:
        """Asks for a yes or a no, until one of them comes.

        Raises:
            NoAnswerError: There is no answer.
        """
        while True:
            answer = self.text(f"{question} [{'Y/n' if default else 'y/N'}]: ").lower()
            if answer in ("", "y", "yes", "n", "no"):
                return default if not answer else answer.startswith("y")
            self.say("Please answer y or n")

    def _line(self) -> str:
        """Reads a line of a stdin that is no terminal, for a minute at most; "" at its end."""
        try:
            descriptor = sys.stdin.fileno()
        except io.UnsupportedOperation:  # no real file
            return sys.stdin.readline()
        while b"\n" not in self._left:
            if not select.select([descriptor], [], [], LIMIT_SEC)[0]:
                break
            more = os.read(descriptor, 65536)
            if not more:
                break
            self._left += more
        line, newline, self._left = self._left.partition(b"\n")
        return (line + newline).decode("utf-8", "replace")


def complete(
    root: Path, request: Request, answers: Answers, needs_config: bool, non_interactive: bool
) -> Request:
    """Asks for what the options leave open.

    Args:
        root: the dataset's folder.
        request: the options.
        answers: who is asked.
        needs_config: whether a `dataset.yaml` is to be written.
        non_interactive: whether Energon would continue without a sample type or a field map.

    Returns:
        The request with nothing left open.

    Raises:
        typer.BadParameter: There is no answer; names the option that does.
        typer.Abort: The folder is prepared, and is to stay so.
        ValueError: The options cannot work.
        FileExistsError: The folder is prepared, and there is no answer whether to continue.
    """
    shards = find_shards(root, request.exclude, request.paths)
    names = [shard.name for shard in shards]
    request = request._replace(paths=names)
    has_split = request.split_ratio is not None or request.split_parts is not None
    if has_split:
        decide_splits(names, request)
    if request.sample_type is not None:
        sample_type_of(request.sample_type)
    if is_prepared(root) and not request.force_overwrite:
        request = _again(root, request, answers)
    if not has_split:
        request = _ask_split(names, request, answers)
    if not needs_config:
        return request._replace(sample_type=None, field_map=None)
    if request.sample_type is None:
        request = _ask_type(root, request, answers, non_interactive)
    if request.sample_type in (None, CRUDE) or request.field_map:
        return request
    return _ask_fields(shards, request, answers, non_interactive)


def _missing(option: str, what: str) -> typer.BadParameter:
    return typer.BadParameter(f"missing: {what}", param_hint=option)


def _again(root: Path, request: Request, answers: Answers) -> Request:
    question = "It seems the dataset had already been prepared. Do you want to continue?"
    try:
        if not answers.yes(question, default=False):
            raise typer.Abort
    except NoAnswerError:
        raise prepared_already(root) from None
    return request._replace(force_overwrite=True)


def _ask_split(names: Sequence[str], request: Request, answers: Answers) -> Request:
    answers.say(f"Found {len(names)} tar files in total. The first and last ones are:")
    answers.say(f"- {names[0]}\n- {names[-1]}")
    question = 'Please enter a desired train/val/test split like "0.5, 0.2, 0.3" or "8,1,1": '
    while True:
        try:
            wanted = request._replace(split_ratio=answers.text(question))
        except NoAnswerError:
            what = "shares of train,val,test, or give --split-parts"
            raise _missing("--split-ratio", what) from None
        try:
            decide_splits(names, wanted)
        except ValueError as error:
            if not answers.are_typed:
                raise
            answers.say(f"{error}")
        else:
            return wanted


def _ask_type(root: Path, request: Request, answers: Answers, non_interactive: bool) -> Request:
    """Asks for the sample type; leaves it open where no `dataset.yaml` is to be written."""
    if non_interactive:
        return request
    file = root / META / request.dataset_config
    try:
        if not answers.yes("Do you want to create a dataset.yaml interactively?", default=True):
            return request
        known = (*_IN_ENERGON, *(n for n in sample_type_names() if n not in _IN_ENERGON))
        answers.say("The following sample types are available:")
        for number, name in enumerate(known):
            shown = "Crude sample (plain dict for cooking)" if name == CRUDE else name
            answers.say(f"{number}. {shown}")
        while True:
            answer = answers.text("Please enter a number to choose a class: ")
            name = known[int(answer)] if answer.isdigit() and int(answer) < len(known) else answer
            if name in known and name != _ABSTRACT:
                return request._replace(sample_type=name, force_overwrite=True)
            answers.say(f"{answer!r} is not a sample type of the list. Please try again.")
    except NoAnswerError:
        if file.is_file():
            return request
        names = ", ".join(sample_type_names())
        what = f"one of {names}; or give --skip-dataset-yaml"
        raise _missing("--sample-type", what) from None


def _ask_fields(
    shards: Sequence[Shard], request: Request, answers: Answers, non_interactive: bool
) -> Request:
    """Asks which part each field is taken from; or leaves that to a `sample_loader.py`."""
    parts = first_parts(shards[0].path)
    if non_interactive:
        return request._replace(loader_parts=parts)
    specs = fields_of(str(request.sample_type))
    question = "Do you want to set a simple field_map[Y] (or write your own sample_loader [n])?"
    try:
        if not answers.yes(question, default=True):
            return request._replace(loader_parts=parts)
        answers.say(
            "For each field, please specify the corresponding name in the WebDataset.\n"
            f"Available types in WebDataset: {', '.join(parts)}\n"
            "Leave empty for skipping optional field\n"
            "You may also access json fields e.g. by setting the field to: json[field][field]\n"
            "You may also specify alternative fields e.g. by setting to: jpg,png\n"
            f"Please enter the field_map for {request.sample_type}:"
        )
        found = {spec.name: _ask_field(spec, parts, answers) for spec in specs}
    except NoAnswerError:
        names = ", ".join(spec.name for spec in specs if spec.is_required)
        what = f"the parts for the fields of {request.sample_type} ({names})"
        raise _missing("--field-map", what) from None
    return request._replace(field_map={name: part for name, part in found.items() if part})


def _ask_field(spec: FieldSpec, parts: Sequence[str], answers: Answers) -> str:
    optional = "" if spec.is_required else ", optional"
    question = (
        f"Please enter a webdataset field name for {spec.name!r} ({spec.type_name}{optional}): "
    )
    while True:
        answer = answers.text(question)
        if not answer and not spec.is_required:
            return ""
        try:
            ways = FieldMap({spec.name: answer}, "").paths[spec.name]
        except DatasetFormatError:
            ways = ()
        if any(way.part in parts for way in ways):
            return answer
        answers.say("That type doesn't exist in the WebDataset. Please try again.")
