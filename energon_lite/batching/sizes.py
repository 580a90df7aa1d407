"""Checks lengths and limits before anything is packed."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_lite.core.arrays import Int64Array

# Sums over 2**26 samples still fit into 63 bits.
MAX_CAPACITY = 1 << 36
MAX_SAMPLES = 1 << 31


@dataclass(frozen=True)
class Sizes:
    """What is to be packed, checked.

    N samples, R resources; R is 1 with one.

    Attributes:
        lengths: shape (N, R), contiguous, each in 0..capacity, rounded up to the alignment.
        capacities: shape (R,), each at least 1.
        max_samples: samples in one pack at most; N or more means any number.
    """

    lengths: Int64Array
    capacities: Int64Array
    max_samples: int

    @property
    def first_lengths(self) -> Int64Array:
        """The lengths in the first resource, shape (N,); a view if there is but one."""
        return np.ascontiguousarray(self.lengths[:, 0])

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
) -> Sizes:
    """Checks lengths and limits, and rounds lengths up to the alignment.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R) for several resources, such as tokens
            and tiles, each in 0..capacity, in at least one resource above 0.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).

    Raises:
        TypeError: Not integers.
        ValueError: A shape is wrong, a limit is below 1, or a length is out of range; names the
            first such sample.
    """
    array = _integers("lengths", lengths)
    limits = np.atleast_1d(_integers("capacity", capacity))
    if array.size == 0 and array.ndim == 1:
        array = array.reshape(0, len(limits)) if np.ndim(capacity) else array
    if array.ndim not in (1, 2) or limits.ndim != 1 or limits.size == 0:
        raise ValueError(
            f"lengths must have shape (N,) with a number as capacity, or (N, R) with a capacity of "
            f"shape (R,), but have shapes {array.shape} and {np.shape(capacity)}."
        )
    if (array.ndim == 1) != (np.ndim(capacity) == 0) or (
        array.ndim == 2 and array.shape[1] != len(limits)
    ):
        raise ValueError(
            f"lengths of shape {array.shape} do not fit a capacity of shape {np.shape(capacity)}: "
            "give a number for (N,), one number for each resource for (N, R)."
        )
    if len(array) >= MAX_SAMPLES:
        raise ValueError(f"{len(array):,} samples are too many; pack them in parts.")
    capacity_R = _limits("capacity", limits)
    align_R = _limits("align", np.atleast_1d(_integers("align", align)))
    if len(align_R) not in (1, len(capacity_R)):
        raise ValueError(
            f"align has {len(align_R)} values for {len(capacity_R)} resources; give one number, or "
            "one for each."
        )
    lengths_NR = _checked(array.reshape(len(array), len(limits)), capacity_R, align_R, array.ndim)
    return Sizes(lengths_NR, capacity_R, _count(max_samples, len(array)))


def _integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.integer]:
    array = np.asarray(values)
    if array.size == 0:  # an empty list becomes an array of floats
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        hint = " Round them, then use .astype(np.int64)." if array.dtype.kind == "f" else ""
        raise TypeError(f"{name} must be integers, not {array.dtype}.{hint}")
    return array


def _limits(name: str, values: npt.NDArray[np.integer]) -> Int64Array:
    for value in values.tolist():
        if not 1 <= value <= MAX_CAPACITY:
            raise ValueError(f"{name} is {value}; it must be in 1..{MAX_CAPACITY}.")
    return values.astype(np.int64)


def _count(max_samples: int | None, num_samples: int) -> int:
    if max_samples is None:
        return max(num_samples, 1)
    count = operator.index(max_samples)
    if count < 1:
        raise ValueError(f"max_samples is {count}; give at least 1, or None for any number.")
    return count


def _checked(
    array: npt.NDArray[np.integer], capacity_R: Int64Array, align_R: Int64Array, ndim: int
) -> Int64Array:
    # The extremes are taken in the type that was given: uint64 above 2**63 would wrap to below 0.
    if array.size and not _is_in_range(array, capacity_R, ndim):
        _refuse(array, capacity_R, ndim)
    lengths_NR = np.ascontiguousarray(array, dtype=np.int64)
    if not lengths_NR.flags.writeable:  # a memory map; to numba, a type of its own
        lengths_NR = lengths_NR.copy()
    if (align_R == 1).all():
        return lengths_NR
    aligned = -(-lengths_NR // align_R) * align_R
    too_long = (aligned > capacity_R).any(axis=1)
    if too_long.any():
        index = int(too_long.argmax())
        raise ValueError(
            f"Sample {index} of length {_shown(lengths_NR[index], ndim)} is "
            f"{_shown(aligned[index], ndim)} when aligned to {_shown(align_R, ndim)}, above the "
            f"capacity of {_shown(capacity_R, ndim)}. Truncate, split or leave out such samples, "
            "or make the capacity a multiple of the alignment."
        )
    return aligned


def _is_in_range(array: npt.NDArray[np.integer], capacity_R: Int64Array, ndim: int) -> bool:
    if ndim == 1:
        return int(array.min()) >= 1 and int(array.max()) <= int(capacity_R[0])
    highest = array.max(axis=0).tolist()
    return (
        int(array.min()) >= 0
        and all(a <= b for a, b in zip(highest, capacity_R.tolist(), strict=True))
        and bool(array.any(axis=1).all())
    )


def _refuse(array: npt.NDArray[np.integer], capacity_R: Int64Array, ndim: int) -> None:
    """Names the first sample that is out of range."""
    lowest = 1 if ndim == 1 else 0
    above = array > capacity_R
    is_bad = (above | (array < lowest)).any(axis=1) | ~array.any(axis=1)
    index = int(is_bad.argmax())
    row = array[index]
    if above[index].any():
        what = f"above the capacity of {_shown(capacity_R, ndim)}"
        todo = "Truncate, split or leave out such samples, or raise the capacity."
    else:
        what = "below 1" if ndim == 1 or not (row < 0).any() else "negative"
        todo = "Leave out empty samples: they would be in no pack."
    raise ValueError(f"Sample {index} has length {_shown(row, ndim)}, {what}. {todo}")


def _shown(values: npt.NDArray[np.integer], ndim: int) -> str:
    return str(values.tolist()) if ndim == 2 and len(values) > 1 else str(values.tolist()[0])
