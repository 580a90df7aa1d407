"""Tries a request to a store again, where that can help."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Pauses between tries, in the mean; half of them are random, as many machines ask one store.
# [Unit: second]
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5, 2.5)


def retried(call: Callable[[], T]) -> T:
    """Returns the result of a request, which is repeated after errors that may pass: `EIO`.

    Raises:
        OSError: The last error, or one that does not pass.
    """
    for pause in _PAUSES:
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        time.sleep(pause * (0.5 + random.random()))
    return call()
