"""Patterns of packs where lengths repeat: the cutting stock problem, by column generation.

D classes of samples of one length each are to be packed. A pattern is the number of samples of each
class in a pack. A linear program finds how often to use which pattern if parts of packs were
allowed: its simplex method needs D patterns at a time, and the next one is that which is worth most
at the prices of the present solution, a knapsack [1]. Patterns are chosen by prices between these
and the best ones so far, as prices would swing for thousands of steps [2].

Source: [1] P. Gilmore, R. Gomory, "A linear programming approach to the cutting-stock problem",
Oper. Res. 9 (1961). [2] P. Wentges, "Weighted Dantzig-Wolfe decomposition for linear mixed-integer
programming", Int. Trans. Oper. Res. 4 (1997).
"""

from __future__ import annotations

import numpy as np

from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.compiled import kernel

# The share of the best prices so far.
_WEIGHT = 0.8
# It ends this near to the optimum: rounding costs as much.
_NEAR = 1e-4
_TINY = 1e-9
# Multiplications of all steps, which take about a second; and of a step, beyond which the steps
# would be too few.
_MAX_WORK, _MAX_STEP_WORK = 2_000_000_000, 1_000_000


# Samples of a class in the mean, below which most uses of patterns are rounded down to 0.
_LEAST_SAMPLES = 8


