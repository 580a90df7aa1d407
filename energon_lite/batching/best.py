"""Tries several packers on the same samples, and keeps the fewest packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from energon_lite.batching.bounds import bound_of
from energon_lite.batching.fit import (
    first_fit,
    first_fit_decreasing,
    fit_decreasing,
    fit_in_order,
    sequential,
)
from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import Sizes, check_sizes
from energon_lite.batching.stream import pack_sizes
from energon_lite.core.seeds import key_of, random_words

# Samples that the streaming packer may choose from.
_WINDOWS = (16, 64, 128, 256)


def pack_best(
    lengths: npt.ArrayLike,
    capacity: int | npt.ArrayLike,
    *,
    max_samples: int | None = None,
    align: int | npt.ArrayLike = 1,
    max_steps: int = 5000,
    tolerance: float = 0.0,
) -> Lists:
    """Packs with each of several methods, cheap ones first, and returns the fewest packs.

    First-fit decreasing; then packs opened with the next sample in random order, from buffers of
    several sizes, with a search for what fills them [1]. It stops as soon as `lower_bound` is
    reached. The result depends on the arguments only. About 1 second for 100,000 samples, and far
    less if first-fit decreasing reaches the bound.

    Args:
        lengths: shape (N,), each in 1..capacity; or (N, R), see `first_fit_decreasing`.
        capacity: what a pack can hold: a number, or shape (R,).
        max_samples: samples in one pack at most; None for any number.
        align: lengths are rounded up to a multiple of this: a number, or shape (R,).
        max_steps: how many samples a search may put into one pack, and take out again. A tenth
            takes about a third of the time, and some hundredths of a per cent more packs.
        tolerance: it stops, too, with packs of at most this share above the bound: 0.001 for one
            in a thousand.

    Returns:
        Packs, in the order of the method that was best: shuffle them before training.

    Raises:
        TypeError: Not integers.
        ValueError: A length is out of range; names the first such sample. `max_steps` is below 1,
            or `tolerance` below 0.

    Example:
        >>> pack_best(np.array([6, 5, 4, 3, 2]), capacity=10).tolist()
        [[0, 2], [1, 3, 4]]

    Source: [1] J. Gupta, J. Ho, "A new heuristic algorithm for the one-dimensional bin-packing
    problem", Prod. Plan. Control 10 (1999).
    """
    if max_steps < 1 or not tolerance >= 0:
        raise ValueError(
            f"max_steps is {max_steps} and tolerance {tolerance}; they must be at least 1 and 0."
        )
    sizes = check_sizes(lengths, capacity, max_samples=max_samples, align=align)
    bound = bound_of(sizes)
    enough = int(bound * (1 + tolerance))
    best: Lists | None = None
    for packs in _attempts(sizes, bound, max_steps):
        if best is None or len(packs) < len(best):
            best = packs
        if len(best) <= enough:
            break
    assert best is not None
    return best


def _attempts(sizes: Sizes, bound: int, max_steps: int) -> Iterator[Lists]:
    """Packs with one method after the other, when asked for the next."""
    yield fit_decreasing(sizes)
    num_samples = len(sizes.lengths)
    # Raw words, not a permutation of numpy's, which another version may draw otherwise.
    words = random_words(key_of("packing.portfolio"), size=num_samples)
    samples_N = np.argsort(words, kind="stable")
    per_pack = num_samples / max(bound, 1)
    # Too little to choose from, and the last places of a pack stay empty.
    needed = 1 << int(2 * per_pack).bit_length()
    shuffled = replace(sizes, lengths=np.ascontiguousarray(sizes.lengths[samples_N]))
    if sizes.max_samples < 3 * per_pack:
        yield fit_in_order(sizes, samples_N)
    for window in sorted({max(window, needed) for window in _WINDOWS}):
        packs = pack_sizes(shuffled, window, max_steps)
        yield Lists(samples_N[packs.indices], packs.offsets)


ALGORITHMS = {
    "best": pack_best,
    "first_fit_decreasing": first_fit_decreasing,
    "best_fit_decreasing": first_fit_decreasing,
    "first_fit": first_fit,
    "sequential": sequential,
}
