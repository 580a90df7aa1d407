"""Best fit, decreasing: each sample goes into the pack in which it leaves the least room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from energon_lite.batching.compiled import kernel
from energon_lite.batching.length_classes import sort_into_classes
from energon_lite.batching.lists import Lists
from energon_lite.batching.rows import rows_of
from energon_lite.batching.sizes import Sizes, check_sizes
from energon_lite.core.arrays import BoolArray, Int32Array, Int64Array

# There is a list of packs for each room that one may have.
MAX_BEST_FIT_CAPACITY = 1 << 24


def best_fit_decreasing(
    lengths: npt.ArrayLike, capacity: int, *, max_samples: int | None = None, align: int = 1
) -> Lists:
    """Puts each sample, longest first, into the pack in which it leaves the least room.

    Of several such packs it takes the one that was filled to that level first. O(N log capacity)
    time. It needs as many packs as first-fit decreasing within some hundredths of a per cent, and
    has the same bound of 11/9 OPT [1].

    Args:
        lengths: shape (N,), each in 1..capacity. One resource: with several there is no one room.
        capacity: tokens a pack can hold, at most 2**24.
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this.

    Returns:
        Packs, from long samples to short ones: shuffle them before training.

    Raises:
        TypeError: Not integers.
        ValueError: A length is out of range; names the first such sample. The capacity is not one
            number, or is above 2**24.

    Example:
        >>> best_fit_decreasing(np.array([6, 7, 3]), capacity=10).tolist()
        [[1, 2], [0]]

    Source: [1] D. Johnson et al., "Worst-case performance bounds for simple one-dimensional
    packing algorithms", SIAM J. Comput. 3 (1974).
    """
    sizes = check_sizes(lengths, capacity, max_samples=max_samples, align=align)
    if len(sizes.capacities) > 1:
        raise ValueError(
            f"best_fit_decreasing packs one resource, not {len(sizes.capacities)}; use "
            "first_fit_decreasing."
        )
    if sizes.capacity > MAX_BEST_FIT_CAPACITY:
        raise ValueError(
            f"capacity is {sizes.capacity}; best_fit_decreasing needs memory for each unit of it, "
            f"up to {MAX_BEST_FIT_CAPACITY}. Use first_fit_decreasing."
        )
    return fit_best(sizes)


def fit_best(sizes: Sizes) -> Lists:
    """Does best-fit decreasing with one resource, for lengths that are checked."""
    classes = sort_into_classes(sizes)
    placed_N = classes.samples_longest_first()
    num_samples, num_rooms = len(placed_N), sizes.capacity + 1
    pack_of_N = np.empty(num_samples, np.int64)
    num_packs = _best_fit(
        *classes.longest_first(),
        sizes.capacity,
        pack_of_N,
        np.full(num_samples + 1, sizes.max_samples, np.int64),
        np.zeros(num_samples + 1, np.int32),
        np.zeros(num_rooms, np.int32),
        np.zeros(num_rooms, np.int32),
        np.zeros(2 << num_rooms.bit_length(), np.bool_),
    )
    return rows_of(pack_of_N, num_packs, placed_N)


# Packs of equal room are a queue: `first[room]`, then `following[pack]`, up to `last[room]`; packs
# count from 1, 0 is none. `has` is a heap-shaped tree over rooms: node n is True if there is a pack
# below 2n or 2n + 1, so that the next room with a pack is found in O(log capacity).


@kernel()
def _tightest(has: BoolArray, half: int, length: int) -> int:
    """The smallest room, at least `length`, that some pack has; or -1."""
    node = half + length
    while not has[node]:
        while node & 1:
            node >>= 1
        if node == 0:
            return -1
        node += 1
    while node < half:
        node *= 2
        if not has[node]:
            node += 1
    return node - half


@kernel()
def _mark(has: BoolArray, node: int, is_there: bool) -> None:
    has[node] = is_there
    while node > 1:
        node >>= 1
        now = has[2 * node] or has[2 * node + 1]
        if has[node] == now:
            break
        has[node] = now


_ARRAYS = "int64[::1], int64[::1], int32[::1], int32[::1], int32[::1], boolean[::1]"


@kernel(f"(int64[::1], int64[::1], int64, {_ARRAYS})")
def _best_fit(
    lengths: Int64Array,
    counts: Int64Array,
    capacity: int,
    pack_of_N: Int64Array,
    places: Int64Array,
    following: Int32Array,
    first: Int32Array,
    last: Int32Array,
    has: BoolArray,
) -> int:
    half = len(has) // 2
    num_packs = position = 0
    for index in range(len(lengths)):
        length, count = lengths[index], counts[index]
        while count > 0:
            room = _tightest(has, half, length)
            if room < 0:
                num_packs += 1
                pack, room = num_packs, capacity
            else:
                pack = first[room]
                first[room] = following[pack]
                if first[room] == 0:
                    _mark(has, half + room, False)
            # The next sample of this length fits best where this one went.
            take = min(min(room // length, count), places[pack])
            for _ in range(take):
                pack_of_N[position] = pack - 1
                position += 1
            count -= take
            places[pack] -= take
            room -= take * length
            if places[pack] == 0 or room == 0:
                continue
            following[pack] = 0
            if first[room]:
                following[last[room]] = pack
            else:
                first[room] = pack
                _mark(has, half + room, True)
            last[room] = pack
    return num_packs
