"""Randomness that depends on names and integers only: keys by hash, words by Philox.

Only raw 64-bit Philox output is used, never a method of numpy's `Generator` (numpy may change
those), and never a global generator. Philox is counter based: the words of (key, counter) are the
same in every process, on every machine and in every order of asking.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from numpy.random import Philox

UInt64Array = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


def _encode(value: object) -> bytes:
    """Writes a value so that two different values never give the same bytes."""
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"s%d:%s" % (len(raw), raw)
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_encode, value)) + b")"
    raise TypeError(f"a seed is made of str, int and tuples, not of {type(value).__name__}")


def key_of(*names: object) -> int:
    """Hashes names (str, int, nested tuples) to a 128-bit key."""
    return int.from_bytes(blake2b(_encode(names), digest_size=16).digest(), "little")


def random_words(key: int, *counter: int, size: int, skip: int = 0) -> UInt64Array:
    """Returns `size` words of 64 random bits, the same for the same key and counter.

    Args:
        key: 128 bits, from `key_of`.
        counter: up to three integers below 2**64, for example an epoch and a block number.
        size: number of words.
        skip: words before them that are passed over, without work; a multiple of 4.
    """
    padded = (*counter, 0, 0, 0)[:3]
    # The lowest counter word is the one that Philox itself counts up, once in four words.
    start = np.array([skip // 4, *(c & _MASK for c in padded)], dtype=np.uint64)
    words: UInt64Array = Philox(
        counter=start, key=np.array([key & _MASK, key >> 64], dtype=np.uint64)
    ).random_raw(size)
    return words
