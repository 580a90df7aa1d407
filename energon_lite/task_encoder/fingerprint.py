"""Who measured: names a task encoder's code, so that a change of it is noticed."""

from __future__ import annotations

import inspect
from contextlib import suppress
from hashlib import blake2b
from typing import Any


def fingerprint(encoder: Any) -> str:
    """Names what measures, with a hash of its code where that can be had.

    The code is that of the class and of those above it, not of what they call.
    """
    measures: Any = getattr(encoder, "_length_function", type(encoder))
    code = blake2b(digest_size=8)
    for part in getattr(measures, "__mro__", (measures,)):
        if part.__module__.partition(".")[0] not in ("energon_lite", "builtins", "typing"):
            with suppress(OSError, TypeError):
                code.update(inspect.getsource(part).encode())
    if hasattr(encoder, "_task_encoder"):  # an AugmentTaskEncoder has most hooks of that
        code.update(fingerprint(encoder._task_encoder).encode())
    return f"{measures.__module__}:{measures.__qualname__}:{code.hexdigest()}"


def is_outdated(measured_by: str, encoder: Any) -> bool:
    """Returns whether the code of an encoder changed since it had the fingerprint `measured_by`.

    Of another encoder it is not told: a tokenizer may have many.
    """
    now = fingerprint(encoder)
    is_same_name = measured_by.rpartition(":")[0] == now.rpartition(":")[0]
    return is_same_name and measured_by != now
