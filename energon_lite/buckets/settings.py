"""How samples share batches of like lengths, as the user asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from energon_lite.buckets.windows import aligned, limits_of_budget, limits_of_function
from energon_lite.core.arrays import Int64Array

Overlong = Literal["error", "drop", "alone"]

_OVERLONG = ("error", "drop", "alone")
_GROUPS = ("source", "modality")


@dataclass(frozen=True)
class Buckets:
    """How a task encoder's samples share batches, by their `sample_length`.

    Each stream reads a window of samples, sorts it by length, and cuts it into batches. Give
    `max_tokens` or `batch_size_fn`; with neither, batches have the pipeline's `batch_size`, which
    is a limit besides where it is given.

    Args:
        max_tokens: tokens of a padded batch at most: its samples times its longest.
        batch_size_fn: gives the number of samples of a batch whose longest has the length that it
            is called with, rounded up to `align`; below 1 if there can be no such sample. It is
            called in worker processes, and must give the same in all.
        window: samples that a stream reads for each window, and holds. More give less padding:
            64 batches in a window leave about 3 %.
        group_by: what must be equal in a batch: "source", "modality" (whether a sample has
            `images`, `image` or `pixel_values`), or a function of the sample that gives a text,
            number, bool, None or tuple of these. Samples that make no full batch of their group
            wait for the next window.
        align: the longest sample of a batch is padded to a multiple of this.
        overlong: what becomes of a sample that is too long for any batch: "error" stops; "drop"
            leaves it out, counted as skipped; "alone" gives it a batch of its own, which is too
            large. `loader.stats()` counts them.
        longest_first: whether a stream begins with the largest batch of its first window, to find
            out early if memory is enough.

    Raises:
        TypeError: Both limits are given, or a value is of another type.
        ValueError: A value is out of range; names it.
    """

    max_tokens: int | None = None
    batch_size_fn: Callable[[int], int] | None = None
    window: int = 2_000
    group_by: Literal["source", "modality"] | Callable[[Any], Any] | None = None
    align: int = 1
    overlong: Overlong = "error"
    longest_first: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.batch_size_fn is not None:
            raise TypeError("max_tokens and batch_size_fn both say how large a batch is; give one.")
        if self.batch_size_fn is not None and not callable(self.batch_size_fn):
            raise TypeError(f"batch_size_fn={self.batch_size_fn!r} is no function of a length")
        for name in ("max_tokens", "window", "align"):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an integer")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.overlong not in _OVERLONG:
            raise ValueError(f"overlong={self.overlong!r} is not one of {', '.join(_OVERLONG)}")
        group_by = self.group_by
        if not (group_by is None or callable(group_by) or group_by in _GROUPS):
            raise ValueError(
                f"group_by={group_by!r} is not one of {', '.join(_GROUPS)}, nor a function"
            )
        if self.max_tokens is not None and self.align > self.max_tokens:
            raise ValueError(
                f"align={self.align} is above max_tokens={self.max_tokens}: nothing would fit"
            )

    @property
    def has_budget(self) -> bool:
        """Whether these settings say how large a batch is, without a `batch_size`."""
        return self.max_tokens is not None or self.batch_size_fn is not None

    def limits(self, lengths_N: Int64Array, batch_size: int | None = None) -> Int64Array:
        """Returns how many samples a batch can have whose longest has each length.

        Args:
            lengths_N: shape (N,); tokens of each sample, at least 1.
            batch_size: samples of a batch at most.

        Returns:
            Shape (N,); 0 or less where the sample is too long for any batch.

        Raises:
            TypeError: `batch_size_fn` gives something else than an integer; or nothing says how
                large a batch is.
        """
        if self.max_tokens is not None:
            limits_N = limits_of_budget(aligned(lengths_N, self.align), self.max_tokens)
        elif self.batch_size_fn is not None:
            limits_N = limits_of_function(aligned(lengths_N, self.align), self.batch_size_fn)
        elif batch_size is not None:
            return np.full(len(lengths_N), batch_size, np.int64)
        else:
            raise TypeError("nothing says how large a batch is: no max_tokens, no batch_size")
        return limits_N if batch_size is None else np.minimum(limits_N, batch_size)

    def is_overlong(self, length: int) -> bool:
        """Whether a sample is too long for any batch."""
        if self.batch_size_fn is not None:
            return int(self.limits(np.array([length]))[0]) < 1
        return self.max_tokens is not None and -(-length // self.align) * self.align > (
            self.max_tokens
        )

    @property
    def longest(self) -> int:
        """Tokens up to which a sample is sure to fit; 0 where a function says so."""
        if self.batch_size_fn is not None:
            return 0
        if self.max_tokens is None:
            return sys.maxsize
        return self.max_tokens // self.align * self.align

    def kept_tokens(self, length: int | Mapping[str, int]) -> int:
        """Returns how many tokens of a sample come into batches.

        Args:
            length: what `sample_length` told.
        """
        tokens = int(length["tokens"] if isinstance(length, Mapping) else length)
        return 0 if self.overlong == "drop" and self.is_overlong(tokens) else tokens
