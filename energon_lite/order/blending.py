"""Computes which child of a blend a draw takes.

`BlendOrder` blends by samples: a pure function of (stream, draw), in numpy blocks. Three orders:

- constant weights: exact counts per period, dealt within it by a Fibonacci lattice;
- weights on a schedule: a golden-ratio rotation through the cumulative weights;
- mode "random": independent draws.

The first two also permute the draws inside short blocks, so that all neighbours occur. Permutation,
lattice and rotation are the same in all streams but for an offset of s/S of a turn: the same draw
of all streams together, too, takes each child by its share.

`BudgetOrder` blends by tokens, from the lengths of the draws before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import BoolArray, Float64Array, Int64Array
from energon_lite.core.seeds import UInt64Array, key_of, random_words
from energon_lite.core.topology import Stream
from energon_lite.order.halving import Halving
from energon_lite.order.schedules import Lines, Weights

MODES = ("exact", "random")

# Draws within such a block are permuted: far enough that every child may follow every other, short
# enough that no prefix is more than 6/4 draws further from the shares.
SHORT_BLOCK = 6
_SHORT_ORDERS = np.array(list(permutations(range(SHORT_BLOCK))), dtype=np.int64)

# (draws of a period, step of its lattice, periods worked out at once). The step is the Fibonacci
# number before the period, the fraction closest to the golden ratio. A short period keeps closer
# to the shares, a long one costs less per draw.
_FEW_CHILDREN = 128
_PERIODS_OF_FEW = (144, 89, 64)
_PERIODS_OF_MANY = (377, 233, 24)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
# Numbers that children take that are worked out at once: a worker keeps the memory that it needed.
_CELLS_AT_ONCE = 1 << 14


class BlendOrder:
    """The children that one stream's draws take.

    With constant weights and mode "exact" each prefix of a stream is within 5 draws of each child's
    share, however long the run, and that of all streams in turn within 2S + 5 (measured: 4.3 for
    the worst weights found, 4 for common ones, less than S + 5). On a schedule the distance
    from the sum of the shares grows slowly: tens of draws after millions.

    Args:
        weights: of the leaves.
        mode: "exact", or "random" for independent draws.
        key: of seed and blend, from `key_of`; the same for all streams.
        stream: the stream s of S; its draw t is draw t * S + s of the run.

    Raises:
        ValueError: An unknown mode.
    """

    def __init__(self, weights: Weights, mode: str, key: int, stream: Stream) -> None:
        if mode not in MODES:
            raise ValueError(f"blend mode {mode!r} is not one of {', '.join(MODES)}")
        key = key_of("blend", mode, key, stream.pass_index)
        self._weights, self._stream = weights, stream
        self._draws: _Periods | _Lookup
        if mode == "exact" and weights.is_constant:
            self._draws = _Periods(weights, key, stream)
        else:
            self._draws = _Lookup(weights, key, stream, is_random=mode == "random")

    def block(self, draw: int, count: int) -> Int64Array:
        """Returns the children, shape (count,), of this stream's draws draw..draw+count-1.

        Raises:
            ValueError: All weights are 0 at one of the draws.
        """
        if count <= 0:
            return np.empty(0, dtype=np.int64)
        return self._draws.block(draw, count)

    @property
    def is_counted(self) -> bool:
        """Whether `counts` knows how often each child was drawn."""
        return isinstance(self._draws, _Periods)

    def counts(self, draw: int) -> Int64Array:
        """Returns how many of this stream's draws before `draw` each child takes; shape (K,).

        All are 0 with schedules, and in mode "random", where one would have to look at all of these
        draws.
        """
        if draw and isinstance(self._draws, _Periods):
            return self._draws.counts(draw, self._weights.num_leaves)
        return np.zeros(self._weights.num_leaves, dtype=np.int64)

    def next_draw(self, draw: int, children: BoolArray) -> int | None:
        """Returns `Weights.next_draw` in draws of this stream."""
        return _next_draw(self._weights, self._stream, draw, children)


def _next_draw(weights: Weights, stream: Stream, draw: int, children: BoolArray) -> int | None:
    found = weights.next_draw(draw * stream.num_streams + stream.index, children)
    return None if found is None else -(-(found - stream.index) // stream.num_streams)


class _Apportionment:
    """The number of the first n draws that each child takes: exact integers that only grow.

    A Huffman tree over the children; of the first n draws that reach a node, floor(n * p + phase)
    go left. Each node adds an error of at most 3/4 to those handed down to it, and an error counts
    for a child as its weight over that of the node's half. In a Huffman tree these quotients are at
    most 1, 1, 1/2, 1/3, 1/5, 1/8, ... from the child up: 3.36 in all, an error below 2.6, however
    many children there are and however long the run.

    Args:
        tree: over the children.
        num_children: K.
        key: of the blend.
        stream: streams have phases s/S of a turn apart.

    Source: the halving of draws at each node is R. Tijdeman's chairman assignment for two states.
    """

    def __init__(
        self, tree: Sequence[Halving], num_children: int, key: int, stream: Stream
    ) -> None:
        self.num_children = num_children
        self._tree = tree
        offset = np.uint64((stream.index << 64) // stream.num_streams)
        phases = random_words(key, 1, size=2 * num_children - 1) + offset
        # In 1/4..3/4 of a turn: a rounding error is then 3/4 at most.
        self._phases = ((phases >> np.uint64(1)) + np.uint64(1 << 62))[:, None]

    def counts(self, draws: Int64Array) -> Int64Array:
        """Returns how many of the first n draws each child takes, for N numbers n; shape (K, N)."""
        counts = np.empty((self.num_children, len(draws)), dtype=np.int64)
        width = max(1, _CELLS_AT_ONCE // self.num_children)
        for first in range(0, len(draws), width):
            own = draws[first : first + width]
            taken = np.empty((2 * self.num_children - 1, len(own)), dtype=np.uint64)
            taken[-1] = own
            for parents, lefts, rights, fractions in self._tree:
                reached, phases = taken[parents], self._phases[parents]
                to_left = _multiply_high(reached, fractions)
                # What the addition of the phase carries over from the lower 64 bits.
                to_left += reached * fractions + phases < phases
                taken[lefts] = to_left
                taken[rights] = reached - to_left
            counts[:, first : first + width] = taken[: self.num_children]
        return counts


class _Periods:
    """Exact counts per period, dealt within it by a Fibonacci lattice.

    The t-th draw of a period of L takes rank (t * step + shift) mod L; the children stand side by
    side on the ranks, each on as many as it takes draws of the period. The first ranks are another
    child's in every chunk of periods, and the shift is hashed.

    Source: N. M. Korobov, "Number-theoretic methods in approximate analysis", 1963 (good lattice
    points); the Fibonacci lattice is that of S. K. Zaremba, 1966.
    """

    def __init__(self, weights: Weights, key: int, stream: Stream) -> None:
        self._key = key
        self._children = np.flatnonzero(weights.constant())
        few = len(self._children) <= _FEW_CHILDREN
        self._period, step, self._num_periods = _PERIODS_OF_FEW if few else _PERIODS_OF_MANY
        self._apportionment = _Apportionment(
            weights.tree, len(self._children), key_of(key, "nodes"), stream
        )
        offset = stream.index * self._period // stream.num_streams
        self._lattice = np.arange(self._period) * step + offset
        self._chunk: tuple[int, Int64Array] | None = None

    def block(self, draw: int, count: int) -> Int64Array:
        """Returns the children, shape (count,), of draws draw..draw+count-1."""
        length = self._period * self._num_periods
        parts = []
        for chunk in range(draw // length, (draw + count - 1) // length + 1):
            start = chunk * length
            parts.append(self._children_of(chunk)[max(draw - start, 0) : draw + count - start])
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def counts(self, draw: int, num_leaves: int) -> Int64Array:
        """Returns how many of the first `draw` draws each leaf takes; shape (num_leaves,)."""
        chunk, rest = divmod(draw, self._period * self._num_periods)
        counts = np.bincount(self._children_of(chunk)[:rest], minlength=num_leaves)
        counts[self._children] += self._before
        return counts

    def _children_of(self, chunk: int) -> Int64Array:
        """Returns the draws of a chunk of periods; the last chunk is kept."""
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = (chunk, self._work_out(chunk))
        return self._chunk[1]

    def _work_out(self, chunk: int) -> Int64Array:
        periods = np.arange(self._num_periods + 1)
        edges = (periods + chunk * self._num_periods) * self._period
        taken = self._apportionment.counts(edges)
        self._before, sizes = taken[:, 0].copy(), np.diff(taken, axis=1)
        hashes = random_words(self._key, chunk, 1, size=len(sizes) + self._num_periods)
        order = np.argsort(hashes[self._num_periods :], kind="stable")
        # On each rank of each period, the child that stands there.
        standing = np.repeat(np.tile(order, self._num_periods), sizes[order].T.ravel())
        shifts = (hashes[: self._num_periods] % np.uint64(self._period)).astype(np.int64)
        ranks = (self._lattice + shifts[:, None]) % self._period
        ranks += edges[:-1, None] - edges[0]
        first = chunk * self._num_periods * self._period
        places = _short_blocks(self._key, first, len(standing)) - first
        children: Int64Array = self._children[standing[ranks.ravel()[places]]]
        return children


class _Lookup:
    """A number in 0..1 for each draw, looked up in the cumulative shares.

    Args:
        weights: of the leaves; they may change.
        key: of the blend.
        stream: streams are s/S of a turn apart, or independent.
        is_random: independent numbers instead of a rotation by the golden ratio.
    """

    def __init__(self, weights: Weights, key: int, stream: Stream, is_random: bool) -> None:
        self._weights = weights
        self._stream = stream
        self._is_random = is_random
        self._key = key_of(key, stream.index, stream.num_streams) if is_random else key
        offset = np.uint64((stream.index << 64) // stream.num_streams)
        self._phase = random_words(key, 1, 1, size=1) + offset
        self._constant = _cumulative(weights.constant()) if weights.is_constant else None

    def block(self, draw: int, count: int) -> Int64Array:
        """Returns the children, shape (count,), of draws draw..draw+count-1."""
        first = draw // SHORT_BLOCK * SHORT_BLOCK
        stop = -(-(draw + count) // SHORT_BLOCK) * SHORT_BLOCK
        numbers = self._numbers(first, stop - first)
        if self._constant is not None:
            children = np.searchsorted(self._constant, numbers, side="right")
            return children[draw - first : draw - first + count].astype(np.int64)
        # The shares in the middle of a short block stand for it, but where a schedule has a point
        # inside each draw has its own: a child is never drawn before or after its time.
        num_streams, breaks = self._stream.num_streams, self._weights.breaks
        firsts = np.arange(first, stop, SHORT_BLOCK) * num_streams + self._stream.index
        steps = np.arange(SHORT_BLOCK) * num_streams
        begun, ended = (np.searchsorted(breaks, x, "right") for x in (firsts, firsts + steps[-1]))
        is_cut = (begun != ended)[:, None]
        draws = (firsts[:, None] + np.where(is_cut, steps, steps[-1] // 2)).ravel()
        is_new = np.diff(draws, prepend=-1) > 0
        draws, places = draws[is_new], np.cumsum(is_new) - 1
        parts = []
        for own, lines in self._weights.blocks(draws):
            at = slice(*np.searchsorted(places, [own.start, own.stop]))
            parts.append(self._looked_up(draws[own], places[at] - own.start, numbers[at], lines))
        return np.concatenate(parts)[draw - first : draw - first + count]

    def _numbers(self, first: int, count: int) -> Float64Array:
        """Returns the number in 0..1, shape (count,), of each draw from `first` on."""
        if self._is_random:
            lead = first % 4
            words = random_words(self._key, size=count + lead, skip=first - lead)[lead:]
        else:
            places = _short_blocks(self._key, first, count).astype(np.uint64)
            words = self._phase + places * _GOLDEN
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _looked_up(
        self, draws: Int64Array, places: Int64Array, numbers: Float64Array, lines: Lines | None
    ) -> Int64Array:
        """Counts how many bounds of children, sums of the shares at a draw, numbers have passed.

        A child of share 0 has the bound of the one before it, and none is drawn behind the first
        whose bound is 1: no number gets there.

        Args:
            draws: shape (D,); of the run.
            places: shape (N,); the place of each number's draw among them.
            numbers: shape (N,); in 0..1.
            lines: weights of which most are linear, so that their sums are, too; None if all shares
                are to be added up.
        """
        k = self._weights.num_leaves
        if lines is None:
            bounds = _cumulative(self._weights.at(draws))
            return _count_passed(len(places), k, lambda own: bounds[places, own] <= numbers)
        left, right = np.add.accumulate(lines.ends, axis=1)
        others = np.add.accumulate(np.pad(lines.values, ((1, 0), (0, 0))), axis=0)
        num_others = np.searchsorted(lines.bent, np.arange(k), side="right")  # up to each child
        of_left, of_right = lines.parts[:, places]
        wanted = numbers * lines.total[places]

        def behind(children: Int64Array) -> Float64Array:
            """Returns how far their bounds lie behind the numbers, not divided."""
            sums: Float64Array = left[children] * of_left + right[children] * of_right - wanted
            return sums + others[num_others[children], places] if len(lines.bent) else sums

        passed = _count_passed(len(places), k, lambda children: behind(children) <= 0)
        # Where rounding might decide, all shares are added up.
        error = (k + 8) ** 2 * 2.0**-49 * max(lines.ends.max(), lines.values.max(initial=0.0))
        gaps = np.minimum(abs(behind(passed)), abs(behind(np.maximum(passed - 1, 0))))
        if len(unsure := np.flatnonzero(gaps <= error)):
            own = draws[places[unsure]], np.arange(len(unsure)), numbers[unsure]
            passed[unsure] = self._looked_up(*own, None)
        return passed


def _count_passed(size: int, k: int, is_passed: Callable[[Int64Array], BoolArray]) -> Int64Array:
    """Counts for each of some numbers how many of k rising bounds but the last it has passed."""
    passed = np.zeros(size, np.int64)
    for step in 1 << np.arange((k - 1).bit_length())[::-1]:
        ahead = passed + step
        passed += step * ((ahead < k) & is_passed(np.minimum(ahead, k) - 1))
    return passed


def _cumulative(shares: Float64Array) -> Float64Array:
    """Adds shares up along the last axis, in order, to exactly 1."""
    sums = np.add.accumulate(shares, axis=-1)
    bounds: Float64Array = sums / sums[..., -1:]
    return bounds


def _short_blocks(key: int, first: int, count: int) -> Int64Array:
    """Permutes draws first..first+count-1, both multiples of `SHORT_BLOCK`, inside short blocks."""
    number = first // SHORT_BLOCK
    lead = number % 4
    words = random_words(key, size=count // SHORT_BLOCK + lead, skip=number - lead)[lead:]
    starts = np.arange(first, first + count, SHORT_BLOCK)
    chosen = (words % np.uint64(len(_SHORT_ORDERS))).astype(np.int64)
    places: Int64Array = (starts[:, None] + _SHORT_ORDERS[chosen]).ravel()
    return places


def _multiply_high(left: UInt64Array, right: UInt64Array) -> UInt64Array:
    """Returns the upper 64 bits of the 128-bit products, element by element."""
    low_left, high_left = left & _LOW, left >> _HALF
    low_right, high_right = right & _LOW, right >> _HALF
    middle = low_left * high_right + ((low_left * low_right) >> _HALF)
    other = high_left * low_right + (middle & _LOW)
    high: UInt64Array = high_left * high_right + (middle >> _HALF) + (other >> _HALF)
    return high


class BudgetState(NamedTuple):
    """The place of a `BudgetOrder`.

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

    The lengths of samples are known only once they have been drawn, or encoded. So the choice is
    not a pure function of the draw but of the lengths of the draws before: each child has a debt,
    its target tokens less those that it contributed, and the next draw takes the child whose debt,
    in its own samples' mean length, is largest by weight. A draw whose length is not known yet
    counts with the mean of its child.

    Args:
        weights: the shares of the tokens.
        key: 128 bits, from `key_of`.
        stream: the stream s of S.
        first_means: shape (K,); mean lengths in any unit, as bytes, until a sample of a child is
            known. Only their proportions matter.

    Attributes:
        draw: draws that were chosen.
        pending: shape (K,); those whose length is not known yet.

    Source: the choice is that of self-clocked fair queueing, S. Golestani, "A self-clocked fair
    queueing scheme for broadband applications", INFOCOM 1994.
    """

    def __init__(
        self, weights: Weights, key: int, stream: Stream, first_means: Float64Array
    ) -> None:
        self._weights = weights
        self._stream = stream
        self._first_means = first_means
        self._constant = weights.constant() if weights.is_constant else None
        k = weights.num_leaves
        # Streams begin apart: each child's turn lies elsewhere in its own length.
        first = random_words(key, size=k).astype(np.float64) / 2.0**64
        self._phases: Float64Array = (first + stream.index / stream.num_streams) % 1.0
        self.go_to(BudgetState(0, [0.0] * k, [0.0] * k, [0.0] * k))

    def go_to(self, state: BudgetState) -> None:
        """Goes to a state."""
        self.draw = state.draw
        self._debts = np.array(state.debts, dtype=np.float64)
        self._tokens = np.array(state.tokens, dtype=np.float64)
        self._counts = np.array(state.counts, dtype=np.float64)
        self.pending: Float64Array = np.zeros(len(self._debts))
        self._is_out = np.zeros(len(self._debts), dtype=bool)
        self._are_all_drawn = self._constant is not None and bool(self._constant.all())
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
        self._is_out[child], self._are_all_drawn = True, False

    def choose(self) -> int:
        """Returns the child of the next draw; passes over draws at which none has a share.

        Children that never have a share again are taken in turn when all others have ended.
        """
        shares = self.shares(self.draw)
        guesses = self._means * self.pending
        waits = self._means * self._phases - self._debts - shares * guesses.sum() + guesses
        if shares is self._constant and self._are_all_drawn:
            return int((waits / shares).argmin())
        while (is_out := (shares == 0) | self._is_out).all():
            later = _next_draw(self._weights, self._stream, self.draw + 1, ~self._is_out)
            if later is None:
                return int(self._is_out.argmin())
            self.draw, shares = later, self.shares(later)
        with np.errstate(divide="ignore", invalid="ignore"):
            waits /= shares
        waits[is_out] = np.inf
        return int(waits.argmin())

    def count(self, child: int, draw: int, tokens: float) -> None:
        """Counts the length of what `draw` took."""
        self._debts += self.shares(draw) * tokens
        self._debts[child] -= tokens
        self._tokens[child] += tokens
        self._counts[child] += 1
        if self._are_all_known:
            self._means[child] = self._tokens[child] / self._counts[child]
        else:
            self._update_means()

    def _update_means(self) -> None:
        total, expected = float(self._tokens.sum()), float(self._counts @ self._first_means)
        scale = total / expected if expected and total else 1.0
        self._are_all_known = bool(self._counts.all())
        self._means = np.where(
            self._counts > 0,
            self._tokens / np.maximum(self._counts, 1.0),
            self._first_means * scale,
        )
