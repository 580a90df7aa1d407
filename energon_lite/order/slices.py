"""The order of one epoch: slices permuted, neighbours interleaved; place -> sample index.

An epoch of a source is a line of places 0..N-1. It is cut into slices of `slice_length`
consecutive samples (the last one may be shorter); the slices lie in a random order, and groups of
`interleave` slices that follow each other are dealt sample by sample. All of it is arithmetic on
the place, so any place can be asked for alone, and an epoch of any size takes no memory.
"""

from __future__ import annotations

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import random_words
from energon_lite.order.permutation import Permutation

WITH_REPLACEMENT = -1


class EpochOrder:
    """The shuffled order of a source's epochs.

    Args:
        num_samples: samples of the source.
        slice_length: samples that stay together, in file order.
        interleave: slices that are read side by side.
        multiplier: 1 permutes each epoch; m > 1 permutes m copies as one epoch; -1 draws slices
            with replacement.
        key: of seed and source.

    Attributes:
        num_places: places of one epoch.
    """

    def __init__(
        self, num_samples: int, slice_length: int, interleave: int, multiplier: int, key: int
    ) -> None:
        self.num_samples = num_samples
        self.slice_length = slice_length
        self.interleave = interleave
        self.multiplier = multiplier
        self.num_places = num_samples * (1 if multiplier == WITH_REPLACEMENT else multiplier)
        self._num_slices = -(-self.num_places // slice_length)
        self._key = key
        self._layout: tuple[int, int, Permutation] | None = None

    def samples(self, epoch: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns what lies at `places`, shape (N,), of an epoch.

        Returns:
            Epoch labels and sample indices, both (N,): together they are unique in a run. A label
            is the epoch; the copy, for a multiplier above 1; the slice drawn, with replacement.
        """
        if self.multiplier == WITH_REPLACEMENT:
            slots, offsets = self._slots(places, self._num_slices - 1)
            # Each slot has one word; the words of neighbouring places lie close together.
            skip = int(slots.min()) // 4 * 4
            words = random_words(self._key, epoch, size=int(slots.max()) + 1 - skip, skip=skip)
            starts = (words % np.uint64(self.num_samples)).astype(np.int64)
            labels = epoch * self._num_slices + slots
            return labels, (starts[slots - skip] + offsets) % self.num_samples
        if self.slice_length == 1:
            # Slices of one sample: nothing is cut short, and interleaving them changes nothing.
            copies, indices = np.divmod(self._whole(epoch)(places), self.num_samples)
            return epoch * self.multiplier + copies, indices
        short, permutation = self._slices(epoch)
        slots, offsets = self._slots(places, short)
        # The short slice is the last one of the data; the others are permuted around its place.
        full = np.minimum(slots - (slots > short), permutation.n - 1)
        slices = np.where(slots == short, self._num_slices - 1, permutation(full))
        copies, indices = np.divmod(slices * self.slice_length + offsets, self.num_samples)
        return epoch * self.multiplier + copies, indices

    def _slices(self, epoch: int) -> tuple[int, Permutation]:
        """Returns the slot of the short slice, and the order of the others."""
        if self._layout is None or self._layout[0] != epoch:
            short = int(random_words(self._key, epoch, 1, size=1)[0]) % self._num_slices
            others = Permutation(max(1, self._num_slices - 1), self._key, epoch)
            self._layout = (epoch, short, others)
        return self._layout[1:]

    def _whole(self, epoch: int) -> Permutation:
        """Returns the order of all slices, where none is shorter than the others."""
        if self._layout is None or self._layout[0] != epoch:
            self._layout = (epoch, -1, Permutation(self._num_slices, self._key, epoch))
        return self._layout[2]

    def _slots(self, places: Int64Array, short: int) -> tuple[Int64Array, Int64Array]:
        """Returns slot (position among the slices) and offset in the slice for each place.

        Example:
            Slices of 3 read 2 side by side, short slot 1 of length 2: places 0..4 are
            (slot, offset) = (0, 0) (1, 0) (0, 1) (1, 1) (0, 2).
        """
        length, width, num_slots = self.slice_length, self.interleave, self._num_slices
        missing = num_slots * length - self.num_places
        group_size = length * width
        # Every group before the short one is whole, so division finds it; after it the places are
        # moved back by what the short slice lacks.
        short_group = short // width
        slots_there = min(width, num_slots - short_group * width)
        short_start = short_group * group_size
        short_stop = short_start + slots_there * length - missing
        after = places >= short_stop
        groups = (places + after * missing) // group_size
        within = places - groups * group_size + after * missing
        widths = np.minimum(width, num_slots - groups * width)
        offsets, lanes = np.divmod(within, widths)
        in_short = groups == short_group
        lead = (length - missing) * slots_there
        late = in_short & (within >= lead)
        if slots_there > 1 and late.any():
            # Past the end of the short slice its group is one slot narrower.
            late_offsets, late_lanes = np.divmod(within[late] - lead, slots_there - 1)
            offsets[late] = length - missing + late_offsets
            lanes[late] = late_lanes + (late_lanes >= short - short_group * width)
        return groups * width + lanes, offsets
