"""First-fit decreasing, first fit and next fit: a sample goes into a pack that has room for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import Sizes, check_sizes
from energon_lite.core.arrays import Int64Array, argsort
from energon_lite.core.compiled import kernel

# Up to here, or to this many times the number of samples, samples are sorted by counting lengths.
_SMALL_LENGTH = 1 << 16
_LENGTHS_PER_SAMPLE = 4


def _fill_packs(sizes: Sizes) -> Lists:
    """Fills one pack after the other with the longest sample that fits, over and over.

    These are the packs of first-fit decreasing, of one resource. Samples are sorted by length,
    ascending; those of equal length by index. O(N + longest) time.
    """
    lengths_N = np.ascontiguousarray(sizes.lengths[:, 0])
    num_samples, longest = len(lengths_N), int(lengths_N.max(initial=0))
    samples_N, starts = _by_key(lengths_N, longest + 1)
    below = np.maximum.accumulate(np.where(np.diff(starts) > 0, np.arange(longest + 1), 0))
    indices, offsets = np.empty(num_samples, np.int64), np.zeros(num_samples + 1, np.int64)
    num_packs = _fill(
        starts, below, samples_N, indices, offsets, sizes.capacity,
        min(sizes.max_samples, num_samples),
    )  # fmt: skip
    return Lists(indices, offsets[: num_packs + 1].copy())


@kernel()
def _length_left(below: Int64Array, length: int) -> int:
    """The longest length up to this one of which samples are left, or 0.

    `below[n]` is n while samples are left, and then some length below it that is not beyond the
    answer. Every look-up halves the way for later ones.
    """
    while below[length] != length:
        below[length] = below[below[length]]
        length = below[length]
    return length


_ARRAYS = ", ".join(["int64[::1]"] * 5)


@kernel(f"({_ARRAYS}, int64, int64)")
def _fill(
    starts: Int64Array,
    below: Int64Array,
    samples_N: Int64Array,
    indices: Int64Array,
    offsets: Int64Array,
    capacity: int,
    max_samples: int,
) -> int:
    """Writes `indices` and `offsets`, and returns the number of packs.

    The samples of a length are `samples_N[starts[length] : starts[length + 1]]`.
    """
    free = starts.copy()  # the first sample of each length that is left
    longest = len(below) - 1
    num_packs = position = 0
    while position < len(samples_N):
        room, end, length = capacity, position + max_samples, _length_left(below, longest)
        while length > 0:
            num_left, take = starts[length + 1] - free[length], 1
            if length * 2 <= room and num_left > 1:  # so that few divisions are made: they are slow
                take = min(room // length, num_left, end - position)
            for index in range(free[length], free[length] + take):
                indices[position] = samples_N[index]
                position += 1
            free[length] += take
            if take == num_left:
                below[length] = length - 1
            room -= take * length
            if room == 0 or position == end:
                break
            length = _length_left(below, min(length - 1, room))
        num_packs += 1
        offsets[num_packs] = position
    return num_packs


def first_fit_decreasing(
    lengths: npt.ArrayLike,
    capacity: int | npt.ArrayLike,
    *,
    max_samples: int | None = None,
    align: int | npt.ArrayLike = 1,
) -> Lists:
    """Puts each sample, longest first, into the first pack that still has room.

    Needs at most 11/9 OPT + 6/9 packs [1] for one resource without `max_samples`. O(N + capacity)
    time; with several resources, or with lengths above 65,536 and above 4 N, O(N log N) as a rule.
    Samples of equal length go by index. With several resources the longest sample is the one that
    takes the largest share of some capacity.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R) for several resources, such as tokens
            and tiles, each in 0..capacity, in at least one resource above 0.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).

    Returns:
        Packs, from long samples to short ones: shuffle them before training.

    Raises:
        TypeError: Not integers.
        ValueError: A length is out of range; names the first such sample.

    Example:
        >>> first_fit_decreasing(np.array([4, 3, 3, 2]), capacity=6).tolist()
        [[0, 3], [1, 2]]

    Source: [1] G. Dósa, "The tight bound of first fit decreasing bin-packing algorithm is
    FFD(I) ≤ 11/9 OPT(I) + 6/9", ESCAPE 2007. Building the packs one after the other leads to the
    same packs.
    """
    return fit_decreasing(check_sizes(lengths, capacity, max_samples=max_samples, align=align))


def fit_decreasing(sizes: Sizes) -> Lists:
    """Does first-fit decreasing, for lengths that are checked."""
    num_counted = max(_SMALL_LENGTH, _LENGTHS_PER_SAMPLE * len(sizes.lengths))
    if len(sizes.capacities) == 1 and sizes.lengths.max(initial=0) <= num_counted:
        return _fill_packs(sizes)
    shares_N = (sizes.lengths / sizes.capacities).max(axis=1, initial=0)
    return fit_in_order(sizes, np.argsort(-shares_N, kind="stable"))


def first_fit(
    lengths: npt.ArrayLike,
    capacity: int | npt.ArrayLike,
    *,
    max_samples: int | None = None,
    align: int | npt.ArrayLike = 1,
) -> Lists:
    """Puts each sample, in the order of the argument, into the first pack that still has room.

    Needs at most 1.7 OPT packs [1]; on lengths of texts in random order, some tenths of a per cent
    more than first-fit decreasing, but with long and short samples mixed. O(N log P) time; with
    several resources as a rule.

    Args:
        lengths: shape (N,) or (N, R); see `first_fit_decreasing`.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).

    Raises:
        TypeError: Not integers.
        ValueError: A length is out of range; names the first such sample.

    Example:
        >>> first_fit(np.array([2, 3, 4, 3]), capacity=6).tolist()
        [[0, 1], [2], [3]]

    Source: [1] G. Dósa, J. Sgall, "First fit bin packing: a tight analysis", STACS 2013.
    """
    return fit_in_order(check_sizes(lengths, capacity, max_samples=max_samples, align=align))


def fit_in_order(sizes: Sizes, samples_N: Int64Array | None = None) -> Lists:
    """Does first fit in the order `samples_N`, shape (N,), or by index."""
    lengths_NR = sizes.lengths if samples_N is None else sizes.lengths[samples_N]
    # Two packs of fewer than `max_samples` hold together, of some resource, more than one can. So
    # all of these but one are half full, added up over the resources.
    most = len(lengths_NR) // sizes.max_samples + 1
    most += int((2 * lengths_NR.sum(axis=0) // sizes.capacities + 1).sum())
    num_nodes = 2 << min(most, len(lengths_NR)).bit_length()
    tree = np.full((num_nodes, lengths_NR.shape[1]), sizes.capacities).reshape(-1)
    pack_of_N, num_packs = _first_fit(
        lengths_NR.reshape(-1), tree, lengths_NR.shape[1], sizes.max_samples
    )
    positions, offsets = _by_key(pack_of_N, num_packs)
    return Lists(positions if samples_N is None else samples_N[positions], offsets)


# The rooms of the packs are the leaves of a binary tree in which a node has the largest room below
# it, in each resource: node 1 is the root, 2n and 2n + 1 are below n, leaf `half + i` is pack i.
# Packs not yet opened are leaves too, of full room, so opening one is no special case. Node n has
# `tree[n * R : (n + 1) * R]`: whole arrays and slices would take numba seconds more to compile.


@kernel()
def _first_leaf(tree: Int64Array, half: int, lengths: Int64Array, start: int, num: int) -> int:
    """The first pack with room for `lengths[start : start + num]`; there must be one.

    A node may seem to have room where none of its packs has: one has the tokens, another the
    tiles. Then the search continues to the right of it.
    """
    node = 1
    while True:
        r = 0
        while r < num and tree[node * num + r] >= lengths[start + r]:
            r += 1
        if r == num:
            if node >= half:
                return node - half
            node *= 2
            continue
        while node & 1:
            node >>= 1
        node += 1


@kernel()
def _lift(tree: Int64Array, node: int, num: int) -> bool:
    """Sets a node to the larger of the two below it; returns whether that changes it."""
    is_changed = False
    for r in range(num):
        room = max(tree[2 * node * num + r], tree[(2 * node + 1) * num + r])
        is_changed |= room != tree[node * num + r]
        tree[node * num + r] = room
    return is_changed


@kernel("(int64[::1], int64[::1], int64, int64)")
def _first_fit(
    lengths: Int64Array, tree: Int64Array, num: int, max_samples: int
) -> tuple[Int64Array, int]:
    num_samples, half = len(lengths) // num, len(tree) // num // 2
    pack_of_N = np.empty(num_samples, np.int64)
    counts = np.zeros(num_samples, np.int64)
    num_packs = 0
    for index in range(num_samples):
        pack = _first_leaf(tree, half, lengths, index * num, num)
        pack_of_N[index] = pack
        num_packs = max(num_packs, pack + 1)
        counts[pack] += 1
        node = half + pack
        for r in range(num):
            # Below 0 there is no room for anything, not even where a sample takes nothing.
            room = tree[node * num + r] - lengths[index * num + r]
            tree[node * num + r] = room if counts[pack] < max_samples else -1
        node >>= 1
        while node and _lift(tree, node, num):
            node >>= 1
    return pack_of_N, num_packs


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


def _by_key(keys_N: Int64Array, num_keys: int) -> tuple[Int64Array, Int64Array]:
    """Returns positions sorted by key, equal ones in order, and where each key starts.

    For keys 1, 0, 1 the positions are 1, 0, 2 and the starts 0, 1, 3.
    """
    return argsort(keys_N), np.append(0, np.cumsum(np.bincount(keys_N, minlength=num_keys)))
