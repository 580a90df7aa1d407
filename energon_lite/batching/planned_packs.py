"""Packs of a window of samples whose lengths are all known, as a part of an endless sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_lite.batching.best import ALGORITHMS
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Packing
from energon_lite.batching.stream import pack_stream
from energon_lite.core.arrays import BoolArray, Int64Array

# Packs less full than this may wait for the next window, but at most one pack in 50.
_FULL_ENOUGH, _ONE_IN = 0.97, 50


@dataclass(frozen=True, eq=False)
class PackedWindow:
    """A window of N samples in P packs; those that are in none wait for the next window.

    Attributes:
        packs: of sample indices, by the oldest sample in each.
        groups: shape (P,); the group of each pack.
        carried: shape (C,); samples that wait, or are dropped in the last window, ascending.
    """

    packs: Lists
    groups: Int64Array
    carried: Int64Array


def pack_planned(
    lengths_NR: Int64Array,
    groups_N: Int64Array,
    was_carried_N: BoolArray,
    packing: Packing,
    *,
    multiple: int = 1,
    is_last: bool = False,
) -> PackedWindow:
    """Packs each group of a window by itself.

    Of each group, the packs that are least full wait for the next window, where their samples come
    first; and as many more as make the number of packs no multiple. So nothing is wasted where
    windows meet. A sample waits for full packs once at most.

    Args:
        lengths_NR: shape (N, R); of each resource, within the limits of a pack.
        groups_N: shape (N,); numbers of the groups, whose samples share no pack.
        was_carried_N: shape (N,); whether a sample waited already.
        packing: how samples are packed.
        multiple: what the number of packs of each group is to be a multiple of.
        is_last: whether no window follows: then packs that are not full are returned, too, and
            `multiple` counts only if the last ones are to be dropped.
    """
    packs, groups, left = [], [], []
    for group in np.unique(groups_N).tolist():
        own = np.flatnonzero(groups_N == group)
        found = _packed(lengths_NR[own], packing)
        waits = _waiting(found, lengths_NR[own], was_carried_N[own], packing, multiple, is_last)
        given = found.reordered(np.flatnonzero(~waits))
        packs.append(Lists(own[given.indices], given.offsets))
        groups.append(np.full(len(given), group))
        left.append(own[found.reordered(np.flatnonzero(waits)).indices])
    return _by_oldest(packs, groups, left)


def _packed(lengths_NR: Int64Array, packing: Packing) -> Lists:
    """Packs one group; a sample that is longer than a pack has a pack for itself."""
    is_long = (lengths_NR > np.array(packing.limits)).any(axis=1)
    if is_long.any():
        alone, rest = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        found = _packed(lengths_NR[rest], packing)
        offsets = np.append(found.offsets, found.offsets[-1] + 1 + np.arange(len(alone)))
        return Lists(np.append(rest[found.indices], alone), offsets)
    is_single = len(packing.resources) == 1
    lengths = lengths_NR[:, 0] if is_single else lengths_NR
    limits: dict[str, Any] = {
        "max_samples": packing.max_samples,
        "align": packing.token_alignment if is_single else packing.alignments,
    }
    capacity = packing.tokens if is_single else packing.capacities
    if packing.algorithm == "streaming":
        return pack_stream(lengths, capacity, buffer_size=packing.buffer_size, **limits)
    packer: Any = ALGORITHMS[packing.algorithm]
    packed: Lists = packer(lengths, capacity, **limits)
    return packed


def _waiting(
    packs: Lists,
    lengths_NR: Int64Array,
    was_carried_N: BoolArray,
    packing: Packing,
    multiple: int,
    is_last: bool,
) -> BoolArray:
    """Returns which packs wait; shape (P,)."""
    num = len(packs)
    aligns = np.array(packing.alignments)
    sizes = packs.sizes(-(-lengths_NR // aligns) * aligns)
    fills = (sizes / np.array(packing.capacities)).max(axis=1)
    has_waited = packs.sizes(was_carried_N.astype(np.int64)) > 0
    if is_last and packing.end_of_data == "pack":
        rest = num % multiple if multiple > 1 else 1
        count = rest if packing.drop_last else 0
    else:
        count = min(int(((fills < _FULL_ENOUGH) & ~has_waited).sum()), 1 + num // _ONE_IN)
        count += (num - count) % multiple
    # The least full, of those equally full the last; what has waited only if there is nothing else.
    order = np.lexsort((-np.arange(num), fills, has_waited))
    if packing.algorithm == "sequential":  # in the order in which the samples came
        order = np.arange(num)[::-1]
    waits = np.zeros(num, dtype=bool)
    waits[order[:count]] = True
    return waits


def _by_oldest(
    packs: list[Lists], groups: list[Int64Array], left: list[Int64Array]
) -> PackedWindow:
    """Puts the packs of all groups into one order: by the oldest sample in each."""
    none = np.empty(0, dtype=np.int64)
    indices = np.concatenate([none, *(p.indices for p in packs)])
    counts = np.concatenate([none, *(np.diff(p.offsets) for p in packs)])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    all_packs = Lists(indices, offsets)
    oldest = np.minimum.reduceat(indices, offsets[:-1]) if len(all_packs) else none
    order = np.argsort(oldest, kind="stable")
    all_groups = np.concatenate([none, *groups])
    carried = np.sort(np.concatenate([none, *left]))
    return PackedWindow(all_packs.reordered(order), all_groups[order], carried)
