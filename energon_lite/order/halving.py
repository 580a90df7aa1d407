"""A Huffman tree over shares; its inner nodes halve the draws on their way to the children."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.seeds import UInt64Array


class Halving(NamedTuple):
    """The inner nodes of one depth: rows of the node, its left and its right child; all (M,)."""

    parents: Int64Array
    lefts: Int64Array
    rights: Int64Array
    fractions: UInt64Array  # (M, 1); of the node's draws that go left, times 2**64


def halvings(shares: Float64Array) -> tuple[Halving, ...]:
    """Returns the inner nodes of the tree, from the root down.

    Args:
        shares: shape (K,), each above 0. The leaves have the rows 0..K-1, the root has the last
            one of 2K - 1.

    Source: D. Huffman, "A method for the construction of minimum-redundancy codes", 1952.
    """
    heap = [(share, node) for node, share in enumerate(shares.tolist())]
    heapq.heapify(heap)
    weight_of, sides = shares.tolist(), {}
    while len(heap) > 1:
        left, right = heapq.heappop(heap), heapq.heappop(heap)
        sides[len(weight_of)] = (left[1], right[1])
        heapq.heappush(heap, (left[0] + right[0], len(weight_of)))
        weight_of.append(left[0] + right[0])
    found, nodes = [], [heap[0][1]]
    while nodes := [node for node in nodes if node in sides]:
        lefts = [sides[node][0] for node in nodes]
        rights = [sides[node][1] for node in nodes]
        turns = [int(weight_of[sides[node][0]] / weight_of[node] * 2.0**64) for node in nodes]
        fractions = np.array([min(turn, (1 << 64) - 1) for turn in turns], dtype=np.uint64)
        found.append(
            Halving(np.array(nodes), np.array(lefts), np.array(rights), fractions[:, None])
        )
        nodes = lefts + rights
    return tuple(found)
