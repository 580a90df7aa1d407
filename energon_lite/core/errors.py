"""Exceptions of the library, and the handlers that decide what an error in user code does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from energon_lite.core.failures import log_failure

# A list of more or longer words is not read by a person.
_LONGEST_HINT, _MOST_HINTS = 200, 20_000

# What `repr` writes of objects without one of their own; it differs from run to run.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# Takes the exception, the sample or samples, and the list of their `SourceInfo`.
ErrorHandler = Callable[[Exception, Any, "Sequence[Any] | None"], None]


class DatasetFormatError(ValueError):
    """A file of a dataset is invalid; the text names the file and a remedy."""


class EmptyDatasetError(DatasetFormatError):
    """A split part has no sample."""


class FieldAccessError(DatasetFormatError):
    """A field map names a part or an entry that a sample does not have."""


class DecodingError(ValueError):
    """A part of a sample could not be decoded."""


class StateError(ValueError):
    """A saved state does not fit the pipeline that it is given to."""


class SkipSample(Exception):
    """Raised by user code to skip the current sample without counting it as a failure."""


class SampleException(ValueError):
    """An error that concerns one sample, with the sample's key in its text."""

    @classmethod
    def from_sample_key(cls, sample_key: object, message: str = "") -> SampleException:
        """Makes the exception for the sample named `sample_key`."""
        return cls(f"sample {sample_key!r}: {message}" if message else f"sample {sample_key!r}")

    @classmethod
    def from_sample(cls, sample: object, message: str = "") -> SampleException:
        """Makes the exception for `sample`, which is named by its `__key__`."""
        if isinstance(sample, dict):
            return cls.from_sample_key(sample.get("__key__", "?"), message)
        return cls.from_sample_key(getattr(sample, "__key__", "?"), message)


class FatalSampleError(SampleException):
    """An error in user code that ends the run: it cannot be passed over by skipping a sample."""


# These say that the code is wrong, not the sample; skipping samples would hide a bug.
FATAL_EXCEPTIONS = (
    SystemError,
    SyntaxError,
    ImportError,
    StopIteration,
    StopAsyncIteration,
    MemoryError,
    RecursionError,
    ReferenceError,
    NameError,
    FatalSampleError,
)


def add_note(error: BaseException, note: str) -> None:
    """Adds a line of context to an exception; as `BaseException.add_note`, also on Python 3.10."""
    notes = getattr(error, "__notes__", None)
    if notes is None:
        notes = []
        error.__dict__["__notes__"] = notes
    notes.append(note)


def describe(error: BaseException) -> str:
    """Returns an exception and its notes in one line, the same in every run."""
    parts = [f"{type(error).__name__}: {error}" if str(error) else type(error).__name__]
    cause = error.__cause__
    if cause is not None and str(cause) not in parts[0]:
        parts.append(f"caused by {type(cause).__name__}: {cause}")
    parts.extend(getattr(error, "__notes__", ()))
    return _ADDRESS.sub("", "; ".join(parts))


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?`, or, without a close match, the list of what is allowed."""
    # Comparing takes time that grows with the square of the length, and words may be a stranger's.
    options = sorted(option for option in allowed if len(option) <= _LONGEST_HINT)
    if len(str(word)) > _LONGEST_HINT or len(options) > _MOST_HINTS:
        return ""
    close = difflib.get_close_matches(str(word), options, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Allowed: {', '.join(options)}." if options else ""


def log_exception(e: Exception, sample: Any, sources: Sequence[Any] | None = None) -> None:
    """Logs an error with the sample's key and shard; the sample is then skipped.

    Of errors at one line of the user's code, or of one type in one shard, the first is logged, and
    then the tenth, the hundredth and so on, as their number.
    """
    del sample  # named in the notes already; payloads do not belong into logs
    shards = {
        str(Path(getattr(source, "dataset_path", ""), str(getattr(source, "shard_name", ""))))
        for source in sources or ()
    }
    log_failure(describe(e), e, shards.pop() if len(shards) == 1 else "")


def reraise_exception(e: Exception, _sample: Any, _sources: Sequence[Any] | None = None) -> None:
    """Raises the error again."""
    raise e
