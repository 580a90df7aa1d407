"""Samples sorted into classes of equal length, in linear time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.compiled import kernel
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

    def longest_first(self) -> tuple[Int64Array, Int64Array]:
        """Returns each length that occurs, longest first, and how many samples have it."""
        counts = np.diff(self.starts)
        classes = counts.nonzero()[0][::-1]
        lengths = self.lengths[classes] if len(self.lengths) else classes
        return np.ascontiguousarray(lengths), np.ascontiguousarray(counts[classes])

    def samples_longest_first(self) -> Int64Array:
        """Returns the samples, shape (N,), longest first, those of equal length by index."""
        starts, counts = self.starts[:-1], np.diff(self.starts)
        classes = counts.nonzero()[0][::-1]
        # From rank in the new order to rank in the old: class by class, each in its own order.
        begins = np.concatenate([[0], np.cumsum(counts[classes])[:-1]])
        shifts = np.repeat(starts[classes] - begins, counts[classes])
        samples: Int64Array = self.samples[np.arange(len(shifts)) + shifts].astype(np.int64)
        return samples


def sort_into_classes(sizes: Sizes) -> LengthClasses:
    """Sorts by the length in the first resource, in O(N + longest), or O(N log N) if they are few.

    Few and far longer than there are samples: then the classes are the lengths that occur.
    """
    lengths_N = sizes.first_lengths
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
