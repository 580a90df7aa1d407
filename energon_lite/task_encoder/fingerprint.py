"""Who measured: names a task encoder's code, so that a change of it is noticed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from energon_lite.task_encoder.base import DefaultTaskEncoder, TaskEncoder


class LengthFunction(DefaultTaskEncoder[Any, Any, Any, Any]):
    """A task encoder that is but a function of a sample as it is stored.

    Args:
        function: gives a sample's tokens, or a dict of resources.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def sample_length(self, sample: Any) -> Any:
        """Calls the function."""
        return self.function(sample)


def fingerprint(encoder: TaskEncoder[Any, Any, Any, Any]) -> str:
    """Names what measures, with a hash of its code where that can be had.

    The code is that of the class and of those above it, not of what they call.
    """
    measures: Any = encoder.function if isinstance(encoder, LengthFunction) else type(encoder)
    code = blake2b(digest_size=8)
    for part in getattr(measures, "__mro__", (measures,)):
        if part.__module__.partition(".")[0] not in ("energon_lite", "builtins", "typing"):
            with suppress(OSError, TypeError):
                code.update(inspect.getsource(part).encode())
    return f"{measures.__module__}:{measures.__qualname__}:{code.hexdigest()}"


def is_outdated(measured_by: str, encoder: TaskEncoder[Any, Any, Any, Any]) -> bool:
    """Tells whether the code of an encoder changed since it had the fingerprint `measured_by`.

    Of another encoder it is not told: a tokenizer may have many.
    """
    now = fingerprint(encoder)
    is_same_name = measured_by.rpartition(":")[0] == now.rpartition(":")[0]
    return is_same_name and measured_by != now
