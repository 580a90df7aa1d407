"""Measures what packs cost, and how evenly steps load the ranks.

Axes: S steps, K ranks. A rank without a pack in some step has a cost of 0
there; see `StepPlan.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from energon_lite.batching.costs import CostModel, as_costs
from energon_lite.core.arrays import Float64Array

_TERMS = ("tokens", "sum of squares", "tiles")
# What of a column the others do not explain, squared. Below, times that are wrong by a per cent
# make coefficients that are wrong by themselves.
_MIN_OWN_SHARE = 1e-4
# A difference of squared errors that is one of rounding only.
_ROUNDING = 1e-12


def fit_cost_model(points: Iterable[tuple[Sequence[float], float]]) -> CostModel:
    """Finds the coefficients that explain measured times, none of them negative.

    Takes the smallest sum of squared relative errors. As many points as there are terms are hit
    exactly, if coefficients of at least 0 can. A term that is 0 in all points gets coefficient 0.

    Args:
        points: two or more `((tokens, sum of squares, tiles), seconds)`: the sums of a pack, and
            the time of a step with it. Unlike ones: many short samples, one long one, many tiles.

    Returns:
        The model, in seconds.

    Raises:
        ValueError: A number is negative or not finite, a time is 0, there are fewer points than
            terms, or the points are too similar to distinguish the terms.

    Example:
        >>> points = [((8192, 8 * 1024**2, 0), 0.5), ((8192, 8192**2, 0), 0.92)]
        >>> model = fit_cost_model(points)
        >>> round(model.token * 8192, 3), round(model.token_squared * 8192**2, 3)
        (0.44, 0.48)

    Source: C. Lawson, R. Hanson, "Solving least squares problems" (1974), chapter 23, here by
    trying all sets of terms: three terms have seven.
    """
    rows = np.array([_per_second(index, *point) for index, point in enumerate(points)])
    rows = rows.reshape(-1, len(_TERMS))
    used = [c for c in range(len(_TERMS)) if rows[:, c].any()]
    if len(rows) < max(len(used), 2):
        raise ValueError(
            f"{len(rows)} points for {len(used)} terms ({_named(used)}). Measure at least "
            f"{max(len(used), 2)} packs, or give 0 for a term in all points."
        )
    if not used:
        raise ValueError(f"All {len(rows)} points have no tokens and no tiles; nothing costs time.")
    scales = np.linalg.norm(rows, axis=0)
    unit = rows / np.where(scales > 0, scales, 1)  # columns of length 1
    best: Float64Array = np.zeros(len(_TERMS))
    least = math.inf
    for columns in (list(c) for n in range(len(used)) for c in combinations(used, n + 1)):
        solved = np.zeros(len(_TERMS))
        solved[columns] = np.linalg.lstsq(unit[:, columns], np.ones(len(rows)), rcond=None)[0]
        error = float(((unit @ solved - 1) ** 2).sum())
        if solved.min() >= 0 and error < least - _ROUNDING:
            best, least = solved / np.where(scales > 0, scales, 1), error
    for column in used:
        others = [c for c in used if c != column]
        shares = np.linalg.lstsq(unit[:, others], unit[:, column], rcond=None)[0]
        if others and ((unit[:, others] @ shares - unit[:, column]) ** 2).sum() <= _MIN_OWN_SHARE:
            raise ValueError(
                f"The points do not separate the {_TERMS[column]} from the {_named(others)}: in "
                "all of them they are, nearly, in the same ratio. Measure different packs: many "
                "short samples, one long sample, many tiles; or give 0 for that term everywhere."
            )
    return CostModel(*best.tolist())


def _per_second(index: int, terms: Sequence[float], seconds: float) -> list[float]:
    """Returns the terms of a point over its time."""
    if len(terms) != len(_TERMS):
        raise ValueError(f"Point {index} has {len(terms)} terms; give {', '.join(_TERMS)}.")
    for name, value in (*zip(_TERMS, terms, strict=True), ("time", seconds)):
        if not 0 <= value < math.inf or (value == 0 and name == "time"):
            least = "above" if name == "time" else "at least"
            raise ValueError(f"Point {index}: {name} is {value}; it must be {least} 0, finite.")
    return [float(term) / float(seconds) for term in terms]


def _named(columns: Sequence[int]) -> str:
    return " and the ".join(_TERMS[c] for c in columns)


def imbalance(costs_SK: npt.ArrayLike) -> float:
    """Returns the mean over steps of 1 - mean / largest cost of the ranks: OmniBal's "dist ratio".

    Every step counts as much as the others; `idle_share` counts long ones for more.

    Args:
        costs_SK: shape (S, K), any cost: seconds, tokens, tiles.

    Returns:
        0 if all ranks have the same in each step, or if there is no step; below 1. A step without
        any cost counts as 0.

    Raises:
        TypeError: Not numbers.
        ValueError: The shape is another one, or a cost is negative or not finite.

    Example:
        >>> imbalance([[4, 4], [1, 3]])  # 0 and 1 - 2 / 3
        0.16666666666666669

    Source: Y. Yao et al., "OmniBal", ICML 2025.
    """
    costs_SK, largest_S = _with_largest(costs_SK)
    used_S = largest_S > 0
    if not used_S.any():
        return 0.0
    means_S = costs_SK[used_S].mean(axis=1)
    return float((1 - means_S / largest_S[used_S]).sum() / len(largest_S))


def idle_share(costs_SK: npt.ArrayLike) -> float:
    """Returns the share of all ranks' time in which they wait for the slowest of the step.

    Args:
        costs_SK: shape (S, K), in units of time.

    Returns:
        0 if none waits, or if nothing costs time; below 1.

    Raises:
        TypeError: Not numbers.
        ValueError: The shape is another one, or a cost is negative or not finite.

    Example:
        >>> idle_share([[4, 4], [1, 3]])  # 2 of 14
        0.1428571428571429
    """
    costs_SK, largest_S = _with_largest(costs_SK)
    available = float(largest_S.sum()) * costs_SK.shape[1]
    return 1 - float(costs_SK.sum()) / available if available else 0.0


def _with_largest(costs: npt.ArrayLike) -> tuple[Float64Array, Float64Array]:
    """The costs, and the largest of each step."""
    costs_SK = as_costs(costs, "step", "rank")
    if costs_SK.shape[1] == 0:
        raise ValueError(f"costs have shape {costs_SK.shape}, without a rank.")
    return costs_SK, costs_SK.max(axis=1)
