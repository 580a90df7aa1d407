"""Next fit: samples stay in order, and only the last pack is open."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from energon_lite.batching.compiled import kernel
from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import check_sizes
from energon_lite.core.arrays import Int64Array


def sequential(
    lengths: npt.ArrayLike,
    capacity: int | npt.ArrayLike,
    *,
    max_samples: int | None = None,
    align: int | npt.ArrayLike = 1,
) -> Lists:
    """Puts each sample into the last pack, or into a new one if it does not fit.

    Samples stay in their order, through all packs: for curricula. That costs room: 67 to 98 % of
    it is filled where first-fit decreasing fills 97 to 100 %, and up to twice as many packs as
    necessary are made. O(N) time.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R), see `first_fit_decreasing`.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).

    Returns:
        Packs whose `indices` are 0..N-1.

    Raises:
        TypeError: Not integers.
        ValueError: A length is out of range; names the first such sample.

    Example:
        >>> sequential(np.array([4, 3, 3, 2]), capacity=6).tolist()
        [[0], [1, 2], [3]]
    """
    sizes = check_sizes(lengths, capacity, max_samples=max_samples, align=align)
    starts, num_packs = _next_fit(sizes.lengths.reshape(-1), sizes.capacities, sizes.max_samples)
    return Lists(np.arange(len(sizes.lengths), dtype=np.int64), starts[: num_packs + 1].copy())


@kernel("(int64[::1], int64[::1], int64)")
def _next_fit(
    lengths: Int64Array, capacity_R: Int64Array, max_samples: int
) -> tuple[Int64Array, int]:
    num = len(capacity_R)
    num_samples = len(lengths) // num
    offsets = np.empty(num_samples + 1, np.int64)
    rooms = np.zeros(num, np.int64)
    num_packs = start = 0
    for index in range(num_samples):
        is_full = index == 0 or index - start == max_samples
        for r in range(num):
            is_full |= lengths[index * num + r] > rooms[r]
        if is_full:
            offsets[num_packs] = start = index
            num_packs += 1
            for r in range(num):
                rooms[r] = capacity_R[r]
        for r in range(num):
            rooms[r] -= lengths[index * num + r]
    offsets[num_packs] = num_samples
    return offsets, num_packs
