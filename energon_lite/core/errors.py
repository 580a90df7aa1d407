"""Exceptions of the library, and the handlers that decide what an error in user code does.

Of failures, the first at each line of the user's code is logged in full, and of those outside of
it the first in each shard; of what follows there, the tenth, the hundredth and so on, with their
number.
"""

from __future__ import annotations

import difflib
import inspect
import linecache
import logging
import re
import signal
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

# The module `signal` makes enums of numbers first, and drops what a handler raises meanwhile.
_signal: Any = import_module("_signal")

_OURS = str(Path(__file__).resolve().parent.parent)

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
    SystemError, SyntaxError, ImportError, StopIteration, StopAsyncIteration, MemoryError,
    RecursionError, ReferenceError, NameError, FatalSampleError,
)  # fmt: skip


def pass_on(error: BaseException | None) -> None:
    """Raises an error again that a signal handler raised: for the training loop, of no sample.

    Wherever errors are tolerated, this is asked first. Only handlers count that are installed now,
    so that a hook may install one for its own time limit.

    Args:
        error: what was caught. It may have been raised from the handler's, or while that was
            handled; None does nothing.
    """
    if error is None:
        return
    codes = set(map(_code_of, filter(callable, map(_signal.getsignal, range(1, signal.NSIG)))))
    outer = {frame for frame, _ in traceback.walk_stack(None)}
    inner, seen = error, list[BaseException]()
    while inner not in seen:
        frames = [frame for frame, _ in traceback.walk_tb(inner.__traceback__)]
        if seen and not outer.isdisjoint(frames[:1]):
            return  # an `except` of the caller's handles it, and iterates the loader meanwhile
        if not codes.isdisjoint(frame.f_code for frame in frames):
            raise inner from inner.__cause__
        seen.append(inner)
        inner = inner.__cause__ or inner.__context__ or inner


def _code_of(handler: Any) -> object:
    """Returns the code of a function, a `functools.partial` of it, or an object with `__call__`."""
    function: Any = getattr(handler, "func", handler)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


class Ignored(suppress):
    """Suppresses as `contextlib.suppress` does, but lets through what a signal handler raised."""

    def __exit__(self, *caught: Any) -> bool:
        """Decides by the exception that ended the block."""
        pass_on(caught[1])
        return bool(super().__exit__(*caught))


def add_note(error: BaseException, note: str) -> None:
    """Adds a line of context to an exception; as `BaseException.add_note`, also on Python 3.10."""
    error.__dict__.setdefault("__notes__", []).append(note)


def describe(error: BaseException) -> str:
    """Returns an exception and its notes in one line, the same in every run."""
    parts = [f"{type(error).__name__}: {error}" if str(error) else type(error).__name__]
    cause = error.__cause__
    if cause is not None and str(cause) not in parts[0]:
        parts.append(f"caused by {type(cause).__name__}: {cause}")
    if "CUDA in forked subprocess" in parts[0]:
        parts.append("Set WorkerConfig(start_method='spawn')")
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


def reraise_exception(e: Exception, _sample: Any, _sources: Sequence[Any] | None = None) -> None:
    """Raises the error again."""
    raise e


class Place(NamedTuple):
    """A line of code at which errors of a kind were raised."""

    error: str
    file: str
    line: int


# How many errors each place had, in this process.
_counts: Counter[Hashable] = Counter()


def is_worth_a_line(place: Hashable) -> int:
    """Counts an event; returns its number at this place if that is 1, 10, 100 and so on, else 0."""
    _counts[place] += 1
    number = _counts[place]
    return number if number == 10 ** (len(str(number)) - 1) else 0


def place_of(error: BaseException) -> Place | None:
    """Returns where an error was raised in the user's code: at the innermost line that is theirs.

    Where all of it is installed, their function that was called. Where none of their lines raised
    it, what `note_place` noted; else None, as where a file cannot be read.
    """
    name, frames = type(error).__name__, traceback.walk_tb(error.__traceback__)
    places = [Place(name, frame.f_code.co_filename, line) for frame, line in frames]
    places = [place for place in places if not place.file.startswith(_OURS)]
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [place for place in places if not place.file.startswith(installed)]
    noted: Place | None = error.__dict__.get("__place__")
    return own[-1] if own else places[0] if places else noted


def note_place(error: BaseException, function: Callable[..., Any]) -> None:
    """Notes the function of the user's that failed, which may have raised nothing.

    It has returned None, say, or takes another number of arguments. The library's own functions
    are no place.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None and not code.co_filename.startswith(_OURS):
        place = Place(type(error).__name__, code.co_filename, code.co_firstlineno)
        error.__dict__["__place__"] = place


def log_exception(e: Exception, sample: Any, sources: Sequence[Any] | None = None) -> None:
    """Logs an error with the sample's key and shard; the sample is then skipped.

    Of errors at one line of the user's code, or of one type in one shard, the first is logged, and
    then the tenth, the hundredth and so on, as their number. Where neither is known, an error is
    always logged.
    """
    del sample  # named in the notes already; payloads do not belong into logs
    text, place, is_debugging = describe(e), place_of(e), logger.isEnabledFor(logging.DEBUG)
    shards = {
        f"{getattr(source, 'dataset_path', '')}/{getattr(source, 'shard_name', '')}"
        for source in sources or ()
    }
    if place is None and len(shards) != 1:
        logger.warning("Skipped: %s", text, exc_info=is_debugging)
        return
    where = f"at {place.file}:{place.line}" if place else f"in {min(shards)}"
    kind = f"{type(e).__name__} {getattr(e, 'errno', None) or ''}"
    number = is_worth_a_line(place or Place(kind, where, 0))
    if number == 1 and place and place is not e.__dict__.get("__place__"):
        line = linecache.getline(place.file, place.line).strip()
        logger.warning(
            "Skipped: %s. It was raised %s: `%s`; what else fails there is counted.",
            text, where, line, exc_info=e,
        )  # fmt: skip
    elif number == 1:
        logger.warning(
            "Skipped: %s. What else fails so %s is counted.",
            text, where if place else "in this shard", exc_info=is_debugging,
        )  # fmt: skip
    elif number:
        logger.warning("Skipped %d times so far %s, the last time: %s", number, where, text)
    elif is_debugging:
        logger.warning("Skipped, as others before %s: %s", where, text)


def append(path: Path, text: str) -> None:
    """Appends whole lines to a file in one write; warns where that fails, but does not raise.

    Folders that are missing are created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        with path.open("ab", buffering=0) as file:
            written = file.write(data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
    except OSError as error:
        number = is_worth_a_line(("append", str(path)))
        if number:
            logger.warning(
                "%s cannot be written to, lines are lost (%d times so far): %s", path, number, error
            )
