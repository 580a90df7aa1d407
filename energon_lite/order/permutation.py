"""Keyed permutations of range(n), of any size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from energon_lite.core.arrays import Int32Array, Int64Array
from energon_lite.core.seeds import random_words

# Up to here a table is sorted once; above, a bijection is computed per element.
TABLE_LIMIT = 1 << 18
_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """A permutation of range(n), fixed by key and counter.

    Small ones are the argsort of random words, so that each of the n! is as likely as the others.
    Large ones are a Feistel network over the next power of four, walked until it falls below n:
    no memory, and any element in constant time.

    Args:
        n: size.
        key: 128 bits, from `key_of`.
        counter: integers that distinguish one use of the key from the others.

    Source: J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle
    walking); the round function is the finalizer of SplitMix64.
    """

    __slots__ = ("_bits", "_round_keys", "_table", "n")

    def __init__(self, n: int, key: int, *counter: int) -> None:
        self.n = n
        self._table: Int32Array | None = None
        if n <= TABLE_LIMIT:
            words = random_words(key, *counter, size=n)
            self._table = np.argsort(words, kind="stable").astype(np.int32)
        else:
            self._bits = np.uint64((max(2, (n - 1).bit_length()) + 1) // 2)
            self._round_keys = random_words(key, *counter, size=_ROUNDS)

    def __call__(self, positions: Int64Array) -> Int64Array:
        """Returns the elements at `positions`, shape (N,), each in 0..n-1."""
        if self._table is not None:
            return self._table[positions].astype(np.int64)
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(1) << self._bits
        left, right = values >> self._bits, values & (half - np.uint64(1))
        for round_key in self._round_keys:
            mixed = (right + round_key) * _MULTIPLIERS[0]
            mixed ^= mixed >> np.uint64(32)
            mixed *= _MULTIPLIERS[1]
            left, right = right, left ^ (mixed >> (np.uint64(64) - self._bits))
        return (left << self._bits) | right
