"""Packs samples as they come, from a small buffer of lengths."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from energon_lite.batching import stream_search as search
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import at_least
from energon_lite.batching.sizes import Sizes, as_integers, check_sizes
from energon_lite.core.arrays import Int64Array

DEFAULT_MAX_STEPS = 2000
_MAX_TOTAL = 1 << 60  # four times as much still fits into 63 bits
_MIN_PLACES, _MAX_PLACES = 64, 1 << 14  # to begin with


class StreamingPacker:
    """Buffers samples, by their lengths, and returns packs of them, one after the other.

    Each pack is opened with the oldest buffered sample. More of the oldest follow while there is
    room for many; the rest is the best fill that a search finds among all buffered samples, depth
    first, longest first, as soon as nothing is left free. Oldest first uses up all lengths at the
    rate at which they come: packers that take the longest first are left with those that fit
    nothing, and their packs come in an order of lengths. A sample leaves within `target_size`
    packs.

    Where fewer than three samples fill a pack, the best fill is not the fullest: 150 and 184 of 384
    use up what 200 needs. The search then values lengths at prices, which follow from what is
    buffered and are set again each time `buffer_size` samples have come. Where there are more short
    samples than `max_samples` allows, each sample has a price.

    What it returns depends only on the arguments, the lengths and the order of the calls. There are
    R resources, such as tokens and tiles; one if `capacity` is a number. The search fills the one
    that needs the most packs, as far as the others allow.

    Args:
        capacity: what a pack can hold: a number, or R of them.
        buffer_size: samples buffered at least when `is_full`. Some hundred are enough: the time
            grows with it, and among more, those that fit badly pile up.
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or R of them.
        max_steps: how many samples a search may put into one pack, and take out again.

    Raises:
        TypeError: Not integers.
        ValueError: A limit is below 1, or `align` above `capacity`.

    Example:
        >>> packer = StreamingPacker(10)
        >>> for length in (6, 7, 3, 4):
        ...     packer.add(length)
        >>> packer.next_pack(), packer.next_pack()
        ([0, 3], [1, 2])
    """

    def __init__(
        self,
        capacity: int | Sequence[int],
        *,
        buffer_size: int = 256,
        max_samples: int | None = None,
        align: int | Sequence[int] = 1,
        max_steps: int = DEFAULT_MAX_STEPS,
    ) -> None:
        self._capacity = capacity
        self._is_single = np.ndim(capacity) == 0
        nothing = np.zeros(0 if self._is_single else (0, np.size(capacity)), np.int64)
        sizes = check_sizes(nothing, capacity, max_samples=max_samples, align=align)
        self._capacities: list[int] = sizes.capacities.tolist()
        self._aligns: list[int] = np.broadcast_to(align, len(self._capacities)).tolist()
        self._limits = [
            size // multiple * multiple
            for size, multiple in zip(self._capacities, self._aligns, strict=True)
        ]
        if 0 in self._limits:
            raise ValueError(
                f"align is {align}, above the capacity of {capacity}; nothing would fit."
            )
        self._buffer_size = at_least("buffer_size", buffer_size)
        max_steps = at_least("max_steps", max_steps)
        self._settings = (self._capacities, self._aligns, buffer_size, max_samples, max_steps)
        self._tail = self._num_gone = self._first_number = 0
        self._use(_new_table(*self._settings))

    def add(self, lengths: int | Sequence[int]) -> None:
        """Takes a sample, which gets the next number, from 0 on.

        Args:
            lengths: its length, in 1..capacity; or R lengths, each in 0..capacity, one of them
                above 0.

        Raises:
            TypeError: Not integers.
            ValueError: A length is out of range, or there are not R of them.
        """
        slot = self._tail
        if slot == self._num_places:
            slot = self._make_room()
        if self._is_single:
            length: Any = lengths
            if type(length) is not int:
                length = operator.index(length)
            if not 1 <= length <= self._limits[0]:
                self._refuse(length)
            self._rows[0][slot] = length
        else:
            self._add_several(slot, lengths)
        self._tail = slot + 1

    @property
    def num_buffered(self) -> int:
        """Samples that are in no pack yet."""
        return self._tail - self._num_gone

    @property
    def num_added(self) -> int:
        """Samples added in all; the number of the next one."""
        return self._tail + self._first_number

    @property
    def is_full(self) -> bool:
        """Whether it buffers `target_size` samples, so that the next pack is worth taking."""
        if self._tail - self._num_gone < self._buffer_size:
            return False
        return bool(search.take_in(self._table, self._tail))

    @property
    def target_size(self) -> int:
        """Samples buffered when it is full: `buffer_size`, or four packs of mean length, if more.

        With fewer, the last places in a pack find too little to choose from. The mean is that of
        all samples added so far.
        """
        added = self.num_added
        if not added:
            return self._buffer_size
        per_pack = [
            -(-4 * size * added // total)
            for size, total in zip(self._capacities, self._totals(), strict=True)
            if total
        ]
        most = 4 * int(self._table[search.HEADER, search.MAX_SAMPLES])
        return max(self._buffer_size, min(*per_pack, most))

    def next_pack(self) -> list[int]:
        """Chooses the samples of the next pack among those buffered, and forgets them.

        Returns:
            Their numbers, ascending.

        Raises:
            IndexError: No sample is buffered.
        """
        if self._tail == self._num_gone:
            raise IndexError("No sample is buffered: all that were added are in packs.")
        size = int(search.choose_next(self._table, self._tail))
        self._num_gone += size
        pack: list[int] = self._chosen[:size].tolist()
        return pack

    def buffered(self) -> list[int]:
        """Returns the numbers of the buffered samples, ascending."""
        return list(map(int, self._buffered()[0]))

    def state(self) -> dict[str, Any]:
        """Returns all that `restore` needs to resume exactly, as copies.

        Returns:
            `numbers`, shape (n,), of the buffered samples, ascending; `lengths`, shape (n, R), as
            they were added; `added`, the samples added in all; `totals`, R sums of all their
            lengths, aligned; `price`, at which the search values them.
        """
        numbers, lengths = self._buffered()
        return {
            "numbers": numbers,
            "lengths": lengths,
            "added": self.num_added,
            "totals": tuple(self._totals()),
            "price": int(self._table[search.HEADER, search.PRICE]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken, by a packer with the same arguments.

        Args:
            state: from `state`, with lists in place of arrays if it went through JSON.

        Raises:
            ValueError: It is corrupt, or from a packer with other arguments; this packer is then as
                it was.
        """
        numbers, lengths, added, totals, price = self._checked(state)
        num_buffered, num = lengths.shape
        table = _new_table(*self._settings, num_places=2 * num_buffered)
        table[search.LENGTHS : search.LENGTHS + num, :num_buffered] = lengths.T
        search.take_in(table, num_buffered)
        table[search.NUMBERS, :num_buffered] = numbers
        table[search.HEADER, [search.NUM_ADDED, search.PRICE]] = added, price
        _totals_of(table)[:] = totals
        self._use(table)

    def __getstate__(self) -> dict[str, Any]:
        # copy.deepcopy and pickle would make of views what is none of the new table.
        search.take_in(self._table, self._tail)
        return {key: value for key, value in vars(self).items() if key not in ("_rows", "_chosen")}

    def __setstate__(self, saved: Mapping[str, Any]) -> None:
        vars(self).update(saved)
        self._use(self._table)

    def _use(self, table: Int64Array) -> None:
        """Makes this the table, where all samples have been taken in."""
        self._table = table
        self._num_places: int = table.shape[1]
        self._rows = [table[search.LENGTHS + r].data for r in range(len(self._capacities))]
        self._chosen = table[search.CHOSEN].data
        places = [search.TAIL, search.NUM_BUFFERED, search.NUM_ADDED]
        tail, num_buffered, added = table[search.HEADER, places].tolist()
        self._tail = tail
        self._num_gone = tail - num_buffered  # of the samples in slots up to the tail
        self._first_number = added - tail

    def _make_room(self) -> int:
        """Frees slots of samples that have left, or makes the table larger."""
        search.take_in(self._table, self._tail)
        self._use(_with_room(self._table))
        return self._tail

    def _totals(self) -> list[int]:
        search.take_in(self._table, self._tail)
        totals: list[int] = _totals_of(self._table).tolist()
        return totals

    def _buffered(self) -> tuple[Int64Array, Int64Array]:
        search.take_in(self._table, self._tail)
        numbers = self._table[search.NUMBERS, : self._tail]
        rows = self._table[search.LENGTHS : search.LENGTHS + len(self._capacities), : self._tail]
        is_buffered = numbers >= 0
        return numbers[is_buffered], np.ascontiguousarray(rows[:, is_buffered].T)

    def _add_several(self, slot: int, lengths: Any) -> None:
        if len(lengths) != len(self._limits):
            raise ValueError(
                f"Sample {self.num_added} has lengths {lengths}; give {len(self._limits)}, one for "
                "each resource."
            )
        for row, length, limit in zip(self._rows, lengths, self._limits, strict=True):
            if not 0 <= length <= limit:
                self._refuse(lengths)
            row[slot] = length
        if not any(lengths):
            self._refuse(lengths)

    def _refuse(self, lengths: Any) -> NoReturn:
        """Describes what is wrong with the lengths of a sample."""
        rows = np.array([lengths])
        check_sizes(rows, self._capacity, align=self._aligns, first=self.num_added)
        raise AssertionError(f"{lengths} are fine")

    def _checked(
        self, state: Mapping[str, Any]
    ) -> tuple[Int64Array, Int64Array, int, list[int], int]:
        """Takes a state apart, if it is one that this packer could have."""
        try:
            added = at_least("added", state["added"], 0)
            numbers = as_integers("numbers", state["numbers"]).astype(np.int64)
            lengths = as_integers("lengths", state["lengths"]).astype(np.int64)
            lengths = lengths if lengths.size else lengths.reshape(0, len(self._limits))
            totals = [at_least("totals", total, 0) for total in state["totals"]]
            price = at_least("price", state["price"], 0)
            if lengths.shape != (len(numbers), len(self._limits)):
                raise ValueError(f"its lengths have shape {lengths.shape}")
            if numbers.ndim != 1 or (np.diff(numbers, prepend=-1, append=added) < 1).any():
                raise ValueError(f"its numbers do not rise from 0 to below {added}, those added")
            sums = check_sizes(lengths, self._capacities, align=self._aligns).lengths.sum(axis=0)
            # What those that have left must have had.
            left = [a - b for a, b in zip(totals, sums.tolist(), strict=True)]
            num_left = added - len(numbers)
            most = [num_left * limit for limit in self._limits]
            if min(left) < 0 or any(map(operator.gt, left, most)) or sum(left) < num_left:
                raise ValueError(f"{added} such samples cannot have totals of {totals}")
            if max(added, *totals) > _MAX_TOTAL:
                raise ValueError(f"totals of {totals} are too large")
            if price > search.OF_NUMBER:
                raise ValueError(f"its price is {price}")
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise ValueError(
                "The state of a packer is corrupt, or was saved by a packer with other arguments: "
                f"{error!r:.300}. Give this one the same."
            ) from error
        return numbers, lengths, added, totals, price


