"""Samples one by one, each drawn at random from a buffer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.collector import CollectorState, OneByOne, Samples, saved_count
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

    def leftover(self) -> Sequence[int]:
        """Returns nothing: every sample is drawn."""
        return ()

    def state(self) -> CollectorState:
        """Returns how many samples were drawn, and the places of the others."""
        numbers = np.array(self._buffer, np.int64)
        counts = {"returned": self._num_returned}
        return CollectorState(counts, numbers, np.arange(len(numbers))[:, None])

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
