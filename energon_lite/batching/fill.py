"""Builds one pack at a time out of classes of equal length, and repeats it while samples last."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from energon_lite.batching.compiled import kernel
from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import Sizes
from energon_lite.core.arrays import Int32Array, Int64Array

# Up to here, or to this many times the number of samples, every possible length is a class.
_SMALL_LENGTH = 1 << 16
_LENGTHS_PER_SAMPLE = 4


@dataclass(frozen=True)
class LengthClasses:
    """Samples sorted by length, ascending, those of equal length by index.

    There are D classes, 1..D. Class c holds the samples `samples[starts[c]:starts[c + 1]]`.

    Attributes:
        lengths: shape (D + 1,), the length of each class; or empty: then class c has length c.
        starts: shape (D + 2,).
        samples: shape (N,); sample indices.
    """

    lengths: Int64Array
    starts: Int64Array
    samples: Int32Array


def sort_into_classes(sizes: Sizes) -> LengthClasses:
    """Sorts by the length in the first resource, in O(N + longest), or O(N log N) if they are few.

    Few and far longer than there are samples: then the classes are the lengths that occur.
    """
    lengths_N = np.ascontiguousarray(sizes.lengths[:, 0])
    longest = int(lengths_N.max()) if len(lengths_N) else 0
    if longest <= max(_SMALL_LENGTH, _LENGTHS_PER_SAMPLE * len(lengths_N)):
        starts, order_N = _count_and_sort(lengths_N, longest)
        return LengthClasses(np.empty(0, np.int64), starts, order_N)
    occurring, classes_N = np.unique(lengths_N, return_inverse=True)
    starts, order_N = _count_and_sort(classes_N.astype(np.int64) + 1, len(occurring))
    return LengthClasses(np.concatenate([[0], occurring]), starts, order_N)


@kernel("(int64[::1], int64)")
def _count_and_sort(classes_N: Int64Array, num_classes: int) -> tuple[Int64Array, Int32Array]:
    starts = np.zeros(num_classes + 2, np.int64)
    for c in classes_N:
        starts[c + 1] += 1
    for c in range(num_classes + 1):
        starts[c + 1] += starts[c]
    free = np.empty(num_classes + 1, np.int64)
    for c in range(num_classes + 1):
        free[c] = starts[c]
    order_N = np.empty(len(classes_N), np.int32)
    for index in range(len(classes_N)):
        c = classes_N[index]
        order_N[free[c]] = index
        free[c] += 1
    return starts, order_N


def fill_packs(classes: LengthClasses, capacity: int, max_samples: int) -> Lists:
    """Fills one pack after the other with the longest sample that fits, over and over.

    These are the packs of first-fit decreasing. The same pack is repeated while samples last.
    """
    num_samples, num_classes = len(classes.samples), len(classes.starts) - 2
    left = np.diff(classes.starts)
    below = np.maximum.accumulate(np.where(left > 0, np.arange(num_classes + 1), 0))
    indices, offsets = np.empty(num_samples, np.int64), np.zeros(num_samples + 1, np.int64)
    # One place for each length: as 1 + 2 + ... + n is at most the capacity, n is at most the root
    # of twice the capacity.
    pattern, takes = np.empty((2, min(max_samples, num_samples, math.isqrt(2 * capacity)) + 1), int)
    free = classes.starts[:-1].copy()
    num_packs = _fill(
        classes.lengths, left, below, free, classes.samples, indices, offsets, pattern, takes,
        capacity, max_samples,
    )  # fmt: skip
    return Lists(indices, offsets[: num_packs + 1].copy())


@kernel()
def _length_of(lengths: Int64Array, c: int) -> int:
    return lengths[c] if len(lengths) else c


@kernel()
def _class_within(lengths: Int64Array, num_classes: int, room: int) -> int:
    """The longest class that is at most `room` long, whether samples are left of it or not."""
    if len(lengths) == 0:
        return min(room, num_classes)
    low, high = 0, num_classes
    while low < high:
        middle = (low + high + 1) >> 1
        if lengths[middle] <= room:
            low = middle
        else:
            high = middle - 1
    return low


@kernel()
def _class_left(below: Int64Array, c: int) -> int:
    """The longest class up to c of which samples are left, or 0.

    `below[c]` is c while samples are left, and then some class below it that is not beyond the
    answer. Every look-up halves the way for later ones.
    """
    while below[c] != c:
        below[c] = below[below[c]]
        c = below[c]
    return c


@kernel()
def _longest_that_fit(
    lengths: Int64Array,
    left: Int64Array,
    below: Int64Array,
    pattern: Int64Array,
    takes: Int64Array,
    capacity: int,
    max_samples: int,
) -> int:
    """Takes the longest sample that fits, over and over; returns how many lengths those are."""
    num_classes = len(below) - 1
    size = 0
    room, places = capacity, max_samples
    c = _class_left(below, num_classes)
    while c > 0:
        length = _length_of(lengths, c)
        take = 1
        if length * 2 <= room and left[c] > 1:
            take = min(room // length, left[c])
        take = min(take, places)
        pattern[size], takes[size] = c, take
        size += 1
        room -= take * length
        places -= take
        if room == 0 or places == 0:
            break
        c = _class_left(below, min(c - 1, _class_within(lengths, num_classes, room)))
    return size


_ARRAYS = ", ".join(["int64[::1]"] * 4 + ["int32[::1]"] + ["int64[::1]"] * 4)


@kernel(f"({_ARRAYS}, int64, int64)")
def _fill(
    lengths: Int64Array,
    left: Int64Array,
    below: Int64Array,
    free: Int64Array,
    samples_N: Int32Array,
    indices: Int64Array,
    offsets: Int64Array,
    pattern: Int64Array,
    takes: Int64Array,
    capacity: int,
    max_samples: int,
) -> int:
    """Writes `indices` and `offsets`, and returns the number of packs.

    Of class c, `left[c]` samples are left, the first of them `samples_N[free[c]]`.
    """
    num_packs = position = 0
    while position < len(samples_N):
        size = _longest_that_fit(lengths, left, below, pattern, takes, capacity, max_samples)
        # The same pack again, as often as every class in it lasts.
        times = len(samples_N)
        for j in range(size):
            lasting = left[pattern[j]]
            if lasting < times * takes[j]:  # so that few divisions are made: they are slow
                times = lasting // takes[j]
        for _ in range(times):
            for j in range(size):
                start = free[pattern[j]]
                for index in range(start, start + takes[j]):
                    indices[position] = samples_N[index]
                    position += 1
                free[pattern[j]] += takes[j]
            num_packs += 1
            offsets[num_packs] = position
        for j in range(size):
            c = pattern[j]
            left[c] -= times * takes[j]
            if left[c] == 0:
                below[c] = c - 1
    return num_packs
