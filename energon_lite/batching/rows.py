"""From the pack of each sample to the samples of each pack."""

from __future__ import annotations

import numpy as np

from energon_lite.batching.compiled import kernel
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Int64Array


def rows_of(pack_of_N: Int64Array, num_packs: int, samples_N: Int64Array | None = None) -> Lists:
    """Groups samples by pack.

    Args:
        pack_of_N: shape (N,); the pack of each sample, in the order in which they were put.
        num_packs: P; every pack in 0..P-1 has a sample.
        samples_N: shape (N,); which samples these are, if not 0..N-1.
    """
    positions, offsets = _group(pack_of_N, num_packs)
    return Lists(positions if samples_N is None else samples_N[positions], offsets)


@kernel("(int64[::1], int64)")
def _group(pack_of_N: Int64Array, num_packs: int) -> tuple[Int64Array, Int64Array]:
    # A counting sort that keeps the order inside a pack. For packs 1, 0, 1 the positions are
    # 1, 0, 2 and the offsets 0, 1, 3.
    offsets = np.zeros(num_packs + 1, np.int64)
    for pack in pack_of_N:
        offsets[pack + 1] += 1
    for pack in range(num_packs):
        offsets[pack + 1] += offsets[pack]
    free = np.empty(num_packs, np.int64)
    for pack in range(num_packs):
        free[pack] = offsets[pack]
    positions = np.empty(len(pack_of_N), np.int64)
    for index in range(len(pack_of_N)):
        pack = pack_of_N[index]
        positions[free[pack]] = index
        free[pack] += 1
    return positions, offsets
