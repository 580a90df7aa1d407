"""Batches of samples of similar lengths, from a window of lengths: pure functions on arrays.

Axes: N samples, B batches, S steps, R ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Int64Array

End = Literal["pad", "drop"]

# As a limit: more samples than any window has.
_ANY_NUMBER = 1 << 62


def number_groups(keys: Iterable[Hashable]) -> Int64Array:
    """Numbers keys from 0 in the order in which they first come; shape (N,).

    Raises:
        TypeError: A key is not hashable.
    """
    # Elements of a tensor are tensors, which hash by identity.
    keys = keys.tolist() if hasattr(keys, "tolist") else keys
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)


def aligned(lengths_N: Int64Array, align: int) -> Int64Array:
    """Rounds lengths up to a multiple of `align`."""
    return -(-lengths_N // align) * align


def limits_of_budget(lengths_N: Int64Array, max_tokens: int) -> Int64Array:
    """Returns how many samples a batch can have whose longest has each length; 0 if not even one.

    Args:
        lengths_N: shape (N,); tokens of each sample, with padding to a multiple if there is any,
            at least 1.
        max_tokens: tokens of a padded batch: its samples times its longest.
    """
    return max_tokens // lengths_N


def limits_of_function(lengths_N: Int64Array, batch_size_fn: Callable[[int], int]) -> Int64Array:
    """Asks a function how many samples a batch can have, once for each length there is.

    Raises:
        TypeError: It returns something else than an integer.
    """
    distinct, places_N = np.unique(lengths_N, return_inverse=True)
    limits = np.empty(len(distinct), np.int64)
    for place, length in enumerate(distinct.tolist()):
        size = batch_size_fn(length)
        try:
            # Below 0 is not even one, too; what is above 2**62 is any number.
            limits[place] = min(max(operator.index(size), 0), _ANY_NUMBER)
        except TypeError:
            raise TypeError(
                f"batch_size_fn({length}) returned {size!r}; it must return an integer: the number "
                "of samples in a batch whose longest has this length."
            ) from None
    return limits[places_N]


def sort_places(*columns: Int64Array) -> Int64Array:
    """Returns the places of rows in sorted order: by the first column, by the next where it ties.

    Rows that are equal stay in order. O(N log N) time, a fraction of that of `np.lexsort`.
    """
    num, top, keys = len(columns[0]), 1, np.zeros(len(columns[0]), np.int64)
    for column in columns if num else ():
        low = int(column.min())
        span = int(column.max()) - low + 1
        top *= span
        if top * num >= 1 << 62:
            return np.lexsort(columns[::-1])
        keys = keys * span + (column - low)
    # With its place as the last digit, no key comes twice: any way to sort them is a stable one.
    keys = keys * num + np.arange(num)
    keys.sort()
    return keys % max(num, 1)


@dataclass(frozen=True, eq=False)
class WindowCut:
    """A window cut into batches.

    Attributes:
        batches: B batches of positions in the window. Each is full, but the last of a group if
            nothing was to be carried over.
        carried: positions of samples that make no full batch; fewer than one batch of each group.
    """

    batches: Lists
    carried: Int64Array


def cut_window(
    lengths_N: Int64Array,
    limits_N: Int64Array,
    groups_N: Int64Array | None = None,
    *,
    longest_first: bool = True,
    is_last: bool = False,
) -> WindowCut:
    """Sorts a window by group and length, and cuts it into batches as large as limits allow.

    A batch is of one group, and has at most as many samples as the limit of its longest one.
    Samples that are carried over are the shortest of their group, or the longest if the longest do
    not come first: let windows alternate, and what one window carries over is the first
    that the next one cuts, so that nothing waits for long.

    O(N log N) time.

    Args:
        lengths_N: shape (N,); what to sort by. Of equal ones, those before stay before.
        limits_N: shape (N,); samples in a batch of which this is the longest, at least 1. With the
            longest last and a limit that grows with length, some batches are smaller than they
            could be.
        groups_N: shape (N,); number of each sample's group; None for one group.
        longest_first: whether to begin with the long ones; groups then come in falling order, too.
        is_last: whether to make smaller batches of what would be carried over.

    Example:
        >>> lengths = np.array([5, 2, 4, 3])
        >>> cut = cut_window(lengths, 10 // lengths)
        >>> cut.batches.tolist(), cut.carried.tolist()
        ([[0, 2]], [3, 1])
    """
    sign = -1 if longest_first else 1
    if groups_N is None:
        order_N = sort_places(sign * lengths_N)
        edges = [0, len(order_N)]
    else:
        order_N = sort_places(sign * groups_N, sign * lengths_N)
        edges = [0, *(np.flatnonzero(np.diff(groups_N[order_N])) + 1).tolist(), len(order_N)]
    limits_N = limits_N[order_N]
    cut = _cut_falling if longest_first else _cut_rising
    ends, is_carried = [0], np.zeros(len(order_N), bool)
    for start, stop in pairwise(edges):
        found, num_cut = cut(limits_N[start:stop])
        if is_last and num_cut < stop - start:
            found.append(stop - start)
        elif num_cut < stop - start:
            is_carried[start + num_cut : stop] = True
        # What is carried over takes no room in the batches.
        shift = ends[-1]
        ends += [shift + end for end in found]
    batches = Lists(order_N[~is_carried], np.array(ends, np.int64))
    return WindowCut(batches, order_N[is_carried])


def _cut_falling(limits_N: Int64Array) -> tuple[list[int], int]:
    """Cuts from long to short; returns the ends of the full batches, and the last of them."""
    ends, start, num = [], 0, len(limits_N)
    while start < num and (end := start + int(limits_N[start])) <= num:
        ends.append(end)
        start = end
    return ends, start


def _cut_rising(limits_N: Int64Array) -> tuple[list[int], int]:
    """The same from short to long."""
    num = len(limits_N)
    # A batch from s can hold the sample at j if j + 1 - s <= limit[j]. So it ends at the first j
    # for which j + 1 - limit[j] is above s; before s there is none, since limits are at least 1.
    starts_N = np.maximum.accumulate(np.arange(1, num + 1) - limits_N)
    ends, start = [], 0
    while start < num:
        end = int(np.searchsorted(starts_N, start, side="right"))
        if end == num and end - start < limits_N[-1]:
            break  # one more sample would have had room
        ends.append(end)
        start = end
    return ends, start


def useful_share(tokens_SR: Int64Array, areas_SR: Int64Array) -> float:
    """Returns the share of tokens in the room of all ranks, if each waits for the fullest.

    Args:
        tokens_SR: shape (S, R); tokens of each rank's batch of a step.
        areas_SR: shape (S, R); the same with padding.
    """
    room = areas_SR.max(1).sum() * areas_SR.shape[1]
    return float(tokens_SR.sum() / room) if room else 1.0


def padded_share(tokens_SR: Int64Array, areas_SR: Int64Array) -> float:
    """Returns the share of padding in all batches; see `useful_share`."""
    area = areas_SR.sum()
    return float(1 - tokens_SR.sum() / area) if area else 0.0
