"""The questions of `prepare`, in Energon's order and with its numbers.

A script that pipes its answers to `energon prepare` can pipe them here. All questions come before a
tar is indexed, and questions that an option answers are not asked.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import PurePath
from typing import TypeVar

import typer

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.prepare.choose_shards import find_shards
from energon_lite.extras.prepare.decisions import (
    CRUDE,
    Request,
    decide_splits,
    fields_of,
    prepared_already,
    sample_type_names,
    sample_type_of,
)
from energon_lite.extras.prepare.indexing import first_parts
from energon_lite.formats.field_access import FieldMap, FieldSpec
from energon_lite.formats.nvmeta import META, is_prepared
from energon_lite.storage.files import is_file

T = TypeVar("T")

# A script that has not answered within this time never answers.
LIMIT_SEC = 60
_ABSTRACT = "Sample"
_IN_ENERGON = (
    "CaptioningSample", "ImageClassificationSample", "ImageSample", "InterleavedSample",
    "MultiChoiceVQASample", "OCRSample", _ABSTRACT, "SimilarityInterleavedSample", "TextSample",
    "VQASample", "VidQASample", CRUDE,
)  # fmt: skip


class NoAnswerError(Exception):
    """There is no answer: a script's stdin has ended or is silent, or asking is forbidden."""


class Answers:
    """Asks questions; a person at a terminal is asked until an answer is possible.

    Args:
        can_ask: whether questions are allowed at all.
        on_stderr: whether questions go to stderr, because stdout has a report to read by programs.
    """

    def __init__(self, can_ask: bool, on_stderr: bool = False) -> None:
        # A closed stdin is None.
        self._is_open = can_ask and sys.stdin is not None
        self._on_stderr = on_stderr

    def say(self, text: str) -> None:
        """Prints what belongs to a question."""
        if self._is_open:
            typer.echo(text, err=self._on_stderr)

    def ask(self, question: str, parse: Callable[[str], T]) -> T:
        """Asks, and returns the value of the answer.

        Args:
            question: the question.
            parse: returns the value; after a `typer.BadParameter` the next answer counts, also in
                a script, and after another ValueError a person at a terminal is asked again.

        Raises:
            NoAnswerError: There is no answer.
            ValueError: The answer of a script is not possible.
        """

        def value(answer: str) -> T:
            try:
                return parse(answer.strip())
            except ValueError as error:
                if not sys.stdin.isatty():
                    raise
                raise typer.BadParameter(str(error)) from None

        ask = partial(typer.prompt, question, default="", show_default=False, value_proc=value)
        found: T = self._answer(ask)
        return found

    def yes(self, question: str, default: bool) -> bool:
        """Asks for a yes or a no, until one of them comes.

        Raises:
            NoAnswerError: There is no answer.
        """
        return self._answer(partial(typer.confirm, question, default=default))

    def _answer(self, ask: Callable[..., T]) -> T:
        if not self._is_open:
            raise NoAnswerError
        is_script = not sys.stdin.isatty()
        if is_script:
            signal.signal(signal.SIGALRM, _end)
            signal.alarm(LIMIT_SEC)
        try:
            return ask(err=self._on_stderr)
        except typer.Abort:
            if not is_script:
                raise
            self._is_open = False
            raise NoAnswerError from None
        finally:
            signal.alarm(0)


def _end(*_: object) -> None:
    raise EOFError


def complete(
    root: PurePath, request: Request, answers: Answers, needs_config: bool, non_interactive: bool
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
    if request.sample_type is None and not non_interactive:
        request = _ask_type(root / META / request.dataset_config, request, answers)
    if request.sample_type in (None, CRUDE) or request.field_map:
        return request
    return _ask_fields(first_parts(shards[0].path), request, answers, non_interactive)


@contextmanager
def _needed(option: str, what: str) -> Iterator[None]:
    """Names the option that takes the place of an answer, where there is none."""
    try:
        yield
    except NoAnswerError:
        raise typer.BadParameter(f"missing: {what}", param_hint=option) from None


def _again(root: PurePath, request: Request, answers: Answers) -> Request:
    question = "It seems the dataset had already been prepared. Do you want to continue?"
    try:
        if not answers.yes(question, default=False):
            raise typer.Abort
    except NoAnswerError:
        raise prepared_already(root) from None
    return request._replace(force_overwrite=True)


def _ask_split(names: Sequence[str], request: Request, answers: Answers) -> Request:
    def parse(answer: str) -> Request:
        wanted = request._replace(split_ratio=answer)
        decide_splits(names, wanted)
        return wanted

    answers.say(f"Found {len(names)} tar files in total. The first and last ones are:")
    answers.say(f"- {names[0]}\n- {names[-1]}")
    question = 'Please enter a desired train/val/test split like "0.5, 0.2, 0.3" or "8,1,1"'
    with _needed("--split-ratio", "shares of train,val,test, or give --split-parts"):
        return answers.ask(question, parse)


def _ask_type(config: PurePath, request: Request, answers: Answers) -> Request:
    """Asks for the sample type; leaves it open where no `dataset.yaml` is to be written."""
    names = sample_type_names()
    known = [*_IN_ENERGON, *(name for name in names if name not in _IN_ENERGON)]

    def parse(answer: str) -> str:
        name = known[int(answer)] if answer.isdigit() and int(answer) < len(known) else answer
        if name not in known or name == _ABSTRACT:
            raise typer.BadParameter(
                f"{answer!r} is not a sample type of the list. Please try again."
            )
        return name

    what = f"one of {', '.join(names)}; or give --skip-dataset-yaml"
    with suppress(NoAnswerError) if is_file(config) else _needed("--sample-type", what):
        if answers.yes("Do you want to create a dataset.yaml interactively?", default=True):
            answers.say("The following sample types are available:")
            for number, name in enumerate(known):
                shown = "Crude sample (plain dict for cooking)" if name == CRUDE else name
                answers.say(f"{number}. {shown}")
            name = answers.ask("Please enter a number to choose a class", parse)
            return request._replace(sample_type=name, force_overwrite=True)
    return request


def _ask_fields(
    parts: Sequence[str], request: Request, answers: Answers, non_interactive: bool
) -> Request:
    """Asks which part each field is taken from; or leaves that to a `sample_loader.py`."""
    question = "Do you want to set a simple field_map[Y] (or write your own sample_loader [n])?"
    specs = fields_of(str(request.sample_type))
    required = ", ".join(spec.name for spec in specs if spec.is_required)
    what = f"the parts for the fields of {request.sample_type} ({required})"
    with _needed("--field-map", what):
        if non_interactive or not answers.yes(question, default=True):
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
    return request._replace(field_map={name: part for name, part in found.items() if part})


def _ask_field(spec: FieldSpec, parts: Sequence[str], answers: Answers) -> str:
    def parse(answer: str) -> str:
        with suppress(DatasetFormatError):
            ways = FieldMap({spec.name: answer}, "").paths[spec.name] if answer else ()
            if any(way.part in parts for way in ways) or not (answer or spec.is_required):
                return answer
        raise typer.BadParameter("That type doesn't exist in the WebDataset. Please try again.")

    optional = "" if spec.is_required else ", optional"
    return answers.ask(
        f"Please enter a webdataset field name for {spec.name!r} ({spec.type_name}{optional})",
        parse,
    )
