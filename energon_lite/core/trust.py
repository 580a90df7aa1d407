"""Whether code that a dataset names may be run: the one place that decides it."""

from __future__ import annotations

import functools
import logging
import os

logger = logging.getLogger(__name__)

VARIABLE = "ENERGON_LITE_TRUST"
WAY_OUT = f"pass trust=True, or set {VARIABLE}=1 on a machine whose data you all trust"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def is_trusted(trust: bool | None) -> bool:
    """Returns the caller's choice, or where it is None that of the environment.

    Raises:
        ValueError: The environment variable is neither a yes nor a no.
    """
    if trust is not None:
        return trust
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text not in (*_ON, *_OFF):
        raise ValueError(f"{VARIABLE}={text!r}: set it to 1 to trust all datasets, or to 0")
    if text in _ON:
        _log_once()
    return text in _ON


@functools.lru_cache(maxsize=1)
def _log_once() -> None:
    logger.warning("%s is set: code that datasets name is run without asking", VARIABLE)
