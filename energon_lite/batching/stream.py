"""Packs samples as they come, from a small buffer of lengths."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.batching import stream_search as search
from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import Sizes, as_integers, check_sizes
from energon_lite.core.arguments import at_least
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
    nothing, and their packs come in an order of lengths. A sample leaves within as
    many packs as samples are buffered.

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

    Attributes:
        num_added: samples added in all; the number of the next one.
        num_buffered: samples that are in no pack yet.

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
        self._table = _new_table(*self._settings)
        # Lengths and numbers of samples that are not in the table yet.
        self._pending, self._new = array("q"), array("q")
        self.num_added = self.num_buffered = 0

    def add(self, lengths: int | Sequence[int]) -> None:
        """Takes a sample, which gets the next number, from 0 on.

        Args:
            lengths: its length, in 1..capacity; or R lengths, each in 0..capacity, one of them
                above 0.

        Raises:
            TypeError: Not integers.
            ValueError: A length is out of range, or there are not R of them.
        """
        row: Any = (lengths,) if self._is_single else lengths
        if len(row) != len(self._limits):
            raise ValueError(
                f"Sample {self.num_added} has lengths {lengths}; give {len(self._limits)}, one for "
                "each resource."
            )
        if min(row) < 0 or not any(row) or any(map(operator.gt, row, self._limits)):
            # Raises an error that names the sample.
            check_sizes([lengths], self._capacity, align=self._aligns, first=self.num_added)
        self.add_checked(self.num_added, row)

    def add_checked(self, number: int, lengths_R: Sequence[int]) -> None:
        """Takes a sample with a number above those before, and R lengths known to be in range."""
        self._new.append(number)
        self._pending += array("q", lengths_R)
        self.num_added += 1
        self.num_buffered += 1

    def _take_in(self) -> None:
        """Puts into the table what was added."""
        if not self._pending:
            return
        rows = np.frombuffer(self._pending, np.int64).reshape(-1, len(self._limits))
        numbers = np.frombuffer(self._new, np.int64)
        while (num := search.add(self._table, rows, numbers)) < len(rows):
            self._table = _enlarged(self._table)
            rows, numbers = rows[num:], numbers[num:]
        self._pending, self._new = array("q"), array("q")

    @property
    def is_full(self) -> bool:
        """Whether it buffers `buffer_size` samples, or four packs of mean length, if more.

        With fewer, the last places in a pack find too little to choose from. The mean is that of
        all samples added so far.
        """
        if self.num_buffered < self._buffer_size:
            return False
        self._take_in()
        return bool(search.is_full(self._table))

    def next_pack(self) -> list[int]:
        """Chooses the samples of the next pack among those buffered, and forgets them.

        Returns:
            Their numbers, ascending.

        Raises:
            IndexError: No sample is buffered.
        """
        if not self.num_buffered:
            raise IndexError("No sample is buffered: all that were added are in packs.")
        self._take_in()
        size = int(search.choose_next(self._table))
        self.num_buffered -= size
        pack: list[int] = self._table[search.CHOSEN, :size].tolist()
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
        return {"numbers": numbers, "lengths": lengths, **self.counts()}

    def counts(self) -> dict[str, Any]:
        """Returns what `state` has besides the samples, at the same cost for any number of them."""
        totals = tuple(self._totals())
        price = int(self._table[search.HEADER, search.PRICE])
        return {"added": self.num_added, "totals": totals, "price": price}

    def restore(self, state: Mapping[str, Any], numbers_n: Int64Array | None = None) -> None:
        """Goes to where `state` was taken, by a packer with the same arguments.

        Args:
            state: from `state`, with lists in place of arrays if it went through JSON.
            numbers_n: other numbers for the buffered samples, rising; None for those of the state.

        Raises:
            ValueError: It is corrupt, or from a packer with other arguments; this packer is then as
                it was.
        """
        numbers, lengths, added, totals, price = self._checked(state)
        self._table, self._pending = _new_table(*self._settings), array("q", lengths.tobytes())
        self._new = array("q", (numbers if numbers_n is None else numbers_n).tobytes())
        self._take_in()
        self._table[search.HEADER, [search.NUM_ADDED, search.PRICE]] = added, price
        _totals_of(self._table)[:] = totals
        self.num_added, self.num_buffered = added, len(numbers)

    def _totals(self) -> list[int]:
        self._take_in()
        totals: list[int] = _totals_of(self._table).tolist()
        return totals

    def _buffered(self) -> tuple[Int64Array, Int64Array]:
        self._take_in()
        table = self._table[:, : self._table[search.HEADER, search.TAIL]]
        rows = table[search.LENGTHS : search.LENGTHS + len(self._limits)]
        is_buffered = table[search.NUMBERS] >= 0
        return table[search.NUMBERS, is_buffered], np.ascontiguousarray(rows[:, is_buffered].T)

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
    capacities, max_samples = sizes.capacities.tolist(), sizes.max_samples
    table = _new_table(
        capacities,
        [1] * num,  # the lengths are aligned already
        buffer_size,
        max_samples if max_samples < num_samples else None,
        max_steps,
    )
    indices, offsets = np.empty(num_samples, np.int64), np.zeros(num_samples + 1, np.int64)
    totals = sizes.lengths.sum(axis=0).tolist()
    free = [most * c - total for c, total in zip(capacities, totals, strict=True)]
    progress = np.array([0, 0, 0, *(min(room, _MAX_TOTAL) for room in free)])
    while not search.choose_all(table, sizes.lengths, indices, offsets, progress):
        table = _enlarged(table)
    if progress[1] < num_samples or progress[2] > most:
        return None
    return Lists(indices, offsets[: progress[2] + 1].copy())


def _new_table(
    capacities: Sequence[int],
    aligns: Sequence[int],
    buffer_size: int,
    max_samples: int | None,
    max_steps: int,
) -> Int64Array:
    """Makes the table of an empty packer."""
    num = len(capacities)
    num_places = max(min(4 * buffer_size, _MAX_PLACES), _MIN_PLACES + 4 * num)
    # Rows a power of two apart would compete for the same places in the processor's cache.
    table = np.zeros((search.LENGTHS + 3 * num, num_places + num_places // 16 + 12), np.int64)
    header = table[search.HEADER]
    header[search.BUFFER_SIZE], header[search.MAX_STEPS] = buffer_size, max_steps
    header[search.MAX_SAMPLES] = min(max_samples or _MAX_TOTAL, _MAX_TOTAL)
    header[search.CAPACITY : search.CAPACITY + 2 * num] = [*capacities, *aligns]
    return table


def _enlarged(table: Int64Array) -> Int64Array:
    """Returns a copy with twice the slots."""
    return np.concatenate([table, np.zeros_like(table)], axis=1)


def _totals_of(table: Int64Array) -> Int64Array:
    num = (len(table) - search.LENGTHS) // 3
    return table[search.HEADER, search.CAPACITY + 2 * num : search.CAPACITY + 3 * num]
