"""The cost of a pack for the rank that has it.

Axes: N samples, P packs, R resources (tokens, then tiles).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import as_integers
from energon_lite.core.arrays import Float64Array, Int64Array

# The sum of squares of a pack is at most the square of its sum: up to here it fits into 63 bits.
_MAX_TOKENS = math.isqrt((1 << 63) - 1)


@dataclass(frozen=True)
class CostModel:
    """The work of a pack: a sum over its samples, of what is linear, attention, and images.

    A sample of `n` tokens and `m` tiles costs `token * n + token_squared * n**2 + tile * m`: in a
    pack, samples attend to themselves only. The unit is the caller's, such as seconds; an order of
    packs depends on the ratios alone.

    Args:
        token: cost of a token.
        token_squared: cost of a pair of tokens that attend to each other.
        tile: cost of a tile, an image of the size that the vision encoder takes.

    Raises:
        ValueError: A coefficient is negative, infinite or not a number.

    Example:
        >>> packs = Lists(np.array([0, 1, 2]), np.array([0, 2, 3]))
        >>> CostModel(token=1, token_squared=0.01).costs(packs, [30, 20, 50])
        array([63., 75.])
    """

    token: float = 1.0
    token_squared: float = 0.0
    tile: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; a cost must be a number of at least 0.")

    def costs(self, packs: Lists, lengths: npt.ArrayLike) -> Float64Array:
        """Returns the cost of each pack, the same to the last bit on every machine.

        Args:
            packs: P packs.
            lengths: shape (N,), tokens of every sample, by sample index; or (N, R), tokens in the
                first column, tiles in the second, where other columns cost nothing.

        Returns:
            Shape (P,).

        Raises:
            TypeError: `lengths` are not integers.
            ValueError: A length is negative; there is a sample in `packs` that has none; there is
                no column of tiles though they cost something; or a pack has 2**31.5 tokens.
        """
        lengths_NR = _as_rows(lengths)
        if len(packs.indices) and int(packs.indices.max()) >= len(lengths_NR):
            raise ValueError(
                f"packs have sample {int(packs.indices.max())}, but there are only "
                f"{len(lengths_NR):,} lengths. Give the lengths of all samples, by sample index."
            )
        tokens_N = lengths_NR[:, 0]
        tokens_P = packs.sizes(tokens_N)
        squares_P = tiles_P = np.zeros(len(packs), np.int64)
        if self.token_squared:
            if tokens_P.size and int(tokens_P.max()) > _MAX_TOKENS:
                raise ValueError(
                    f"Pack {int(tokens_P.argmax())} has {int(tokens_P.max()):,} tokens; above "
                    f"{_MAX_TOKENS:,}, the sum of squares does not fit into 63 bits."
                )
            squares_P = packs.sizes(tokens_N * tokens_N)
        if self.tile:
            if lengths_NR.shape[1] < 2:
                raise ValueError(
                    f"tile={self.tile}, but lengths have shape {np.shape(lengths)}, without tiles. "
                    "Give shape (N, 2), tokens and tiles, or use tile=0."
                )
            tiles_P = packs.sizes(lengths_NR[:, 1])
        return self.combine(tokens_P, squares_P, tiles_P)

    def combine(
        self, tokens: npt.ArrayLike, sum_squares: npt.ArrayLike, tiles: npt.ArrayLike = 0
    ) -> Float64Array:
        """Returns the cost of packs whose sums are known, such as those of a stream.

        Args:
            tokens: shape (P,), or a number: the tokens of each pack.
            sum_squares: the same of the squares of its samples' tokens.
            tiles: the same of its tiles.

        Returns:
            Shape (P,), or () for numbers.
        """
        sums = (np.asarray(each, np.float64) for each in (tokens, sum_squares, tiles))
        token, squared, tile = sums
        return np.asarray(self.token * token + self.token_squared * squared + self.tile * tile)


def as_costs(costs: npt.ArrayLike, *axes: str) -> Float64Array:
    """Returns costs as an array with these axes, if all are numbers of at least 0.

    Raises:
        TypeError: They are not numbers.
        ValueError: The shape is another one; or names the first cost that is out of range.
    """
    array = np.asarray(costs)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"costs must be numbers, not {array.dtype}.")
    if array.ndim != len(axes):
        shape = ", ".join(axes) + "," * (len(axes) == 1)
        raise ValueError(f"costs must have shape ({shape}), not {array.shape}.")
    is_bad = ~((array >= 0) & (array < math.inf))
    if is_bad.any():
        place = tuple(int(i) for i in np.argwhere(is_bad)[0])
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, place, strict=True))
        raise ValueError(f"The cost of {where} is {array[place]}; it must be at least 0, finite.")
    return array.astype(np.float64)


def _as_rows(lengths: npt.ArrayLike) -> Int64Array:
    array = as_integers("lengths", lengths)
    if array.ndim not in (1, 2) or array.shape[1:] == (0,):
        raise ValueError(f"lengths must have shape (N,) or (N, R), not {array.shape}.")
    rows = array.astype(np.int64).reshape(len(array), *array.shape[1:] or (1,))
    if (rows < 0).any():
        index = int((rows < 0).any(axis=1).argmax())
        raise ValueError(f"Sample {index} has length {array[index].tolist()}, which is negative.")
    return rows
