"""Packs one after the other from a window of samples, each opened with the oldest sample."""

from __future__ import annotations

import numpy as np

from energon_lite.batching.compiled import kernel
from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import Sizes
from energon_lite.core.arrays import BoolArray, Int64Array


def pack_from_window(
    sizes: Sizes,
    samples_N: Int64Array,
    *,
    window: int,
    max_steps: int,
    in_order_share: float = 0.0,
) -> Lists:
    """Opens each pack with the oldest sample of a window, and searches there for what fills it.

    Taking the oldest, in random order, uses up all lengths at the rate at which they occur. A
    packer that takes the longest first is left with those that fit nothing.

    Args:
        sizes: lengths and limits. With several resources, the search fills the one that needs the
            most packs, as far as the others allow.
        samples_N: shape (N,); the order in which samples enter the window: a random one.
        window: samples that the search may choose from.
        max_steps: how many samples the search may put into a pack, and take out again.
        in_order_share: a pack is filled to this share with the oldest samples before the search.
            Where `max_samples` is tight, the search would use up the short samples first.
    """
    resources = _scarcest_first(sizes)
    lengths_NR = np.ascontiguousarray(sizes.lengths[samples_N][:, resources])
    capacity_R = np.ascontiguousarray(sizes.capacities[resources])
    # Equal rows have equal keys, and keys rise with the length in the first resource.
    keys_N = lengths_NR[:, 0].copy()
    if len(resources) > 1:
        keys_N = np.unique(lengths_NR, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    num_samples = len(samples_N)
    positions, offsets = np.empty(num_samples, np.int64), np.zeros(num_samples + 1, np.int64)
    scratch = np.empty((4, min(window, num_samples) + 1), np.int64)
    keys, ids, path, best = scratch
    num_packs = _pack(
        lengths_NR.reshape(-1),
        keys_N,
        capacity_R,
        capacity_R.copy(),
        np.zeros(num_samples, np.bool_),
        positions,
        offsets,
        keys,
        ids,
        path,
        best,
        sizes.max_samples,
        max_steps,
        int(in_order_share * capacity_R[0]),
    )
    return Lists(samples_N[positions], offsets[: num_packs + 1].copy())


def _scarcest_first(sizes: Sizes) -> Int64Array:
    packs_R = sizes.lengths.sum(axis=0) / sizes.capacities
    return np.argsort(-packs_R, kind="stable")


@kernel()
def _first_not_below(keys: Int64Array, num: int, key: int) -> int:
    low, high = 0, num
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@kernel()
def _next_fitting(
    place: int,
    ids: Int64Array,
    lengths: Int64Array,
    rooms: Int64Array,
) -> int:
    """The last place up to `place` whose sample fits, or -1. Places are sorted by length."""
    num = len(rooms)
    low, high = 0, place + 1
    while low < high:
        middle = (low + high) >> 1
        if lengths[ids[middle] * num] <= rooms[0]:
            low = middle + 1
        else:
            high = middle
    for candidate in range(low - 1, -1, -1):
        start = ids[candidate] * num
        r = 1
        while r < num and lengths[start + r] <= rooms[r]:
            r += 1
        if r == num:
            return candidate
    return -1


@kernel()
def _take(rooms: Int64Array, lengths: Int64Array, sample: int, sign: int) -> None:
    num = len(rooms)
    for r in range(num):
        rooms[r] -= sign * lengths[sample * num + r]


@kernel()
def _search(
    keys: Int64Array,
    ids: Int64Array,
    num_held: int,
    lengths: Int64Array,
    rooms: Int64Array,
    places_left: int,
    max_steps: int,
    path: Int64Array,
    best: Int64Array,
) -> int:
    """Looks for what leaves least of `rooms[0]`, depth first, longest first; gives how many.

    Their places in the window are in `best`, descending.
    """
    size = best_size = steps = 0
    best_room = rooms[0] + 1
    place = num_held - 1
    while True:
        if size < places_left and steps < max_steps:
            place = _next_fitting(place, ids, lengths, rooms)
            if place >= 0:
                path[size] = place
                size += 1
                steps += 1
                _take(rooms, lengths, ids[place], 1)
                place -= 1
                continue
        if rooms[0] < best_room:
            best_room, best_size = rooms[0], size
            for j in range(size):
                best[j] = path[j]
        if size == 0 or steps >= max_steps or best_room == 0:
            return best_size
        size -= 1
        place = path[size]
        _take(rooms, lengths, ids[place], -1)
        # Another sample of the same lengths would lead to the same packs.
        while place > 0 and keys[place - 1] == keys[place]:
            place -= 1
        place -= 1


@kernel()
def _insert(keys: Int64Array, ids: Int64Array, num_held: int, key: int, sample: int) -> None:
    place = _first_not_below(keys, num_held, key + 1)
    for j in range(num_held, place, -1):
        keys[j], ids[j] = keys[j - 1], ids[j - 1]
    keys[place], ids[place] = key, sample


@kernel()
def _drop_packed(keys: Int64Array, ids: Int64Array, num_held: int, is_packed: BoolArray) -> int:
    """Takes out of the window what is packed; gives how many samples are left in it."""
    kept = 0
    for j in range(num_held):
        keys[kept], ids[kept] = keys[j], ids[j]
        kept += not is_packed[ids[j]]
    return kept


@kernel()
def _fits(lengths: Int64Array, sample: int, rooms: Int64Array) -> bool:
    num = len(rooms)
    is_fitting = True
    for r in range(num):
        is_fitting &= lengths[sample * num + r] <= rooms[r]
    return is_fitting


_ARRAYS = ", ".join(["int64[::1]"] * 4 + ["boolean[::1]"] + ["int64[::1]"] * 6)


@kernel(f"({_ARRAYS}, int64, int64, int64)")
def _pack(
    lengths: Int64Array,
    keys_N: Int64Array,
    capacity_R: Int64Array,
    rooms: Int64Array,
    is_packed: BoolArray,
    indices: Int64Array,
    offsets: Int64Array,
    keys: Int64Array,
    ids: Int64Array,
    path: Int64Array,
    best: Int64Array,
    max_samples: int,
    max_steps: int,
    in_order: int,
) -> int:
    """Writes `indices` and `offsets`, and gives the number of packs.

    The window is `keys` and `ids`, sorted by key, up to `num_held`. It has one place more than it
    may hold.
    """
    num_samples = len(keys_N)
    window = len(keys) - 1
    num_held = num_read = oldest = num_packs = position = 0
    while position < num_samples:
        while num_held < window and num_read < num_samples:
            _insert(keys, ids, num_held, keys_N[num_read], num_read)
            num_held += 1
            num_read += 1
        offsets[num_packs] = position
        num_packs += 1
        for r in range(len(rooms)):
            rooms[r] = capacity_R[r]
        num_taken = 0
        while num_taken < min(num_held, max_samples):
            while is_packed[oldest]:
                oldest += 1
            is_enough = capacity_R[0] - rooms[0] >= in_order
            if num_taken and (is_enough or not _fits(lengths, oldest, rooms)):
                break
            _take(rooms, lengths, oldest, 1)
            is_packed[oldest] = True
            indices[position] = oldest
            position += 1
            num_taken += 1
        num_held = _drop_packed(keys, ids, num_held, is_packed)
        places = max_samples - num_taken
        num_found = _search(keys, ids, num_held, lengths, rooms, places, max_steps, path, best)
        for j in range(num_found):
            sample = ids[best[j]]
            is_packed[sample] = True
            indices[position] = sample
            position += 1
        num_held = _drop_packed(keys, ids, num_held, is_packed)
    offsets[num_packs] = num_samples
    return num_packs
