"""Batches of samples of like lengths, from windows of lengths: pure functions on arrays.

Axes: N samples, B batches, S steps, G samples of a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from energon_lite.core.seeds import random_words
from energon_lite.packing.packs import Packs

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
End = Literal["pad", "drop"]

# As a limit: more samples than any window has.
_ANY_NUMBER = 1 << 62


def number_groups(keys: Iterable[Hashable]) -> Int64Array:
    """Numbers keys from 0 in the order in which they first come; shape (N,).

    Raises:
        TypeError: A key is not hashable.
    """
    # Elements of a tensor are tensors, each a key of its own.
    keys = keys.tolist() if hasattr(keys, "tolist") else keys
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)


def aligned(lengths_N: Int64Array, align: int) -> Int64Array:
    """Rounds lengths up to a multiple of `align`."""
    return -(-lengths_N // align) * align


def limits_of_budget(lengths_N: Int64Array, max_tokens: int) -> Int64Array:
    """Gives how many samples a batch can have whose longest has each length; 0 if not even one.

    Args:
        lengths_N: shape (N,); tokens of each sample, with padding to a multiple if there is any,
            at least 1.
        max_tokens: tokens of a padded batch: its samples times its longest.
    """
    return max_tokens // lengths_N


def limits_of_function(lengths_N: Int64Array, batch_size_fn: Callable[[int], int]) -> Int64Array:
    """Asks a function how many samples a batch can have, once for each length there is.

    Raises:
        TypeError: It gives something else than an integer.
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
                f"batch_size_fn({length}) gives {size!r}; it must give an integer: the number of "
                "samples in a batch whose longest has this length."
            ) from None
    return limits[places_N]


