"""Lower bounds on the number of packs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from energon_lite.batching.sizes import Sizes, check_sizes
from energon_lite.core.arrays import Int64Array

# Lengths that the bounds try as threshold, and divisions that they try.
_MAX_THRESHOLDS = 256
_MAX_DIVISIONS = 50


def lower_bound(
    lengths: npt.ArrayLike,
    capacity: int | npt.ArrayLike,
    *,
    max_samples: int | None = None,
    align: int | npt.ArrayLike = 1,
) -> int:
    """Returns a number of packs that no packing can go below.

    The largest of: the sum of lengths over the capacity; Martello and Toth's L2 [1]; two families
    of dual feasible functions [2]; the number of samples over `max_samples`. With several
    resources, the largest over resources. On lengths of texts the bound is reached; where two or
    three samples fit into a pack it may be about a per cent too low.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R), see `first_fit_decreasing`.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).

    Raises:
        TypeError: Not integers.
        ValueError: A length is out of range; names the first such sample.

    Example:
        >>> lower_bound(np.array([6, 6, 6]), capacity=10)  # their sum would fit into two
        3

    Source: [1] S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin packing
    problem", Discrete Appl. Math. 28 (1990). [2] S. Fekete, J. Schepers, "New classes of fast
    lower bounds for bin packing problems", Math. Program. 91 (2001).
    """
    return bound_of(check_sizes(lengths, capacity, max_samples=max_samples, align=align))


def bound_of(sizes: Sizes) -> int:
    """Returns the lower bound for lengths that are checked."""
    bound = -(-len(sizes.lengths) // sizes.max_samples)
    for lengths_N, capacity in zip(sizes.lengths.T, sizes.capacities.tolist(), strict=True):
        present = lengths_N[lengths_N > 0]
        if len(present):
            # Sorted and counted: D different lengths, ascending.
            lengths_D, counts_D = np.unique(present, return_counts=True)
            bound = max(
                bound,
                _ceil(int(present.sum()), capacity),
                _martello_toth(lengths_D, counts_D, capacity),
                _divisions(lengths_D, counts_D, capacity),
                _thresholds(lengths_D, counts_D, capacity),
            )
    return bound


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _martello_toth(lengths_D: Int64Array, counts_D: Int64Array, capacity: int) -> int:
    """L2: no two samples above half a pack share one, and what they leave is too small for some.

    For a threshold k: samples above capacity - k are alone, as nothing of k or more fits beside
    them. The others above one half leave some room; samples of k up to one half go there, and what
    does not fit needs more packs.
    """
    half = int(np.searchsorted(lengths_D, capacity // 2, side="right"))
    counts = np.concatenate([[0], np.cumsum(counts_D)])
    totals = np.concatenate([[0], np.cumsum(counts_D * lengths_D)])
    num_above_half = int(counts[-1] - counts[half])
    # Each length up to one half as threshold, and 0 in front.
    thresholds = np.concatenate([[0], lengths_D[:half]])
    begins = np.concatenate([[0], np.arange(half)])
    ends = np.searchsorted(lengths_D, capacity - thresholds, side="right")
    left = (counts[ends] - counts[half]) * capacity - (totals[ends] - totals[half])
    small = totals[half] - totals[begins]
    extra = -(-(small - left) // capacity)
    return num_above_half + max(0, int(extra.max()))


def _divisions(lengths_D: Int64Array, counts_D: Int64Array, capacity: int) -> int:
    """Rounds each length x to floor((k + 1) x) / k, if (k + 1) x is not whole.

    x is the share of the capacity. No set of lengths that fits into a pack then adds up to more
    than one pack. Three samples just above a third become three halves, with k = 2.
    """
    bound = 0
    for k in range(1, min(_MAX_DIVISIONS, capacity) + 1):
        steps, rest = np.divmod((k + 1) * lengths_D, capacity)
        whole = int((counts_D * steps)[rest == 0].sum())  # in units of 1 / (k + 1)
        rounded = int((counts_D * steps)[rest != 0].sum())  # in units of 1 / k
        bound = max(bound, _ceil(rounded * (k + 1) + whole * k, k * (k + 1)))
    return bound


def _thresholds(lengths_D: Int64Array, counts_D: Int64Array, capacity: int) -> int:
    """Counts samples of at least t: floor(capacity / t) of them fill a pack.

    A sample above one half counts as all but those of length t that fit beside it.
    """
    small = lengths_D[: int(np.searchsorted(lengths_D, capacity // 2, side="right"))]
    bound = 0
    for threshold in small[:: _ceil(len(small), _MAX_THRESHOLDS) or 1].tolist():
        per_pack = capacity // threshold
        beside = (capacity - lengths_D) // threshold
        weights = np.where(2 * lengths_D > capacity, per_pack - beside, lengths_D >= threshold)
        bound = max(bound, _ceil(int((counts_D * weights).sum()), per_pack))
    return bound
