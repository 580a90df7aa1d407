"""Batches of samples of similar lengths, of a whole epoch.

Axes: N samples, B batches, S steps, R ranks.
"""

from __future__ import annotations

import heapq

import numpy as np

from energon_lite.batching.buckets import cut_window
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import random_words


def cut_lists(lists: Lists, multiple: int) -> Lists:
    """Cuts the lists of most samples into parts, so that their number is a multiple.

    As few as possible are cut. With fewer samples than lists that are needed, all stay as they are.

    Example:
        >>> cut_lists(Lists(np.arange(6), np.array([0, 3, 4, 6])), 4).tolist()
        [[0], [1, 2], [3], [4, 5]]
    """
    num_missing = -len(lists) % multiple
    if not num_missing or len(lists) + num_missing > len(lists.indices):
        return lists
    counts = np.diff(lists.offsets)
    largest = np.argsort(-counts, kind="stable")[:num_missing].tolist()
    parts = dict.fromkeys(largest, 1)
    heap = [(-float(counts[place]), place) for place in largest]
    for _ in range(num_missing):
        _, place = heap[0]
        parts[place] += 1
        heapq.heapreplace(heap, (-float(counts[place]) / parts[place], place))
    cuts = [
        lists.offsets[place] + counts[place] * part // number
        for place, number in parts.items()
        for part in range(1, number)
    ]
    return Lists(lists.indices, np.sort(np.concatenate([lists.offsets, cuts])).astype(np.int64))


def cut_epoch(
    order_N: Int64Array,
    lengths: Int64Array,
    limits: Int64Array,
    groups: Int64Array,
    *,
    window: int,
    drop_last: bool = False,
) -> tuple[Lists, Int64Array]:
    """Cuts samples into batches window by window; what makes no full batch is carried over.

    Args:
        order_N: shape (N,); sample indices, in the order in which they are read.
        lengths: of all samples, by index.
        limits: of all samples, by index; see `cut_window`.
        groups: of all samples, by index.
        window: samples that are read for each window, besides those carried over.
        drop_last: whether to drop, at the end, what makes no full batch.

    Returns:
        B batches of sample indices, where neighbours are of similar length, across windows too; and
        the window of each, shape (B,), rising.
    """
    carried = order_N[:0]
    batches, windows = [], [carried]
    for number, start in enumerate(range(0, len(order_N), window)):
        read = np.concatenate((carried, order_N[start : start + window]))
        cut = cut_window(
            lengths[read],
            limits[read],
            groups[read],
            longest_first=number % 2 == 0,
            is_last=start + window >= len(order_N) and not drop_last,
        )
        carried = read[cut.carried]
        batches.append(Lists(read[cut.batches.indices], cut.batches.offsets))
        windows.append(np.full(len(cut.batches), number))
    return Lists.joined(batches), np.concatenate(windows)


def shuffle_steps(windows_B: Int64Array, world_size: int, key: int, epoch: int) -> Int64Array:
    """Returns another order of batches: steps move within their window, and stay together.

    A step is one batch for each rank. As neighbours they are of similar length, so that no rank
    waits long for another. A last step of fewer batches stays the last.

    Args:
        windows_B: shape (B,), rising; the window of each batch.
        world_size: batches in a step.
        key: from `key_of`.
        epoch: another one yields another order.

    Returns:
        Shape (B,); positions of batches.
    """
    num_steps = len(windows_B) // world_size
    order_B = np.arange(len(windows_B))
    steps_SR = order_B[: num_steps * world_size].reshape(num_steps, world_size)
    words_S = random_words(key, epoch, 1, size=num_steps)
    order_B[: steps_SR.size] = steps_SR[np.lexsort((words_S, windows_B[steps_SR[:, 0]]))].ravel()
    return order_B
