"""Packs of windows of samples whose lengths are all known.

Axes: N samples, R resources, P packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, Samples, WindowCollector
from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Packing, aligned
from energon_lite.batching.stream import pack_stream
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.names.energon_modules import import_name

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
    none, joined = np.empty(0, dtype=np.int64), Lists.joined(packs)
    oldest = np.minimum.reduceat(joined.indices, joined.offsets[:-1]) if len(joined) else none
    order = np.argsort(oldest, kind="stable")
    carried = np.sort(np.concatenate([none, *left]))
    return PackedWindow(joined.reordered(order), np.concatenate([none, *groups])[order], carried)


_ALGORITHMS = {
    "streaming": pack_stream,
    "first_fit_decreasing": first_fit_decreasing,
    "best_fit_decreasing": first_fit_decreasing,
    "first_fit": first_fit,
    "sequential": sequential,
}
_BEST = "energon_lite.extras.samplers.best:pack_best"


def _packed(lengths_NR: Int64Array, packing: Packing) -> Lists:
    """Packs one group; a sample that is longer than a pack has a pack for itself."""
    is_long = (lengths_NR > np.array(packing.limits)).any(axis=1)
    if is_long.any():
        alone, rest = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        found = _packed(lengths_NR[rest], packing)
        singles = Lists(alone, np.arange(len(alone) + 1))
        return Lists.joined([Lists(rest[found.indices], found.offsets), singles])
    limits: dict[str, Any] = {"max_samples": packing.max_samples, "align": packing.alignments}
    if packing.algorithm == "streaming":
        limits["buffer_size"] = packing.buffer_size
    packer: Any = _ALGORITHMS.get(packing.algorithm) or import_name(_BEST)
    packed: Lists = packer(lengths_NR, packing.capacities, **limits)
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
    sizes = packs.sizes(aligned(lengths_NR, np.array(packing.alignments)))
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


class WindowPacks(WindowCollector):
    """Packs a window of samples at once; the packs that are least full wait for the next window.

    A window is packed by `pack_planned`. Packs come in the order of their oldest samples.

    Args:
        packing: capacity, algorithm, limits and what becomes of the rest at the end of the data.
        window: samples that are packed together.
        grows: whether a window has at least as many samples as four packs take.
    """

    def __init__(self, packing: Packing, window: int, grows: bool = False) -> None:
        super().__init__(window)
        self._packing = packing
        self._grows = grows
        self._least = window
        self._totals = np.zeros(1 + len(packing.resources), np.int64)  # samples and their lengths

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the window, which grows if they are short."""
        super().add(samples)
        if self._grows:
            lengths = aligned(samples.lengths, np.array(self._packing.alignments))
            self._totals[0] += len(samples.numbers)
            self._totals[1:] += lengths.sum(axis=0)
            self._grow()
        return ()

    def _grow(self) -> None:
        """Makes the window four packs' worth of samples, by the mean of all lengths so far."""
        num, *totals = self._totals.tolist()
        if self._grows and num:
            capacities = self._packing.capacities
            worth = [
                4 * c * num // total for c, total in zip(capacities, totals, strict=True) if total
            ]
            self._window = max(self._least, min(*worth, 4 * (self._packing.max_samples or num)))

    def state(self) -> CollectorState:
        """Returns also the totals."""
        state = super().state()
        return state._replace(counts={**state.counts, "totals": tuple(self._totals.tolist())})

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state."""
        super().restore(counts, samples, columns_NC)
        self._totals[:] = counts["totals"]
        if (self._totals < 0).any():
            raise ValueError(f"totals={counts['totals']} are no totals")
        self._grow()

    def _cut(
        self, samples: Samples, waited_N: BoolArray, is_last: bool
    ) -> tuple[Lists, Int64Array]:
        lengths, groups, multiple = samples.lengths, samples.groups, self._multiple(is_last)
        found = pack_planned(
            lengths, groups, waited_N, self._packing, multiple=multiple, is_last=is_last
        )
        return self._ordered(found.packs, found.groups, lengths), found.carried

    def _multiple(self, is_last: bool) -> int:
        """Returns what the number of packs of a window is to be a multiple of."""
        return 1

    def _ordered(self, packs: Lists, groups: Int64Array, lengths: Int64Array) -> Lists:
        """Returns the packs that are to come, in their order."""
        return packs
