"""The samples of a dataset as text, one after the other."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from energon_lite.extras.preview.browse import Query, SplitBrowser
from energon_lite.extras.view.fields import FieldView, fields_of, short_text, turns_of, view_of
from energon_lite.extras.view.media_bytes import picture_bytes
from energon_lite.extras.view.words import error_text

_COLUMNS, _ROWS = 60, 16  # of a picture, at most
_SHADES = " .:-=+*#%@"
_MAX_TEXT = 400
_HIDDEN = ("__restore_key__", "__sources__")


def sample_texts(
    path: str | os.PathLike[str], split_part: str, *, dataset_config: str | None = None,
    trust: bool | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yields the samples of a split as text: their fields, with types and values.

    Pictures are drawn in ASCII. Samples of a blend come in the order of a run, as many as its
    sources have. No task encoder or cooker runs. In place of a sample that cannot be read stands
    its error.

    Args:
        path: a prepared folder, a file of samples or a metadataset.
        split_part: the split.
        dataset_config: file name in `.nv-meta`, by default `dataset.yaml`.
        trust: whether code that the dataset names may be run; see `SplitBrowser`.

    Raises:
        FileNotFoundError: The path does not exist.
        DatasetFormatError: It is not valid, or has no such split.
    """
    settings: Any = {"dataset_config": dataset_config} if dataset_config else {}
    browser = SplitBrowser(path, split_part, trust=trust, **settings)
    is_blend = len(browser.sources) > 1 and not browser.run_error
    query = Query("run" if is_blend else "files")
    for position in range(browser.num_samples):
        try:
            text = sample_text(browser.at(query, position))
        except Exception as error:
            text = "\n".join(map(_printable, error_text(error).splitlines()))
        yield text


def sample_text(sample: Any) -> str:
    """Writes the fields of a sample, a line each, with pictures and turns of conversations."""
    lines = [type(sample).__name__]
    for name, value in fields_of(sample).items():
        if name not in _HIDDEN:
            lines += _field_lines(view_of(name, value), " ")
    return "\n".join(lines)


def _field_lines(view: FieldView, indent: str) -> Iterator[str]:
    yield f"{indent}- {_printable(view.name)} ({type(view.value)}): {_value_text(view)}"
    if view.kind == "picture":
        with suppress(Exception):  # one that does not decode is described only
            yield from (f"{indent}      {row}" for row in _picture_rows(view.value))
    for speaker, content in (turns_of(view.value) or []) if view.kind == "conversation" else []:
        yield f"{indent}      {_printable(speaker)}: {_printable(short_text(content))}"
    for item in view.items:
        yield from _field_lines(item, f"{indent}    ")


def _value_text(view: FieldView) -> str:
    value = view.value
    if view.kind in ("text", "number"):
        text = repr(value)
        return (
            text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text):,} characters)"
        )
    return _printable(short_text(value, _MAX_TEXT)) if view.kind == "json" else view.summary


def _printable(text: str) -> str:
    """Escapes what a terminal would take for a command."""
    return text if text.isprintable() else repr(text)[1:-1]


def _picture_rows(picture: Any) -> Iterator[str]:
    """Draws a picture in characters, which are twice as high as wide."""
    image = Image.open(io.BytesIO(picture_bytes(picture, 8 * _COLUMNS)[0]))
    rows = min(_ROWS, max(1, _COLUMNS * image.height // (2 * image.width)))
    columns = min(_COLUMNS, max(1, 2 * rows * image.width // image.height))
    grey = np.asarray(image.convert("L").resize((columns, rows))) / 255
    shades = (grey * (len(_SHADES) - 1)).round().astype(int)
    yield from ("".join(_SHADES[shade] for shade in row) for row in shades)
