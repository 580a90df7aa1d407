"""Checks lengths and limits before anything is packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.batching.rules import aligned
from energon_lite.core.arguments import at_least
from energon_lite.core.arrays import Int64Array

# Sums over 2**26 samples still fit into 63 bits.
MAX_CAPACITY = 1 << 36
MAX_SAMPLES = 1 << 31


@dataclass(frozen=True)
class Sizes:
    """The checked sizes of N samples to be packed, of R resources each.

    Attributes:
        lengths: shape (N, R), contiguous, each in 0..capacity, rounded up to the alignment.
        capacities: shape (R,), each at least 1.
        max_samples: samples in one pack at most; N or more means any number.
    """

    lengths: Int64Array
    capacities: Int64Array
    max_samples: int

    @property
    def capacity(self) -> int:
        """The capacity of the first resource."""
        return int(self.capacities[0])


def check_sizes(
    lengths: npt.ArrayLike,
    capacity: int | npt.ArrayLike,
    *,
    max_samples: int | None = None,
    align: int | npt.ArrayLike = 1,
    first: int = 0,
) -> Sizes:
    """Checks lengths and limits, and rounds lengths up to the alignment.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R) for several resources, such as tokens
            and tiles, each in 0..capacity, in at least one resource above 0.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).
        first: number of the first sample, for errors.

    Raises:
        TypeError: Not integers.
        ValueError: A shape is wrong, a limit is below 1, or a length is out of range; names the
            first such sample.
    """
    array, limits = as_integers("lengths", lengths), as_integers("capacity", capacity)
    shape = (len(array) if array.ndim else 0, limits.size)
    is_fitting = array.shape == shape if limits.ndim else array.shape == shape[:1]
    if not (is_fitting or array.size == 0) or limits.ndim > 1 or limits.size == 0:
        raise ValueError(
            f"lengths of shape {array.shape} do not fit a capacity of shape {limits.shape}: give a "
            "number for shape (N,), one number for each resource for shape (N, R)."
        )
    if len(array) >= MAX_SAMPLES:
        raise ValueError(f"{len(array):,} samples are too many; pack them in parts.")
    capacity_R = _limits("capacity", limits)
    align_R = _limits("align", as_integers("align", align))
    if len(align_R) not in (1, len(capacity_R)):
        raise ValueError(
            f"align has {len(align_R)} values for {len(capacity_R)} resources; give one number, or "
            "one for each."
        )
    count = max(len(array), 1) if max_samples is None else at_least("max_samples", max_samples)
    return Sizes(_checked(array.reshape(shape), capacity_R, align_R, first), capacity_R, count)


def as_integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.integer]:
    """Returns values as an array of integers.

    Raises:
        TypeError: They are not integers.
    """
    array = np.asarray(values)
    if array.size == 0:  # an empty list becomes an array of floats
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        hint = " Round them, then use .astype(np.int64)." if array.dtype.kind == "f" else ""
        raise TypeError(f"{name} must be integers, not {array.dtype}.{hint}")
    return array


def _limits(name: str, values: npt.NDArray[np.integer]) -> Int64Array:
    for value in np.atleast_1d(values).tolist():
        if not 1 <= value <= MAX_CAPACITY:
            raise ValueError(f"{name} is {value}; it must be in 1..{MAX_CAPACITY}.")
    return np.atleast_1d(values).astype(np.int64)


def _checked(
    array: npt.NDArray[np.integer], capacity_R: Int64Array, align_R: Int64Array, first: int
) -> Int64Array:
    # Compared in the type of the caller: uint64 above 2**63 would wrap to below 0.
    above_NR = array > capacity_R
    is_bad = (above_NR | (array < 0)).any(axis=1) | ~array.any(axis=1)
    if is_bad.any():
        index = int(is_bad.argmax())
        row = array[index]
        what, remedy = "below 1", "Drop empty samples: they would be in no pack."
        if above_NR[index].any():
            what = f"above the capacity of {_shown(capacity_R)}"
            remedy = "Truncate, split or drop such samples, or raise the capacity."
        elif len(row) > 1 and (row < 0).any():
            what = "negative"
        raise ValueError(f"Sample {first + index} has length {_shown(row)}, {what}. {remedy}")
    # A copy of a memory map, which numba would compile for separately.
    lengths_NR = np.require(array, np.int64, ["C", "W"])
    if (align_R == 1).all():
        return lengths_NR
    aligned_NR = aligned(lengths_NR, align_R)
    is_long = (aligned_NR > capacity_R).any(axis=1)
    if is_long.any():
        index = int(is_long.argmax())
        raise ValueError(
            f"Sample {first + index} of length {_shown(lengths_NR[index])} is "
            f"{_shown(aligned_NR[index])} when aligned to {_shown(align_R)}, above the capacity of "
            f"{_shown(capacity_R)}. Truncate, split or drop such samples, or make the capacity a "
            "multiple of the alignment."
        )
    return aligned_NR


def _shown(values: Any) -> str:
    return str(values.tolist() if len(values) > 1 else values.item())