def full_packs(
    lengths_N: Int64Array, capacity: int, max_samples: int
) -> tuple[Lists, Int64Array] | None:
    """Packs as often by each pattern as the linear program does, rounded down.

    Args:
        lengths_N: shape (N,), each in 1..capacity.
        capacity: what a pack can hold.
        max_samples: samples in one pack at most.

    Returns:
        Packs; and the samples that are in none of them, which need about D / 2 packs. None if there
        are too many lengths: it would take more than about a second.
    """
    lengths_D, class_N, counts_D = np.unique(lengths_N, return_inverse=True, return_counts=True)
    num_classes, unit = len(lengths_D), int(np.gcd.reduce(lengths_D))
    own_D, limit = lengths_D // unit, capacity // unit
    most = max_samples if max_samples < limit // int(own_D.min()) else 0  # 0 for any number
    work = num_classes * (num_classes + limit * max(1, most))
    if len(lengths_N) < _LEAST_SAMPLES * num_classes or work > _MAX_STEP_WORK:
        return None
    patterns_DD, uses_D = _solve(own_D, counts_D, limit, most, _MAX_WORK // work)
    samples_N = np.argsort(class_N, kind="stable")
    free = np.concatenate([[0], np.cumsum(counts_D)])
    ends, blocks, sizes = free[1:].copy(), [], []
    for pattern, uses in zip(patterns_DD, np.floor(uses_D + _TINY).astype(np.int64), strict=True):
        classes = np.flatnonzero(pattern)
        counts = pattern[classes]
        # Never more than there are, whatever was rounded on the way.
        num = min(int(uses), int(((ends[classes] - free[classes]) // counts).min()))
        columns = [
            samples_N[free[c] : free[c] + num * count].reshape(num, count)
            for c, count in zip(classes.tolist(), counts.tolist(), strict=True)
        ]
        free[classes] += num * counts
        blocks.append(np.concatenate(columns, axis=1).ravel())
        sizes.append(np.full(num, counts.sum()))
    rest = np.concatenate(
        [samples_N[start:end] for start, end in zip(free.tolist(), ends.tolist(), strict=False)]
    )
    offsets = np.cumsum(np.concatenate([[0], *sizes]))
    return Lists(np.concatenate(blocks), offsets.astype(np.int64)), np.sort(rest)


@kernel()
def _price(
    lengths_D: Int64Array, prices_D: Float64Array, best: Float64Array, last: Int64Array
) -> None:
    """Finds what is worth most in each room: one row, or a row for each number of samples.

    `last` has the class that was put there last, or -1.
    """
    is_limited = len(best) > 1
    best[0, :], last[0, :] = 0.0, -1
    for row in range(int(is_limited), len(best)):
        below = row - 1 if is_limited else row
        if is_limited:
            best[row, :], last[row, :] = best[below, :], -1
        for c in range(len(lengths_D)):
            length, price = lengths_D[c], prices_D[c]
            for room in range(length, best.shape[1] if price > 0 else 0):
                worth = best[below, room - length] + price
                if worth > best[row, room] + 1e-12:
                    best[row, room], last[row, room] = worth, c


@kernel()
def _best_pattern(lengths_D: Int64Array, last: Int64Array, pattern_D: Int64Array) -> None:
    """Writes what is worth most in a pack."""
    pattern_D[:] = 0
    row, room = len(last) - 1, last.shape[1] - 1
    while True:
        c = last[row, room]
        if c >= 0:
            pattern_D[c] += 1
            room -= lengths_D[c]
        row = max(row - 1, 0)
        if c < 0 and (row == 0 or len(last) == 1):
            return


@kernel()
def _enter(
    pattern_D: Int64Array,
    inverse: Float64Array,
    uses_D: Float64Array,
    duals_D: Float64Array,
    steps_D: Float64Array,
) -> int:
    """Puts a pattern into the basis; returns the row of the one that leaves it, or -1."""
    num = len(pattern_D)
    row, least = -1, np.inf
    for r in range(num):
        steps_D[r] = 0.0
        for c in range(num):
            if pattern_D[c]:
                steps_D[r] += inverse[r, c] * pattern_D[c]
        if steps_D[r] > _TINY and uses_D[r] < least * steps_D[r]:
            row, least = r, uses_D[r] / steps_D[r]
    if row < 0:
        return row
    gain = 1.0
    for c in range(num):
        gain -= duals_D[c] * pattern_D[c]
        inverse[row, c] /= steps_D[row]
    for r in range(num):
        step = steps_D[r]
        if r != row and step != 0:
            uses_D[r] = max(uses_D[r] - step * least, 0.0)
            for c in range(num):
                inverse[r, c] -= step * inverse[row, c]
    uses_D[row] = least
    for c in range(num):
        duals_D[c] += gain * inverse[row, c]
    return row


@kernel("(int64[::1], int64[::1], int64, int64, int64)")
def _solve(
    lengths_D: Int64Array, counts_D: Int64Array, capacity: int, max_samples: int, max_steps: int
) -> tuple[Int64Array, Float64Array]:
    """Returns D patterns, shape (D, D), and how often each is used, in parts of packs."""
    num = len(lengths_D)
    best = np.zeros((max_samples + 1, capacity + 1))
    last = np.zeros((max_samples + 1, capacity + 1), np.int64)
    patterns, inverse = np.zeros((num, num), np.int64), np.zeros((num, num))
    uses_D, duals_D, steps_D = np.zeros(num), np.zeros(num), np.zeros(num)
    pattern_D, prices_D = np.zeros(num, np.int64), lengths_D / capacity
    center_D = prices_D.copy()
    for c in range(num):
        size = capacity // lengths_D[c]
        size = min(size, max_samples) if max_samples else size
        patterns[c, c], inverse[c, c], duals_D[c] = size, 1 / size, 1 / size
        uses_D[c] = counts_D[c] / size
    bound, weight = 0.0, _WEIGHT
    for _ in range(max_steps):
        prices_D[:] = weight * center_D + (1 - weight) * duals_D
        _price(lengths_D, prices_D, best, last)
        _best_pattern(lengths_D, last, pattern_D)
        total = worth = 0.0
        for c in range(num):
            total += counts_D[c] * max(prices_D[c], 0.0)
            worth += pattern_D[c] * duals_D[c]
        value = best[max_samples, capacity]
        if total > bound * value:
            bound = total / value
            center_D[:] = np.maximum(prices_D, 0.0) / value
        if uses_D.sum() <= bound * (1 + _NEAR) or (worth <= 1 + _TINY and weight == 0):
            break
        if worth > 1 + _TINY:
            row = _enter(pattern_D, inverse, uses_D, duals_D, steps_D)
            if row < 0:
                break
            patterns[row] = pattern_D
            weight = _WEIGHT
        else:  # at these prices no pattern is better: nearer to those of the present solution
            weight = weight / 2 if weight > 0.05 else 0.0
    return patterns, uses_D
