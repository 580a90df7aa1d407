"""Draws docs/images/balance.svg: how long ranks wait for the slowest, in several orders of packs.

    python examples/draw_balance.py DATA --lengths NAME --capacity 32768 [--out FILE]

DATA is a folder or a metadataset with a length index (`energon-lite lengths`). Above are the first
steps: filled is the mean of the ranks, light is what the ranks wait for the slowest. Below are the
shares of time that ranks wait in each step, and the load of the least loaded rank up to the
slowest; the areas under the left curves and above the right curves are the imbalance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt
from drawing import COLOURS, IMAGES, box, line, text, write_picture

from energon_lite.extras.inspect.forecast import BalanceReport, BalanceRow, balance_report

Float64Array = npt.NDArray[np.float64]

WIDTH, HEIGHT, LEFT = 990, 564, 56.0
STEPS_SHOWN, POINTS_OF_CURVE = 40, 200
FAINT = "#6b7280"


@dataclass
class Panel:
    """A rectangle with axes, in pixels; its bottom is the value 0, its top is `highest`."""

    left: float
    top: float
    width: float
    height: float
    highest: float

    def y(self, value: float) -> float:
        """Returns the pixel of a value."""
        return self.top + self.height * (1 - value / self.highest)

    def axes(self, ticks: Sequence[float], form: str, below: tuple[str, str, str]) -> Iterator[str]:
        """Draws a line at each tick, and writes the ends and the name of the horizontal axis."""
        right = self.left + self.width
        for tick in ticks:
            yield line([(self.left, self.y(tick)), (right, self.y(tick))], "#ddd", 1)
            number = format(tick, form)
            yield text(self.left - 5, self.y(tick) + 4, number, anchor="end", colour=FAINT)
        places = ((self.left, "start"), ((self.left + right) / 2, "middle"), (right, "end"))
        for (x, anchor), content in zip(places, below, strict=True):
            yield text(x, self.y(0) + 16, content, anchor=anchor, colour=FAINT)

    def bars(self, costs_SK: Float64Array, colour: str) -> Iterator[str]:
        """Draws the mean of the ranks at each step, and lightly the slowest rank."""
        each = self.width / STEPS_SHOWN
        for step, costs_K in enumerate(costs_SK):
            for value, fill in ((costs_K.max(), f"{colour}4d"), (costs_K.mean(), colour)):
                y = self.y(float(value))
                yield box(self.left + step * each, y, 0.8 * each, self.y(0) - y, fill)

    def curve(self, values: Float64Array, colour: str) -> str:
        """Draws values, each of which has an equal part of the width."""
        chosen = np.unique(np.linspace(0, len(values) - 1, POINTS_OF_CURVE).round().astype(int))
        x = self.left + self.width * (chosen + 0.5) / len(values)
        return line([(a, self.y(b)) for a, b in zip(x, values[chosen], strict=True)], colour, 2)


def loads(row: BalanceRow) -> Float64Array:
    """Returns the work of each rank as a share of the slowest rank's, shape (S, K), ascending."""
    sorted_SK = np.sort(row.costs, axis=1)
    slowest_S1 = sorted_SK[:, -1:]
    return np.divide(sorted_SK, slowest_S1, out=np.ones_like(sorted_SK), where=slowest_S1 > 0)


def ticks_up_to(highest: float) -> list[float]:
    """Returns three to six round values from 0 to `highest` or a little above."""
    if not highest > 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(highest))
    step = next(power * size for size in (0.1, 0.2, 0.25, 0.5, 1, 2) if highest <= 5 * power * size)
    return [round(number * step, 12) for number in range(math.ceil(highest / step - 1e-9) + 1)]


def steps_row(report: BalanceReport) -> Iterator[str]:
    """Draws the first steps of each order; the packs have one scale."""
    unit = float(report.rows[1].costs.mean()) or 1.0
    shown = [row.costs[:STEPS_SHOWN] / unit for row in report.rows]
    scales = [ticks_up_to(float(costs.max())) for costs in (shown[0], np.stack(shown[1:]))]
    width = (WIDTH - LEFT - 24 - 40 * (len(shown) - 1)) / len(shown)
    for number, (row, costs_SK) in enumerate(zip(report.rows, shown, strict=True)):
        ticks = scales[min(number, 1)]
        panel = Panel(LEFT + number * (width + 40), 128, width, 150, ticks[-1])
        yield box(panel.left, 70, 10, 10, COLOURS[number])
        yield text(panel.left + 16, 79, row.name, weight="bold")
        yield text(panel.left, 97, f"{row.idle:.2%} of the time waiting")
        yield text(panel.left, 113, f"{1 - row.full:.2%} padding")
        yield from panel.axes(ticks, "g", ("1", "step", f"{STEPS_SHOWN}"))
        yield from panel.bars(costs_SK, COLOURS[number])


def curves_row(report: BalanceReport) -> Iterator[str]:
    """Draws the waits of all steps, and the load of all ranks."""
    loads_of_rows = [loads(row) for row in report.rows]
    waits = [np.sort(1 - loads_SK.mean(axis=1))[::-1] for loads_SK in loads_of_rows]
    ticks = ticks_up_to(max(float(waits_S[0]) for waits_S in waits))
    left = Panel(LEFT, 360, 430, 160, ticks[-1])
    right = Panel(LEFT + 490, 360, 290, 160, 1)
    yield text(24, 326, "Time that ranks wait in a step", weight="bold")
    yield text(24, 343, "share of all ranks' time; its mean is the imbalance", colour=FAINT)
    yield from left.axes(ticks, ".0%", ("longest", f"{report.steps:,} steps", "shortest"))
    yield text(right.left - 32, 326, "Load of the ranks", weight="bold")
    note = "share of the slowest rank's work, mean over steps"
    yield text(right.left - 32, 343, note, colour=FAINT)
    below = ("least loaded", f"{report.ranks:,} ranks", "slowest")
    yield from right.axes([0, 0.25, 0.5, 0.75, 1], ".0%", below)
    x = right.left + right.width + 22
    yield text(x, 353, "imbalance", colour=FAINT)
    for number, row in enumerate(report.rows):
        yield left.curve(waits[number], COLOURS[number])
        yield right.curve(loads_of_rows[number].mean(axis=0), COLOURS[number])
        yield box(x, 370 + 20 * number, 10, 10, COLOURS[number])
        yield text(x + 16, 379 + 20 * number, f"{row.imbalance:.4f}")


def draw(report: BalanceReport) -> Iterator[str]:
    """Draws a report."""
    title = f"{report.path}: {report.ranks:,} ranks, {report.steps:,} steps, {report.samples:,} "
    yield text(
        24, 26, escape(f"{title}samples, packs of {report.capacity:,} tokens"), weight="bold"
    )
    note = "Cost of a step, mean pack = 1. Padded batches have a scale of their own."
    yield text(24, 50, note, colour=FAINT)
    yield from steps_row(report)
    yield from curves_row(report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws what `energon-lite balance` reports.")
    parser.add_argument("data")
    parser.add_argument("--lengths", default="default")
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--out", type=Path, default=IMAGES / "balance.svg")
    args = vars(parser.parse_args())
    file = args.pop("out")
    write_picture(file, WIDTH, HEIGHT, draw(balance_report(args.pop("data"), **args)))
