"""Lists of samples as compressed rows: what packers and batchers return."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from energon_lite.core.arrays import Float64Array, Int64Array


@dataclass(frozen=True, eq=False)
class Lists:
    """P packs of N samples, as two arrays: lists of lists would cost more than packing does.

    Pack i holds the samples `indices[offsets[i]:offsets[i + 1]]`, in the order in which they were
    put into it. Packs are in the order in which they were opened, which after sorted packing is
    from long samples to short ones: shuffle them before training.

    Args:
        indices: shape (N,), int64; sample indices.
        offsets: shape (P + 1,), int64; starts with 0, ends with N, never falls.

    Raises:
        ValueError: The arrays do not fit together.

    Example:
        >>> packs = Lists(np.array([0, 3, 1, 2]), np.array([0, 2, 4]))
        >>> len(packs), packs.tolist()
        (2, [[0, 3], [1, 2]])
    """

    indices: Int64Array
    offsets: Int64Array

    def __post_init__(self) -> None:
        for name, array in (("indices", self.indices), ("offsets", self.offsets)):
            if array.dtype != np.int64 or array.ndim != 1:
                raise ValueError(
                    f"{name} must be int64 of shape (n,), not {array.dtype} of shape {array.shape}."
                )
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.indices):
            raise ValueError(
                f"offsets must start with 0 and end with len(indices) = {len(self.indices)}, "
                f"but are {self.offsets!r}."
            )

    @classmethod
    def joined(cls, blocks: Iterable[Lists]) -> Lists:
        """Returns the packs of several."""
        none = np.empty(0, np.int64)
        indices, sizes = [none], [none]
        for packs in blocks:
            indices.append(packs.indices)
            sizes.append(np.diff(packs.offsets))
        offsets = np.cumsum(np.append(0, np.concatenate(sizes)))
        return cls(np.concatenate(indices), offsets)

    @classmethod
    def of(cls, packs: Sequence[Sequence[int] | Int64Array]) -> Lists:
        """Returns packs that are sequences of sample indices."""
        indices = np.concatenate([np.empty(0, np.int64), *(np.asarray(p, np.int64) for p in packs)])
        return cls(indices, np.cumsum([0, *map(len, packs)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Int64Array:
        """Returns the samples of one pack, as a view; negative counts from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)} packs")
        index %= len(self)
        return self.indices[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Int64Array]:
        for start, end in pairwise(self.offsets.tolist()):
            yield self.indices[start:end]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lists):
            return NotImplemented
        return np.array_equal(self.indices, other.indices) and np.array_equal(
            self.offsets, other.offsets
        )

    def __repr__(self) -> str:
        return f"Lists({len(self):,} packs of {len(self.indices):,} samples)"

    def reordered(self, order_P: Int64Array) -> Lists:
        """Returns the packs in another order, or some of them.

        Args:
            order_P: shape (p,); numbers of packs.
        """
        counts = np.diff(self.offsets)[order_P]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        shifts = np.repeat(self.offsets[order_P] - offsets[:-1], counts)
        return Lists(self.indices[np.arange(len(shifts)) + shifts], offsets)

    def renumbered(self, number_of: Callable[[Int64Array], Int64Array]) -> Lists:
        """Returns the packs with other numbers of the samples; a repetition `~n` stays one."""
        is_repeated = self.indices < 0
        numbers = number_of(np.where(is_repeated, ~self.indices, self.indices))
        return Lists(np.where(is_repeated, ~numbers, numbers), self.offsets)

    def tolist(self) -> list[list[int]]:
        """Returns the packs as lists of sample indices."""
        # Each new list counts as a reason to look for garbage, which then looks through all lists
        # made so far: nine tenths of the time for 300,000 packs. Lists of integers are none.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            indices = self.indices.tolist()
            return [indices[start:end] for start, end in pairwise(self.offsets.tolist())]
        finally:
            if was_enabled:
                gc.enable()

    def sizes(self, lengths: npt.ArrayLike) -> Int64Array:
        """Adds up each pack.

        Args:
            lengths: shape (N,) or (N, R); of every sample, by sample index.

        Returns:
            Shape (P,) or (P, R).
        """
        totals = np.cumsum(np.asarray(lengths)[self.indices], axis=0, dtype=np.int64)
        # An own row of zeros in front: an empty pack then adds up to 0.
        totals = np.concatenate([np.zeros((1, *totals.shape[1:]), np.int64), totals])
        sizes: Int64Array = totals[self.offsets[1:]] - totals[self.offsets[:-1]]
        return sizes

    def efficiency(
        self, lengths: npt.ArrayLike, capacity: int | npt.ArrayLike
    ) -> float | Float64Array:
        """Returns the share of all packs' room that is filled, in 0..1.

        Args:
            lengths: shape (N,) or (N, R); of every sample, by sample index.
            capacity: what a pack can hold: a number, or shape (R,).

        Returns:
            A number, or one for each resource, shape (R,). 1 where there is no pack.
        """
        used = np.asarray(lengths)[self.indices].sum(axis=0, dtype=np.int64)
        room = len(self) * np.asarray(capacity, dtype=np.float64)
        filled = used / room if len(self) else np.ones(np.shape(used + room))
        return float(filled) if np.ndim(filled) == 0 else np.asarray(filled)