def sort_places(*columns: Int64Array) -> Int64Array:
    """Gives the places of rows in sorted order: by the first column, by the next where it ties.

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

    batches: Packs
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
    not come first: give windows the two in turn, and what one window carries over is the first
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
    batches = Packs(order_N[~is_carried], np.array(ends, np.int64))
    return WindowCut(batches, order_N[is_carried])


def _cut_falling(limits_N: Int64Array) -> tuple[list[int], int]:
    """Cuts from long to short; gives the ends of the full batches, and the last of them."""
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


@dataclass(frozen=True, eq=False)
class EpochCut:
    """All windows of an epoch, cut into batches.

    Attributes:
        batches: B batches of sample indices; neighbours are of like lengths, across windows too.
        windows: shape (B,), rising; the window of each.
        num_dropped: samples that are left out because they make no full batch.
    """

    batches: Packs
    windows: Int64Array
    num_dropped: int


def cut_epoch(
    order_N: Int64Array,
    lengths: Int64Array,
    limits: Int64Array,
    groups: Int64Array | None = None,
    *,
    window: int,
    drop_last: bool = False,
) -> EpochCut:
    """Cuts samples into batches window by window; what makes no full batch goes to the next one.

    Args:
        order_N: shape (N,); sample indices, in the order in which they are read.
        lengths: of all samples, by index.
        limits: of all samples, by index; see `cut_window`.
        groups: of all samples, by index; None for one group.
        window: samples that are read for each window, besides those carried over.
        drop_last: whether to leave out, at the end, what makes no full batch.
    """
    carried = order_N[:0]
    indices, sizes, windows = [carried], [carried], [carried]
    for number, start in enumerate(range(0, len(order_N), window)):
        held = np.concatenate((carried, order_N[start : start + window]))
        cut = cut_window(
            lengths[held],
            limits[held],
            None if groups is None else groups[held],
            longest_first=number % 2 == 0,
            is_last=start + window >= len(order_N) and not drop_last,
        )
        carried = held[cut.carried]
        indices.append(held[cut.batches.indices])
        sizes.append(np.diff(cut.batches.offsets))
        windows.append(np.full(len(cut.batches), number))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
    batches = Packs(np.concatenate(indices), offsets)
    return EpochCut(batches, np.concatenate(windows), len(carried))


def shuffle_steps(windows_B: Int64Array, world_size: int, key: int, epoch: int) -> Int64Array:
    """Gives a new order of batches: steps move within their window, and stay together.

    A step is one batch for each rank. As neighbours they are of like lengths, so that no rank waits
    long for another. A last step of fewer batches stays the last.

    Args:
        windows_B: shape (B,), rising; the window of each batch.
        world_size: batches in a step.
        key: from `key_of`.
        epoch: another one gives another order.

    Returns:
        Shape (B,); places of batches.
    """
    num_steps = len(windows_B) // world_size
    windows_S = windows_B[: num_steps * world_size : world_size]
    order_S = np.lexsort((random_words(key, epoch, 1, size=num_steps), windows_S))
    order_B = np.arange(len(windows_B))
    order_B[: num_steps * world_size] = (
        order_S[:, None] * world_size + np.arange(world_size)
    ).ravel()
    return order_B


@dataclass(frozen=True, eq=False)
class GroupSteps:
    """Steps of one group each.

    Attributes:
        indices: shape (S, G); sample indices, in each step the longest first.
        is_repeat: shape (S, G); whether the sample is given elsewhere, too.
        num_dropped: samples that are left out because they fill no step.
    """

    indices: Int64Array
    is_repeat: BoolArray
    num_dropped: int


def step_groups(
    order_N: Int64Array,
    lengths: Int64Array,
    groups: Int64Array,
    *,
    step_size: int,
    window: int,
    end: End,
) -> GroupSteps:
    """Cuts each group into windows of steps, and each window, sorted by length, into steps.

    Windows are of one group, so that a small group has windows as large as any; what fills no step
    goes from each to the next. Samples are sorted twice, in windows half a window apart: the second
    ones have the short halves of two windows, or the long ones of two, by turns. Each is as large
    as the first ones, but of half the range of lengths, so that half as much is padded.

    O(N log N) time.

    Args:
        order_N: shape (N,); sample indices in the order in which they are read.
        lengths: of all samples, by index.
        groups: of all samples, by index; numbers from 0.
        step_size: samples of a step, G.
        window: steps of a window, at most; but no more than a quarter of a group's, since in a
            window of all of a group its samples would meet the same others in every epoch.
        end: of the samples of each group that fill no step, "drop" leaves out those that are read
            last; to "pad" repeats those that are read first, in turn if there are too few.

    Returns:
        S steps, group after group.
    """
    by_group_N = order_N[sort_places(groups[order_N])]
    counts_K = np.bincount(groups)
    steps_K = counts_K // step_size if end == "drop" else -(-counts_K // step_size)
    # Steps, and for each the number of its group and its place in there.
    groups_S = np.repeat(np.arange(len(counts_K)), steps_K)
    places_S = np.arange(len(groups_S)) - np.repeat(np.cumsum(steps_K) - steps_K, steps_K)
    places_SG = places_S[:, None] * step_size + np.arange(step_size)
    is_repeat = (places_SG >= counts_K[groups_S, None]).ravel()
    places_SG %= counts_K[groups_S, None]
    firsts_K = np.cumsum(counts_K) - counts_K
    indices = by_group_N[places_SG + firsts_K[groups_S, None]].ravel()

    windows_S, halves_S = _windows_of_steps(steps_K, window, groups_S, places_S)
    windows = np.repeat(windows_S, step_size)
    signs = 1 - windows % 2 * 2  # from short to long and back
    first = sort_places(windows, signs * lengths[indices])
    second = sort_places(np.repeat((halves_S + 1) // 2, step_size), -lengths[indices[first]])
    order = first[second]
    shape = (len(groups_S), step_size)
    num_dropped = int((counts_K - np.minimum(steps_K * step_size, counts_K)).sum())
    return GroupSteps(indices[order].reshape(shape), is_repeat[order].reshape(shape), num_dropped)


def _windows_of_steps(
    steps_K: Int64Array, window: int, groups_S: Int64Array, places_S: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Gives window and half window of each step, shape (S,), counted over all groups.

    A group's windows differ by one step at most, and its last half stays alone.
    """
    counts_K = np.maximum(-(-steps_K // window), np.minimum(steps_K, 4))
    # A window number is left out after each group, so that halves of two groups never meet.
    firsts_K = np.cumsum(counts_K + 1) - counts_K
    steps_S, counts_S = steps_K[groups_S], counts_K[groups_S]
    windows_S = places_S * counts_S // np.maximum(steps_S, 1)
    starts_S = -(-windows_S * steps_S // np.maximum(counts_S, 1))
    ends_S = -(-(windows_S + 1) * steps_S // np.maximum(counts_S, 1))
    is_second_S = 2 * (places_S - starts_S) >= ends_S - starts_S
    windows_S = windows_S + firsts_K[groups_S]
    return windows_S, 2 * windows_S + is_second_S


def deal(indices_SG: npt.NDArray[np.int64], rank: int, world_size: int) -> Int64Array:
    """Gives a rank's samples of steps: of each, every `world_size`-th from its own place on.

    Since steps are sorted, all ranks get samples of like lengths.

    Args:
        indices_SG: shape (..., G), with the longest first; G is a multiple of `world_size`.
        rank: 0..world_size-1.
        world_size: number of ranks.

    Returns:
        Shape (..., G // world_size).
    """
    return indices_SG[..., rank::world_size]


def useful_share(tokens_SR: Int64Array, areas_SR: Int64Array) -> float:
    """Gives the share of tokens in the room of all ranks, if each waits for the fullest.

    Args:
        tokens_SR: shape (S, R); tokens of each rank's batch of a step.
        areas_SR: shape (S, R); the same with padding.
    """
    room = areas_SR.max(1).sum() * areas_SR.shape[1]
    return float(tokens_SR.sum() / room) if room else 1.0


def padded_share(tokens_SR: Int64Array, areas_SR: Int64Array) -> float:
    """Gives the share of padding in all batches; see `useful_share`."""
    area = areas_SR.sum()
    return float(1 - tokens_SR.sum() / area) if area else 0.0
