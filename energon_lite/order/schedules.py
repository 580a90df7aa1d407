"""Weights of the sources of a blend: constants and schedules, levels within levels -> shares.

A share is what a draw of the run belongs to a leaf with: the product, level by level, of a weight
over the sum of the weights beside it. Sums are taken in a fixed order and curves from sums and
products alone, so that every machine finds the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np

from energon_lite.core.arrays import BoolArray, Float64Array, Int64Array
from energon_lite.order.halving import Halving, halvings

KINDS = ("linear", "step", "cosine")

# sin(pi * x) = sum of c_k * x**(2k + 1); for |x| <= 1/2 the first omitted term is below 1e-18.
_SIN_PI = tuple((-1) ** k * math.pi ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(12))

# `Weights.expected` works out about this number of shares, and a long interval at so few draws.
_MOST_CELLS = 1 << 19
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
        self._is_scheduled = [isinstance(weight, Schedule) for weight in self._weights]
        self._numbers = np.array([0.0 if isinstance(w, Schedule) else w for w in self._weights])
        self.num_leaves: int = len(entries) + sum(inner.num_leaves - 1 for inner in nested)
        self.is_constant: bool = not schedules and all(inner.is_constant for inner in nested)
        self._table = _ScheduleTable(schedules) if schedules else None
        # What `expected` returned last, and of how many draws.
        self._added: tuple[int, Float64Array] = 0, np.zeros(self.num_leaves)
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
        start, total = (
            self._added if self._added[0] <= num_draws else (0, np.zeros(self.num_leaves))
        )
        inside = np.ceil(self.breaks[(self.breaks > start) & (self.breaks < num_draws)])
        edges = np.unique([start, *np.minimum(inside, num_draws).tolist(), num_draws]).astype(int)
        most = max(_FEW_NODES, _MOST_CELLS // (self.num_leaves * len(edges)))
        for first, length in zip(edges.tolist(), np.diff(edges).tolist(), strict=False):
            if length <= most:
                places, weights = np.arange(length), np.ones(length)
            else:  # the integral from the first to the last draw, and half of each of these
                nodes, parts = _legendre(min(most, _MANY_NODES) // _FEW_NODES * _FEW_NODES)
                places = np.array([0, *(nodes + 1) / 2, 1]) * (length - 1)
                weights = np.array([0.5, *parts * (length - 1) / 2, 0.5])
            total = total + weights @ self.at(first + places)
        self._added = num_draws, total
        return total

    def line(self, first: int, last: int) -> tuple[Float64Array, float] | None:
        """Returns the weights at two draws between which they change linearly, not divided.

        Args:
            first: a draw.
            last: a later one, no point of a schedule between them.

        Returns:
            Shape (2, K), and the largest weight at any draw; None if the weights are nested, or one
            follows a cosine.
        """
        table = self._table
        if table is None or any(self._inner) or table.has_cosine:
            return None
        ends = np.array([self._numbers, self._numbers])
        ends[:, self._is_scheduled] = table.at(np.array([first, last])).T
        return ends, max(float(self._numbers.max()), table.largest)

    def _at(self, draws: Int64Array | Float64Array) -> tuple[Float64Array, BoolArray]:
        """Returns shares (N, K), rows of 0 where all is 0; and which rows are not, shape (N,)."""
        own = np.empty((len(draws), len(self._weights)))
        own[:] = self._numbers
        if self._table is not None:
            own[:, self._is_scheduled] = self._table.at(draws).T
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
        columns = [
            own[:, [number]] * inner_shares.get(number, 1.0) for number in range(own.shape[1])
        ]
        return np.concatenate(columns, axis=1), is_alive


class _ScheduleTable:
    """M schedules, worked out side by side.

    Most blocks of draws lie between two points of each schedule, where a thousand of them cost as
    little as one.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        kinds = np.array([[schedule.kind] for schedule in schedules])
        self._is_cosine, self._is_step = kinds[:, 0] == "cosine", kinds == "step"
        self._last = np.array([[len(schedule.points) - 1] for schedule in schedules])
        # Shape (M, P), P points each; rows with fewer end in points never reached.
        self._x = np.full((len(schedules), int(self._last.max()) + 1), np.inf)
        self._y = np.zeros_like(self._x)
        for row, schedule in enumerate(schedules):
            points = np.array(schedule.points, dtype=np.float64)
            self._x[row, : len(points)], self._y[row, : len(points)] = points.T
        self.has_cosine, self.largest = bool(self._is_cosine.any()), float(self._y.max())

    def at(self, draws: Int64Array | Float64Array) -> Float64Array:
        """Returns the values at `draws`, shape (N,); shape (M, N)."""
        if not len(draws):
            return np.empty((len(self._x), 0))
        first, last = (np.count_nonzero(self._x <= x, axis=1) for x in (draws.min(), draws.max()))
        values = self._between(np.arange(len(first)), first[:, None], draws)
        rows = np.flatnonzero(first != last)
        if len(rows):
            passed = [np.searchsorted(self._x[row], draws, side="right") for row in rows]
            values[rows] = self._between(rows, np.array(passed), draws)
        return values

    def _between(
        self, rows: Int64Array, passed: Int64Array, draws: Int64Array | Float64Array
    ) -> Float64Array:
        """Returns the values of some schedules, by how many of their points draws have passed."""
        rows, last = rows[:, None], self._last[rows]
        left, right = np.maximum(passed - 1, 0), np.minimum(passed, last)
        start, y_left, y_right = self._x[rows, left], self._y[rows, left], self._y[rows, right]
        # Before the first point and after the last one both neighbours are the same.
        width = self._x[rows, right] - start
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
