"""Collectors that need no lengths: shuffle buffer, groups of a size, packs chosen by a function."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from energon_lite.batching.collector import (
    Collector,
    CollectorState,
    OneByOne,
    Samples,
    saved_count,
)
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import random_words

# Random words made at once; a multiple of 4, as `random_words` wants it.
_WORDS = 256


class ShuffleCollector(OneByOne):
    """Returns one of `size` buffered samples at random, as a list of one.

    Column: the sample's place in the buffer.

    Args:
        size: samples of a full buffer.
        key: of the random words; each stream has its own.
    """

    num_columns = 1

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._key = key
        self._buffer = array("q")
        self._num_returned = 0
        self._words: list[int] = []  # the next one last

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Puts a sample into the buffer."""
        self._buffer.append(number)
        return len(self._buffer) >= self._size

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Draws a sample, once the buffer is full."""
        buffer = self._buffer
        size = len(buffer)
        if size < self._size and not (has_ended and size):
            return None
        place = (self._words or self._next_words()).pop() % size
        self._num_returned += 1
        # The last one fills the gap, so that nothing has to be moved.
        last = number = buffer.pop()
        if place < size - 1:
            number, buffer[place] = buffer[place], last
        return (number,)

    def _next_words(self) -> list[int]:
        """Makes random words for the next draws, up to a multiple of `_WORDS`."""
        block, place = divmod(self._num_returned, _WORDS)
        words = random_words(self._key, size=_WORDS, skip=block * _WORDS)
        self._words = words[place:][::-1].tolist()
        return self._words

    def state(self) -> CollectorState:
        """Returns how many samples were drawn, and the places of the others."""
        numbers = np.array(self._buffer, np.int64)
        counts = {"returned": self._num_returned}
        rows = (numbers, np.arange(len(numbers)))
        return CollectorState(counts, partial(np.column_stack, rows))

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: The buffer is full: between two draws it cannot be.
        """
        num = len(samples.numbers)
        if num >= self._size:
            raise ValueError(f"it buffers {num} samples, which does not go with size={self._size}")
        order = np.argsort(columns_NC[:, 0], kind="stable")
        self._buffer = array("q", samples.numbers[order].tolist())
        self._num_returned = saved_count(counts, "returned")


class GroupCollector(OneByOne):
    """Returns the samples of a group when there are as many as its size.

    At the end of the data the groups come in the order in which their first samples came.

    Length: the size of the sample's group.

    Args:
        drops_last: whether lists that are not full at the end are dropped.
    """

    def __init__(self, drops_last: bool = False) -> None:
        self._drops_last = drops_last
        self._lists: dict[int, list[int]] = {}
        self._full: int | None = None

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Puts a sample into the list of its group."""
        members = self._lists.setdefault(group, [])
        members.append(number)
        if len(members) == lengths[0]:
            self._full = group
            return True
        return False

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns a full list; at the end of the data also others."""
        group, self._full = self._full, None
        if group is None and has_ended and not self._drops_last:
            group = next(iter(self._lists), None)
        return None if group is None else self._lists.pop(group)

    def leftover(self) -> Sequence[int]:
        """Returns the samples of lists that are not full."""
        rest = [number for members in self._lists.values() for number in members]
        self._lists.clear()
        return rest

    def state(self) -> CollectorState:
        """Returns nothing: lists follow from the groups of the samples."""
        return CollectorState({})

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: A list is full: between two it cannot be.
        """
        self.add(samples)
        if self._full is not None:
            raise ValueError("a list is longer than its group's size")


# Returns the packs of the samples of a full buffer, and those that stay in it. The others are lost,
# which the function counts. It also gets whether the data have ended.
Choose = Callable[[list[int], bool], tuple[list[list[int]], list[int]]]


class SelectedPacks(Collector):
    """Fills a buffer up, and has a function choose packs of it whenever no pack is left.

    Columns: the pack that a sample belongs to, or -1, and the sample's place in the buffer.

    Args:
        buffer_size: samples of a full buffer, those of packs to come included.
        choose: chooses packs.
        drops_last: whether samples that are in no pack when the data end are dropped.
        packs: that were chosen before.
    """

    num_columns = 2

    def __init__(
        self, buffer_size: int, choose: Choose, drops_last: bool = False, packs: Any = ()
    ) -> None:
        self._buffer_size = buffer_size
        self._choose = choose
        self._drops_last = drops_last
        self._waiting = array("q")
        self._packs, self._num_returned = Lists.of(packs), 0

    @property
    def num_wanted(self) -> int:
        """Samples that a full buffer lacks."""
        num_chosen = len(self._packs.indices) - int(self._packs.offsets[self._num_returned])
        return max(0, self._buffer_size - len(self._waiting) - num_chosen)

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the buffer."""
        self._waiting.frombytes(samples.numbers.tobytes())
        return ()

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next pack that was chosen, once the buffer is full."""
        if self.num_wanted and not has_ended:
            return None
        if self._num_returned == len(self._packs):
            if not self._waiting or (has_ended and self._drops_last):
                return None
            numbers, self._waiting = self._waiting.tolist(), array("q")
            packs, rest = self._choose(numbers, has_ended)
            self._packs, self._num_returned = Lists.of(packs), 0
            self._waiting.extend(rest)
            return self.next(cycle, has_ended)
        self._num_returned += 1
        found: list[int] = self._packs[self._num_returned - 1].tolist()
        return found

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no pack at the end of the data."""
        rest, self._waiting = self._waiting.tolist(), array("q")
        return rest

    def state(self) -> CollectorState:
        """Returns the samples with their packs."""
        waiting = np.array(self._waiting, np.int64)
        offsets = self._packs.offsets[self._num_returned :]
        left = self._packs.indices[offsets[0] :], offsets
        return CollectorState({}, partial(_rows_of_packs, waiting, *left))

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state."""
        order = np.lexsort((columns_NC[:, 1], columns_NC[:, 0]))
        numbers, packs = samples.numbers[order], columns_NC[order, 0]
        num = int((packs < 0).sum())
        self._waiting.extend(numbers[:num].tolist())
        starts = np.flatnonzero(np.diff(packs[num:], prepend=-1))
        self._packs = Lists(numbers[num:], np.append(starts, len(numbers) - num))


def _rows_of_packs(waiting: Int64Array, chosen: Int64Array, offsets: Int64Array) -> Int64Array:
    """Returns samples with their packs and places."""
    numbers = np.concatenate([waiting, chosen])
    sizes = [len(waiting), *np.diff(offsets).tolist()]
    packs = np.repeat(np.arange(-1, len(sizes) - 1), sizes)
    return np.column_stack([numbers, packs, np.arange(len(numbers))])
