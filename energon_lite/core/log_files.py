"""Lines at the end of log files: a full disk costs lines and a warning, not the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from energon_lite.core.failures import is_worth_a_line

logger = logging.getLogger(__name__)


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