def pack_stream(
    lengths: npt.ArrayLike,
    capacity: int | Sequence[int],
    *,
    buffer_size: int = 256,
    max_samples: int | None = None,
    align: int | Sequence[int] = 1,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> Lists:
    """Packs as `StreamingPacker` does, fed in order until it is full before each pack.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R) for several resources, each in
            0..capacity, in at least one above 0.
        capacity: what a pack can hold: a number, or shape (R,).
        buffer_size: samples buffered at least, while there are any.
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).
        max_steps: how many samples a search may put into one pack, and take out again.

    Returns:
        Packs, in the order in which they come, samples ascending in each.

    Raises:
        TypeError: Not integers.
        ValueError: A limit or a length is out of range; names the first such sample.

    Example:
        >>> pack_stream([6, 7, 3, 4, 5], 10, buffer_size=4).tolist()
        [[0, 3], [1, 2], [4]]
    """
    sizes = check_sizes(lengths, capacity, max_samples=max_samples, align=align)
    buffer_size, max_steps = at_least("buffer_size", buffer_size), at_least("max_steps", max_steps)
    packs = pack_sizes(sizes, buffer_size, max_steps, len(sizes.lengths))
    assert packs is not None  # a pack for each sample is always enough
    return packs


def pack_sizes(sizes: Sizes, buffer_size: int, max_steps: int, most: int) -> Lists | None:
    """Packs as `pack_stream` does, lengths that are checked and aligned.

    Returns:
        At most `most` packs; or None as soon as so much has stayed free that there will be more.
    """
    num_samples, num = sizes.lengths.shape
    align_R = np.ones(num, np.int64)  # the lengths are aligned already
    max_samples = sizes.max_samples if sizes.max_samples < num_samples else None
    table = _new_table(sizes.capacities, align_R, buffer_size, max_samples, max_steps)
    indices, offsets = np.empty(num_samples, np.int64), np.zeros(num_samples + 1, np.int64)
    totals = sizes.lengths.sum(axis=0).tolist()
    free = [most * c - total for c, total in zip(sizes.capacities.tolist(), totals, strict=True)]
    progress = np.array([0, 0, 0, *(min(room, _MAX_TOTAL) for room in free)])
    while not search.choose_all(table, sizes.lengths, indices, offsets, progress):
        table = _with_room(table)
    if progress[1] < num_samples or progress[2] > most:
        return None
    return Lists(indices, offsets[: progress[2] + 1].copy())


def _new_table(
    capacities: npt.ArrayLike,
    aligns: npt.ArrayLike,
    buffer_size: int,
    max_samples: int | None,
    max_steps: int,
    num_places: int = 0,
) -> Int64Array:
    """Makes the table of an empty packer, for that many slots at least."""
    num = np.size(capacities)
    num_places = max(num_places, min(4 * buffer_size, _MAX_PLACES), _MIN_PLACES + 4 * num)
    # Rows a power of two apart would compete for the same places in the processor's cache.
    table = np.zeros((search.LENGTHS + 3 * num, num_places + num_places // 16 + 12), np.int64)
    header = table[search.HEADER]
    header[search.BUFFER_SIZE], header[search.MAX_STEPS] = buffer_size, max_steps
    header[search.MAX_SAMPLES] = min(max_samples or _MAX_TOTAL, _MAX_TOTAL)
    blocks = header[search.CAPACITY : search.CAPACITY + search.BLOCKS * num].reshape(-1, num)
    blocks[0], blocks[1] = capacities, aligns
    return table


def _with_room(table: Int64Array) -> Int64Array:
    """Frees slots of samples that have left; a copy has twice the places if half are not enough."""
    search.compact(table)
    num_places = table.shape[1]
    if 2 * table[search.HEADER, search.TAIL] <= num_places:
        return table
    larger = np.zeros((len(table), 2 * num_places), np.int64)
    larger[:, :num_places] = table
    return larger


def _totals_of(table: Int64Array) -> Int64Array:
    num = (len(table) - search.LENGTHS) // 3
    return table[search.HEADER, search.CAPACITY + 2 * num : search.CAPACITY + 3 * num]
