"""Steps of one group and of similar lengths, for all ranks together: pure functions on arrays.

Axes: N samples, K groups, S steps, G samples of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.length_windows import End, sort_places
from energon_lite.core.arrays import BoolArray, Int64Array


@dataclass(frozen=True, eq=False)
class GroupSteps:
    """Steps of one group each.

    Attributes:
        indices: shape (S, G); sample indices, in each step the longest first.
        is_repeat: shape (S, G); whether the sample is in another step, too.
        num_dropped: samples that are dropped because they fill no step.
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
    least_windows: int = 4,
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
        window: steps of a window, at most.
        least_windows: of each group, if it has as many steps. Of a whole epoch there should be
            some: in one window of all of a group its samples would meet the same others each time.
        end: of the samples of each group that fill no step, "drop" drops those that are read
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

    windows_S, halves_S = _windows_of_steps(steps_K, window, groups_S, places_S, least_windows)
    windows = np.repeat(windows_S, step_size)
    signs = 1 - windows % 2 * 2  # from short to long and back
    first = sort_places(windows, signs * lengths[indices])
    second = sort_places(np.repeat((halves_S + 1) // 2, step_size), -lengths[indices[first]])
    order = first[second]
    shape = (len(groups_S), step_size)
    num_dropped = int((counts_K - np.minimum(steps_K * step_size, counts_K)).sum())
    return GroupSteps(indices[order].reshape(shape), is_repeat[order].reshape(shape), num_dropped)


def _windows_of_steps(
    steps_K: Int64Array,
    window: int,
    groups_S: Int64Array,
    places_S: Int64Array,
    least_windows: int = 4,
) -> tuple[Int64Array, Int64Array]:
    """Returns window and half window of each step, shape (S,), counted over all groups.

    A group's windows differ by one step at most, and its last half stays alone.
    """
    counts_K = np.maximum(-(-steps_K // window), np.minimum(steps_K, least_windows))
    # A window number is skipped after each group, so that halves of two groups never meet.
    firsts_K = np.cumsum(counts_K + 1) - counts_K
    steps_S, counts_S = steps_K[groups_S], counts_K[groups_S]
    windows_S = places_S * counts_S // np.maximum(steps_S, 1)
    starts_S = -(-windows_S * steps_S // np.maximum(counts_S, 1))
    ends_S = -(-(windows_S + 1) * steps_S // np.maximum(counts_S, 1))
    is_second_S = 2 * (places_S - starts_S) >= ends_S - starts_S
    windows_S = windows_S + firsts_K[groups_S]
    return windows_S, 2 * windows_S + is_second_S


def deal(indices_SG: Int64Array, rank: int, world_size: int) -> Int64Array:
    """Returns a rank's samples of steps: of each, every `world_size`-th from its own place on.

    Since steps are sorted, all ranks get samples of similar lengths.

    Args:
        indices_SG: shape (..., G), with the longest first; G is a multiple of `world_size`.
        rank: 0..world_size-1.
        world_size: number of ranks.

    Returns:
        Shape (..., G // world_size).
    """
    return indices_SG[..., rank::world_size]
