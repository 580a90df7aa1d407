"""Which failures are logged: the first at each place of the user's code or in each shard.

Of what follows at the same place, the tenth, the hundredth and so on, with their number.
"""

from __future__ import annotations

import linecache
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_OURS = str(Path(__file__).resolve().parent.parent)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


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

    Where all of it is installed, their function that was called; None if there is none of theirs,
    as where a file cannot be read.
    """
    places = []
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_OURS):
            places.append(Place(type(error).__name__, file, traceback.tb_lineno))
        traceback = traceback.tb_next
    own = [place for place in places if not place.file.startswith(_INSTALLED)]
    return own[-1] if own else places[0] if places else None


def log_failure(text: str, error: Exception, shard: str = "") -> None:
    """Logs a failure: in full if it is the first at its place, else only when 10, 100...

    Args:
        text: what is said of the error, with the sample.
        error: what was raised. Its place is a line of the user's code, where there is one.
        shard: path of the sample's shard: the place of other errors, by their type. Where this is
            not known either, an error is always logged.
    """
    is_debugging = logger.isEnabledFor(logging.DEBUG)
    place = place_of(error)
    if place is None and not shard:
        logger.warning("Skipped: %s", text, exc_info=is_debugging)
        return
    kind = f"{type(error).__name__} {getattr(error, 'errno', None) or ''}"
    number = is_worth_a_line(place or Place(kind, shard, 0))
    where = f"at {place.file}:{place.line}" if place else f"in {shard}"
    if number == 1 and place:
        line = linecache.getline(place.file, place.line).strip()
        logger.warning(
            "Skipped: %s. It was raised %s: `%s`; what else fails there is counted.",
            text, where, line, exc_info=error,
        )  # fmt: skip
    elif number == 1:
        logger.warning(
            "Skipped: %s. What else fails so in this shard is counted.", text, exc_info=is_debugging
        )
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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            data = text.encode()
            written = os.write(descriptor, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
        finally:
            os.close(descriptor)
    except OSError as error:
        number = is_worth_a_line(("append", str(path)))
        if number:
            logger.warning(
                "%s cannot be written to, lines are lost (%d times so far): %s", path, number, error
            )
