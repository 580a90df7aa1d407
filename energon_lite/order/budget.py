"""Blending by tokens: which child comes next, so that each gets its share of the tokens given.

The lengths of samples are known only once they have been drawn, or encoded. So the choice is not a
pure function of the draw, as that of `order.blending` is, but of the lengths of the draws before:
each child has a debt, its target tokens less those that it contributed, and the next draw
takes the child whose debt, in its own samples' mean length, is largest by weight. A draw whose
length is not known yet counts with the mean of its child.

Source: the choice is that of self-clocked fair queueing, S. Golestani, "A self-clocked fair
queueing scheme for broadband applications", INFOCOM 1994.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import Float64Array
from energon_lite.core.seeds import random_words
from energon_lite.core.topology import Stream
from energon_lite.order.schedules import Weights


class BudgetState(NamedTuple):
    """Where a `BudgetOrder` stands.

    Attributes:
        draw: draws that were chosen.
        debts: shape (K,); target tokens less actual tokens.
        tokens: shape (K,); tokens of the draws whose length is known.
        counts: shape (K,); those draws.
    """

    draw: int
    debts: list[float]
    tokens: list[float]
    counts: list[float]


class BudgetOrder:
    """The children that one stream's draws take, by tokens.

    Args:
        weights: the shares of the tokens.
        key: 128 bits, from `key_of`.
        stream: the stream s of S.
    """

    def __init__(self, weights: Weights, key: int, stream: Stream) -> None:
        self._weights = weights
        self._stream = stream
        self._constant = weights.constant() if weights.is_constant else None
        k = weights.num_leaves
        # Streams begin apart: each child's turn lies elsewhere in its own length.
        words = random_words(key, size=k)
        first = words.astype(np.float64) / 2.0**64
        self._phases: Float64Array = (first + stream.index / stream.num_streams) % 1.0
        self.go_to(BudgetState(0, [0.0] * k, [0.0] * k, [0.0] * k))

    def go_to(self, state: BudgetState) -> None:
        """Goes to a state."""
        self.draw = state.draw
        self._debts = np.array(state.debts, dtype=np.float64)
        self._tokens = np.array(state.tokens, dtype=np.float64)
        self._counts = np.array(state.counts, dtype=np.float64)
        self._is_out = np.zeros(len(self._debts), dtype=bool)
        self._update_means()

    def state(self) -> BudgetState:
        """Returns where it stands."""
        return BudgetState(
            self.draw, self._debts.tolist(), self._tokens.tolist(), self._counts.tolist()
        )

    def shares(self, draw: int) -> Float64Array:
        """Returns the shares, shape (K,), at a draw of the stream."""
        if self._constant is not None:
            return self._constant
        run_draw = draw * self._stream.num_streams + self._stream.index
        shares: Float64Array = self._weights.at(np.array([run_draw], dtype=np.int64))[0]
        return shares

    def leave_out(self, child: int) -> None:
        """Takes a child that has ended out of the choice."""
        self._is_out[child] = True

    def choose(self) -> int:
        """Returns the child of the next draw."""
        shares = self.shares(self.draw)
        with np.errstate(divide="ignore", invalid="ignore"):
            waits = (self._means * self._phases - self._debts) / shares
        waits[(shares == 0) | self._is_out] = np.inf
        return int(np.argmin(waits))

    def count(self, child: int, draw: int, tokens: float) -> None:
        """Counts tokens, also a correction of what was counted, for what `draw` took."""
        self._debts += self.shares(draw) * tokens
        self._debts[child] -= tokens

    def mean(self, child: int) -> float:
        """Returns the mean length of a child's samples, as far as it is known."""
        return float(self._means[child])

    def learn(self, child: int, tokens: float) -> None:
        """Records the length of a draw, for the means."""
        self._tokens[child] += tokens
        self._counts[child] += 1
        self._update_means()

    def _update_means(self) -> None:
        total, count = float(self._tokens.sum()), float(self._counts.sum())
        overall = total / count if count and total else 1.0
        # Before its first sample is known, a child's mean is that of all.
        self._means = np.where(
            self._counts > 0, self._tokens / np.maximum(self._counts, 1.0), overall
        )
