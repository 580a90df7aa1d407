"""Weights of the sources of a blend: constants and schedules, levels within levels -> shares.

A share is what a draw of the run belongs to a leaf with: the product, level by level, of a weight
over the sum of the weights beside it. Sums are taken in a fixed order and curves from sums and
products alone, so that every machine finds the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from energon_lite.core.arrays import BoolArray, Float64Array, Int64Array
from energon_lite.order.halving import Halving, halvings

KINDS = ("linear", "step", "cosine")

# sin(pi * x) = sum of c_k * x**(2k + 1); for |x| <= 1/2 the first omitted term is below 1e-18.
_SIN_PI = tuple((-1) ** k * math.pi ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(12))

# Where a block of draws has more shares than this, only weights that are not linear there are
# worked out at each draw, at most this number at once; else all shares, as many as the last one.
_MANY_CELLS, _MOST_BENT, _MOST_CELLS = 1 << 15, 1 << 15, 1 << 19
# `Weights.expected` works a long interval out at so few draws.
_FEW_NODES, _MANY_NODES = 8, 128
# Nodes and weights of an integral over -1..1.
_legendre = cache(np.polynomial.legendre.leggauss)


@dataclass(frozen=True)
class Schedule:
    """A weight that changes over the run.

    Before the first point it has that point's value, after the last one the last one's. Between
    two points, "linear" is a straight line, "step" the value of the left one, "cosine" half a
    cosine wave, flat at both points.

    Args:
        kind: "linear", "step" or "cosine".
        points: pairs (draw of the run, value), in ascending order of the draws.

    Raises:
        ValueError: An unknown kind; no points; draws that are negative or do not ascend; values
            that are negative or not finite.
    """

    kind: str
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Refuses what is no schedule."""
        if self.kind not in KINDS:
            raise ValueError(f"schedule kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if not self.points:
            raise ValueError(f"{self.kind} schedule has no points; give at least one [x, value]")
        before = -math.inf
        for number, (x, y) in enumerate(self.points):
            where = f"{self.kind} schedule, point {number}"
            if not (math.isfinite(x) and x >= 0):
                raise ValueError(f"{where}: x={x} must be finite and at least 0")
            if x <= before:
                raise ValueError(f"{where}: x={x} must lie behind x={before} of the point before")
            if not (math.isfinite(y) and y >= 0):
                raise ValueError(f"{where}: value {y} must be finite and at least 0")
            before = x

    def at(self, draws: Int64Array | Float64Array) -> Float64Array:
        """Returns the value at `draws`, shape (N,).

        Example:
            >>> Schedule("linear", ((0, 1.0), (10, 3.0))).at(np.array([0, 5, 99])).tolist()
            [1.0, 2.0, 3.0]
        """
        values: Float64Array = _ScheduleTable([self]).at(draws)[0]
        return values

    def scaled(self, factor: float) -> Schedule:
        """Returns the schedule with the x of all points multiplied, e.g. from steps to draws."""
        return Schedule(self.kind, tuple((x * factor, y) for x, y in self.points))

    def config(self) -> dict[str, Any]:
        """Returns the settings as plain JSON."""
        return {"kind": self.kind, "points": [[x, y] for x, y in self.points]}


Weight: TypeAlias = float | Schedule


class Lines(NamedTuple):
    """Weights, not divided, at N draws that rise; of most leaves they are linear there.

    Attributes:
        ends: shape (2, K); at the first draw and at the last one, 0 where a weight is not linear.
        parts: shape (2, N); how much of both a weight at a draw has.
        bent: shape (B,); which leaves have weights that are not linear.
        values: shape (B, N); these weights.
        total: shape (N,); the sum of all weights, nowhere 0.
    """

    ends: Float64Array
    parts: Float64Array
    bent: Int64Array
    values: Float64Array
    total: Float64Array


class Weights:
    """The shares of the leaves of a tree of blends.

    A level whose weights are all 0 at a draw counts, there, as weight 0 in the level above.

    Args:
        entries: for each child of the blend a leaf's weight, or a nested blend's weight and its
            `Weights`. Leaves are numbered from left to right.

    Attributes:
        num_leaves: K.
        is_constant: whether no share ever changes.
        breaks: the draws, ascending, at which a schedule has a point; shares are smooth between.

    Raises:
        ValueError: No entry; a weight that is negative or not finite; or constants that are all 0.

    Example:
        >>> Weights([1.0, (3.0, Weights([1.0, 2.0]))]).constant().tolist()
        [0.25, 0.25, 0.5]
    """

    def __init__(self, entries: Sequence[Weight | tuple[Weight, Weights]]) -> None:
        if not entries:
            raise ValueError("a blend has no entries; give at least one weight")
        self._weights: list[Weight] = []
        self._inner: list[Weights | None] = []
        for number, entry in enumerate(entries):
            weight, inner = entry if isinstance(entry, tuple) else (entry, None)
            self._weights.append(_checked_weight(weight, number))
            self._inner.append(inner)
        if all(weight == 0 for weight in self._weights):
            raise ValueError(
                f"all {len(self._weights)} weights of a blend are 0; give one of them a share"
            )
        nested = [inner for inner in self._inner if inner is not None]
        schedules = [weight for weight in self._weights if isinstance(weight, Schedule)]
        self._scheduled = np.flatnonzero([isinstance(w, Schedule) for w in self._weights])
        self._numbers = np.array([0.0 if isinstance(w, Schedule) else w for w in self._weights])
        self.num_leaves: int = len(entries) + sum(inner.num_leaves - 1 for inner in nested)
        self.is_constant: bool = not schedules and all(inner.is_constant for inner in nested)
        self._table = _ScheduleTable(schedules) if schedules else None
        self._is_nested = bool(nested)
        self.breaks: Float64Array = np.unique(
            [x for schedule in schedules for x, _ in schedule.points]
            + [x for inner in nested for x in inner.breaks.tolist()]
        ).astype(np.float64)

    @property
    def entries(self) -> list[Weight | tuple[Weight, Weights]]:
        """The weights of this level, with the `Weights` of each nested blend beside its own."""
        return [
            weight if inner is None else (weight, inner)
            for weight, inner in zip(self._weights, self._inner, strict=True)
        ]

    def at(self, draws: Int64Array | Float64Array) -> Float64Array:
        """Returns the shares at draws of the run.

        Args:
            draws: shape (N,).

        Returns:
            Shape (N, K); each row adds up to 1.

        Raises:
            ValueError: At one of the draws all leaves have weight 0; names the first.
        """
        shares, is_alive = self._at(draws)
        if not is_alive.all():
            draw = draws[int(np.argmin(is_alive))]
            raise ValueError(
                f"all weights of the blend are 0 at draw {draw:.15g}; let the schedule of at least"
                " one child be above 0 there"
            )
        return shares

    def constant(self) -> Float64Array:
        """Returns the shares, shape (K,), of weights that never change.

        Raises:
            ValueError: Some weight has a schedule.
        """
        if not self.is_constant:
            raise ValueError("the weights follow a schedule; ask for the shares at given draws")
        shares: Float64Array = self.at(np.zeros(1, dtype=np.int64))[0]
        return shares

    def next_draw(self, draw: int, leaves: BoolArray) -> int | None:
        """Returns a draw of the run, from `draw` on, before which some leaves have no share.

        Args:
            draw: where to begin.
            leaves: shape (K,); which leaves.

        Returns:
            The draw, or one shortly before that at which one of them has a share; None if they
            never have one again.
        """
        edges = np.append(float(draw), self.breaks[self.breaks > draw])
        # Between two points a share is above 0 at all draws or at none.
        middles = np.append((edges[:-1] + edges[1:]) / 2, edges[-1])
        is_above = [self._at(places)[0][:, leaves].any(axis=1) for places in (edges, middles)]
        found = np.flatnonzero(is_above[0] | is_above[1])
        return math.ceil(edges[found[0]]) if len(found) else None

    @cached_property
    def tree(self) -> tuple[Halving, ...]:
        """A Huffman tree over the leaves whose shares are above 0, of weights that never change."""
        shares = self.constant()
        return halvings(shares[shares > 0])

    def expected(self, num_draws: int) -> Float64Array:
        """Adds up the shares of the run's draws 0..num_draws-1; shape (K,).

        What is added up since the last call is only what is new. Between two points of the
        schedules shares are smooth: a long interval is integrated. The relative error is below
        1e-6, or a little more with hundreds of schedules that each have points of their own.

        Raises:
            ValueError: At one of these draws all leaves have weight 0.
        """
        if self.is_constant:
            return num_draws * self.constant()
        none = 0, np.zeros(self.num_leaves)
        start, total = found if (found := _added.get(self, none))[0] <= num_draws else none
        inside = np.ceil(self.breaks[(self.breaks > start) & (self.breaks < num_draws)])
        edges = np.unique([start, *np.minimum(inside, num_draws).tolist(), num_draws])
        most = max(_FEW_NODES, _MOST_CELLS // (self.num_leaves * len(edges)))
        pieces = [np.empty((2, 0))]
        for first, length in zip(edges.tolist(), np.diff(edges).tolist(), strict=False):
            if length <= most:
                pieces.append(np.array([first + np.arange(length), np.ones(int(length))]))
            else:  # the integral from the first to the last draw, and what it lacks at both ends
                nodes, weights = _legendre(min(most, _MANY_NODES) // _FEW_NODES * _FEW_NODES)
                last = length - 1
                places = np.array([0, 1, *(nodes + 1) / 2 * last, last - 1, last])
                parts = np.array([7, -1, *weights * 6 * last, -1, 7]) / 12  # Gregory's formula
                pieces.append(np.array([first + places, parts])[:, np.argsort(places)])
        draws, counts = np.concatenate(pieces, axis=1)
        for own, lines in self.blocks(draws):
            if lines is None:
                total = total + counts[own] @ self.at(draws[own])
            else:
                inverse = counts[own] / lines.total
                total = total + (lines.parts @ inverse) @ lines.ends
                total[lines.bent] += lines.values @ inverse
        _added[self] = num_draws, total
        return total

    def blocks(self, draws_N: Int64Array | Float64Array) -> Iterator[tuple[slice, Lines | None]]:
        """Yields blocks of draws that rise, and what is linear there; None for nothing.

        Raises:
            ValueError: At one of the draws all leaves have weight 0.
        """
        table, k, num = self._table, self.num_leaves, len(draws_N)
        rows = np.arange(k)  # schedules that are not linear here
        if table is not None and not self._is_nested and num > 2 and k * num > _MANY_CELLS:
            rows = table.bent(draws_N)
        is_linear = 2 * len(rows) < k
        if num > max(1, _MOST_BENT // (len(rows) + 1) if is_linear else _MOST_CELLS // k):
            for first, stop in ((0, num // 2), (num // 2, num)):
                for own, lines in self.blocks(draws_N[first:stop]):
                    yield slice(first + own.start, first + own.stop), lines
        elif table is None or not is_linear:
            yield slice(0, num), None
        else:
            part = (draws_N - draws_N[0]) / (draws_N[-1] - draws_N[0])
            parts, bent = np.stack([1 - part, part]), self._scheduled[rows]
            ends, values = np.stack([self._numbers, self._numbers]), table.at(draws_N, rows)
            ends[:, self._scheduled] = [table.at(draws_N[[n]])[:, 0] for n in (0, -1)]
            ends[:, bent] = 0
            total = ends.sum(axis=1) @ parts + values.sum(axis=0)
            self.at(draws_N[total == 0])  # raises if there is one
            yield slice(0, num), Lines(ends, parts, bent, values, total)

    def _at(self, draws: Int64Array | Float64Array) -> tuple[Float64Array, BoolArray]:
        """Returns shares (N, K), rows of 0 where all is 0; and which rows are not, shape (N,)."""
        own = np.tile(self._numbers, (len(draws), 1))
        if self._table is not None:
            own[:, self._scheduled] = self._table.at(draws).T
        inner_shares: dict[int, Float64Array] = {}
        for number, inner in enumerate(self._inner):
            if inner is not None:
                inner_shares[number], inner_alive = inner._at(draws)
                own[:, number] *= inner_alive
        # Not np.sum, whose order of adding depends on the machine.
        totals = np.add.accumulate(own, axis=1)[:, -1]
        is_alive = totals > 0
        own /= np.where(is_alive, totals, 1.0)[:, None]
        if not inner_shares:
            return own, is_alive
        columns = [own[:, [n]] * inner_shares.get(n, 1.0) for n in range(own.shape[1])]
        return np.concatenate(columns, axis=1), is_alive


# What `Weights.expected` returned last, and of how many draws.
_added: WeakKeyDictionary[Weights, tuple[int, Float64Array]] = WeakKeyDictionary()


class _ScheduleTable:
    """M schedules, worked out side by side.

    Most blocks of draws lie between two points of each schedule, where a thousand of them cost as
    little as one.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        kinds = np.array([[schedule.kind] for schedule in schedules])
        self._is_cosine, self._is_step = kinds[:, 0] == "cosine", kinds == "step"
        self._last = np.array([[len(schedule.points) - 1] for schedule in schedules])
        # Shape (P, M), P points each; columns with fewer end in points never reached.
        self._x = np.full((int(self._last.max()) + 1, len(schedules)), np.inf)
        self._y = np.zeros_like(self._x)
        for row, schedule in enumerate(schedules):
            points = np.array(schedule.points, dtype=np.float64)
            self._x[: len(points), row], self._y[: len(points), row] = points.T

    def at(self, draws: Int64Array | Float64Array, rows: Any = slice(None)) -> Float64Array:
        """Returns the values at `draws`, shape (N,), of all or some schedules; shape (M, N)."""
        x, rows = self._x[:, rows], np.arange(len(self._last))[rows]
        if not len(draws):
            return np.empty((len(rows), 0))
        first, last = (np.count_nonzero(x <= at, axis=0) for at in (draws.min(), draws.max()))
        values = self._between(rows, first[:, None], draws)
        bent = np.flatnonzero(first != last)
        if len(bent):
            passed = [np.searchsorted(x[:, row], draws, side="right") for row in bent]
            values[bent] = self._between(rows[bent], np.array(passed), draws)
        return values

    def bent(self, draws: Int64Array | Float64Array) -> Int64Array:
        """Returns which schedules may not be linear between the first and the last of the draws."""
        is_passed = (self._x > draws[0]) & (self._x <= draws[-1])
        return np.flatnonzero(self._is_cosine | is_passed.any(axis=0))

    def _between(
        self, rows: Int64Array, passed: Int64Array, draws: Int64Array | Float64Array
    ) -> Float64Array:
        """Returns the values of some schedules, by how many of their points draws have passed."""
        rows, last = rows[:, None], self._last[rows]
        left, right = np.maximum(passed - 1, 0), np.minimum(passed, last)
        start, y_left, y_right = self._x[left, rows], self._y[left, rows], self._y[right, rows]
        # Before the first point and after the last one both neighbours are the same.
        width = self._x[right, rows] - start
        is_flat, is_cosine = self._is_step[rows[:, 0]] | (width == 0), self._is_cosine[rows[:, 0]]
        fraction = (draws - start) / np.where(is_flat, np.inf, width)
        if is_cosine.any():
            fraction[is_cosine] = _half_wave(fraction[is_cosine])
        values: Float64Array = y_left * (1.0 - fraction) + y_right * fraction
        return values


def _checked_weight(weight: Weight, number: int) -> Weight:
    """Returns a weight, as a number if its schedule never changes it."""
    if isinstance(weight, Schedule):
        values = {y for _, y in weight.points}
        return weight if len(values) > 1 else float(values.pop())
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(
            f"weight {weight} of entry {number} of a blend must be finite and at least 0"
        )
    return float(weight)


def _half_wave(fraction: Float64Array) -> Float64Array:
    """Computes (1 - cos(pi * f)) / 2 = (1 + sin(pi * (f - 1/2))) / 2 for f in 0..1.

    From products and sums only: `np.cos` returns other last bits on other processors.
    """
    x = fraction - 0.5
    square = x * x
    value = np.full_like(x, _SIN_PI[-1])
    for coefficient in _SIN_PI[-2::-1]:
        value = value * square + coefficient
    # Rounding must not lead out of 0..1, or a weight could become negative.
    wave: Float64Array = np.clip(0.5 + 0.5 * value * x, 0.0, 1.0)
    return wave
