"""An epoch of batches of samples of like lengths, window by window: pure functions on arrays.

Axes: N samples, B batches, S steps, G samples of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.batching.length_windows import cut_window
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import random_words


@dataclass(frozen=True, eq=False)
class EpochCut:
    """All windows of an epoch, cut into batches.

    Attributes:
        batches: B batches of sample indices; neighbours are of like lengths, across windows too.
        windows: shape (B,), rising; the window of each.
        num_dropped: samples that are left out because they make no full batch.
    """

    batches: Lists
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
    batches = Lists(np.concatenate(indices), offsets)
    return EpochCut(batches, np.concatenate(windows), len(carried))


def shuffle_steps(windows_B: Int64Array, world_size: int, key: int, epoch: int) -> Int64Array:
    """Returns a new order of batches: steps move within their window, and stay together.

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
