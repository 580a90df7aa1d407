"""Reads untrusted JSON: nothing in it can crash or hang the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from energon_lite.core.errors import DatasetFormatError

# No document comes near this depth; deeper ones are made to exhaust the stack of a reader.
MAX_DEPTH = 100
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

Pairs = Callable[[list[tuple[str, Any]]], Any]


def read_json(
    text: str,
    name: str,
    max_depth: int = MAX_DEPTH,
    *,
    pairs: Pairs | None = None,
    allow_nan: bool = False,
) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: the document.
        name: of the file, or of what the text is, for errors.
        max_depth: deepest nesting of lists and mappings that is read.
        pairs: makes a mapping of its pairs; a dict by default.
        allow_nan: whether NaN and Infinity are numbers.

    Raises:
        DatasetFormatError: It is no JSON, is nested deeper, or has a number that is none, or has
            thousands of digits.
    """
    if _is_deeper(text, max_depth):
        raise DatasetFormatError(
            f"{name}: more than {max_depth} levels of nesting; write it flatter"
        )
    try:
        value = json.loads(
            text, object_pairs_hook=pairs, parse_constant=None if allow_nan else _no_number
        )
        if "\\" in text and "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise DatasetFormatError(f"{name}:{error.lineno}: no valid JSON: {error.msg}") from None
    except UnicodeEncodeError:
        raise DatasetFormatError(
            f"{name}: half a character (\\ud800 to \\udfff); remove it"
        ) from None
    except DatasetFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise DatasetFormatError(f"{name}: no JSON that is read: {error}"[:300]) from None


def _is_deeper(text: str, max_depth: int) -> bool:
    """Whether a JSON text is nested deeper than `max_depth`; of broken JSON, either answer."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    outside_of_strings = "".join(text.split('"')[::2])
    brackets = outside_of_strings.encode(errors="replace").translate(None, _NOT_BRACKETS)
    codes = np.frombuffer(brackets, dtype=np.uint8)
    steps = np.where((codes == ord("[")) | (codes == ord("{")), np.int8(1), np.int8(-1))
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > max_depth)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON; write another one, or text in quotes")
