"""Stands for a hook of a user: it looks at one sample, as a tokenizer does, and costs little."""

from __future__ import annotations

from typing import Any


def encoded(text: str) -> Any:
    """Returns the bytes of a text as tokens, shape (number of bytes,), uint8."""
    import numpy as np

    return np.frombuffer(text.encode(), dtype=np.uint8)
