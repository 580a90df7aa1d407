"""The report of waiting ranks as a picture: an SVG that light and dark pages can show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from energon_lite.core.arrays import Float64Array
from energon_lite.inspect.balance import BalanceReport, BalanceRow
from energon_lite.inspect.text import counted

# Colours of the ways, on a light page and on a dark one.
_COLOURS = (
    ("#a23b72", "#e07bb0"), ("#d9822b", "#eda45c"), ("#2563a8", "#6ea8e8"), ("#3b8f5a", "#6cc48c"),
)  # fmt: skip
_GREYS = {"page": ("#ffffff", "#16191d"), "text": ("#333333", "#d8dde3"),
          "faint": ("#6b7280", "#9aa4b0"), "grid": ("#dddddd", "#363c44")}  # fmt: skip

_WIDTH, _HEIGHT, _MARGIN, _GAP = 990.0, 564.0, 24.0, 40.0
_LEFT = _MARGIN + 32
_BOTTOM_ROW, _BOTTOM_HEIGHT = 360.0, 160.0
_STEPS_SHOWN = 40
_POINTS_OF_CURVE = 200
_LONGEST_PATH = 70
_STEPS_NOTE = (
    "Cost of a step, mean pack = 1: filled is the mean of the ranks, light until the slowest is "
    "done. Padded batches have a scale of their own."
)


class _Panel:
    """A rectangle with axes, and what is drawn in it.

    Args:
        left, top, width, height: where its axes are, in pixels.
        highest: value at its top; at its bottom is 0.
    """

    def __init__(
        self, left: float, top: float, width: float, height: float, highest: float
    ) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.highest = highest
        self.bottom = top + height

    def y(self, value: float) -> float:
        """Returns the pixel of a value."""
        return self.bottom - self.height * value / self.highest

    def grid(self, ticks: Sequence[float], form: str = "g") -> Iterator[str]:
        """Draws a line at each value, and its number left of it."""
        for tick in ticks:
            y = self.y(tick)
            yield _line([(self.left, y), (self.left + self.width, y)], "grid")
            yield _text(self.left - 5, y + 4, format(tick, form), "faint", anchor="end")

    def below(self, first: str, axis: str, last: str) -> Iterator[str]:
        """Writes what the horizontal axis is, between its ends."""
        y = self.bottom + 16
        yield _text(self.left, y, first, "faint")
        yield _text(self.left + self.width / 2, y, axis, "faint", anchor="middle")
        yield _text(self.left + self.width, y, last, "faint", anchor="end")

    def curve(self, values: Float64Array, colour: str) -> str:
        """Draws values, of which each has an equal share of the width."""
        count = len(values)
        # Both ends of each value: a single one is a line, too.
        x = np.repeat(np.arange(count + 1), 2)[1:-1] / count
        y = np.repeat(values, 2)
        if count > _POINTS_OF_CURVE:
            x, y = (np.arange(count) + 0.5) / count, values
            chosen = np.linspace(0, count - 1, _POINTS_OF_CURVE).round().astype(int)
            x, y = x[chosen], y[chosen]
        places = [(self.left + self.width * a, self.y(b)) for a, b in zip(x, y, strict=True)]
        return _line(places, colour, 2)


def balance_svg(report: BalanceReport) -> str:
    """Draws a report: the first steps of each way, and how long ranks wait in all of them.

    Above, a bar for each step and way: the mean of the ranks is work, from there to the slowest
    they wait. Below, the share that they wait in each step, and what ranks have of the slowest's
    work; the areas below the one curve and above the other are the imbalance.

    Args:
        report: of `balance_report`.

    Returns:
        The text of an SVG file.
    """
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH:g} {_HEIGHT:g}' "
        "font-size='12' font-family='Helvetica, Arial, sans-serif' role='img'>",
        f"<title>{escape(_title(report))}</title>",
        f"<style>{_style()}</style>",
        _box(0, 0, _WIDTH, _HEIGHT, "page"),
        _text(_MARGIN, 26, _title(report), "text", weight="bold"),
        *_step_panels(report),
        *_wait_panel(report),
        *_rank_panel(report),
        "</svg>\n",
    ]
    return "\n".join(parts)


def waits(row: BalanceRow) -> Float64Array:
    """Returns the share of the ranks' time they wait, for each step; its mean is `imbalance`.

    Args:
        row: one way, of S steps.

    Returns:
        Shape (S,), 0..1; 0 for a step without any cost.
    """
    largest_S = row.costs.max(axis=1)
    means_S = row.costs.mean(axis=1)
    shares_S = np.divide(means_S, largest_S, out=np.ones_like(means_S), where=largest_S > 0)
    return np.asarray(1 - shares_S)


def loads(row: BalanceRow) -> Float64Array:
    """Returns the load of the least loaded rank up to the slowest, as shares of the slowest's.

    Args:
        row: one way, for K ranks.

    Returns:
        Shape (K,), rising to 1: the means over steps; 1 - their mean is `imbalance`.
    """
    sorted_SK = np.sort(row.costs, axis=1)
    largest_S1 = sorted_SK[:, -1:]
    # A step without any cost keeps nobody waiting.
    shares_SK = np.divide(sorted_SK, largest_S1, out=np.ones_like(sorted_SK), where=largest_S1 > 0)
    return np.asarray(shares_SK.mean(axis=0) if len(shares_SK) else shares_SK.sum(axis=0) + 1)


# ----------------------------------------------------------------------------------------- panels


def _step_panels(report: BalanceReport) -> Iterator[str]:
    """Draws the first steps of each way side by side; the packs have one scale."""
    unit = _unit(report)
    shown = [row.costs[:_STEPS_SHOWN] / unit for row in report.rows]
    num_steps = max(1, *map(len, shown))
    scales = _scales(report, shown)
    width = (_WIDTH - _MARGIN - _LEFT - _GAP * (len(shown) - 1)) / len(shown)
    yield _text(_MARGIN, 50, _STEPS_NOTE, "faint")
    for number, (row, costs_SK) in enumerate(zip(report.rows, shown, strict=True)):
        panel = _Panel(_LEFT + number * (width + _GAP), 128, width, 150, scales[number][-1])
        yield _box(panel.left, 70, 10, 10, f"way{number}")
        yield _text(panel.left + 16, 79, row.name, "text", weight="bold")
        yield _text(panel.left, 97, f"{row.idle:.2%} of the time waiting", "text")
        yield _text(panel.left, 113, f"{1 - row.full:.2%} padding", "text")
        yield from panel.grid(scales[number])
        yield from _bars(panel, costs_SK, num_steps, f"way{number}")
        yield from panel.below("1", "step", f"{num_steps}")


def _scales(report: BalanceReport, shown: Sequence[Float64Array]) -> list[list[float]]:
    """Returns the ticks of each way: padded batches may cost many times as much as packs."""
    highest: dict[bool, float] = {}
    are_packs = [row.name.startswith("packs") for row in report.rows]
    for is_pack, costs in zip(are_packs, shown, strict=True):
        highest[is_pack] = max(highest.get(is_pack, 0), float(costs.max(initial=0)))
    return [_ticks(highest[is_pack]) for is_pack in are_packs]


def _bars(panel: _Panel, costs_SK: Float64Array, num_steps: int, colour: str) -> Iterator[str]:
    each = panel.width / num_steps
    thick = max(each - 1.2, 0.6 * each)
    for step, costs_K in enumerate(costs_SK):
        x = panel.left + step * each + (each - thick) / 2
        mean, largest = float(costs_K.mean()), float(costs_K.max())
        yield _box(x, panel.y(largest), thick, panel.y(0) - panel.y(largest), colour, opacity=0.3)
        yield _box(x, panel.y(mean), thick, panel.y(0) - panel.y(mean), colour)


def _wait_panel(report: BalanceReport) -> Iterator[str]:
    ticks = _ticks(max(float(waits(row).max(initial=0)) for row in report.rows), most=1)
    panel = _Panel(_LEFT, _BOTTOM_ROW, 430, _BOTTOM_HEIGHT, ticks[-1])
    yield _text(_MARGIN, _BOTTOM_ROW - 34, "Time that ranks wait in a step", "text", weight="bold")
    note = "share of all ranks' time; its mean is the imbalance"
    yield _text(_MARGIN, _BOTTOM_ROW - 17, note, "faint")
    yield from panel.grid(ticks, _percent(ticks))
    for number, row in enumerate(report.rows):
        if len(row.costs):
            yield panel.curve(np.sort(waits(row))[::-1], f"way{number}")
    yield from panel.below("longest", f"{counted(report.steps, 'step')}, by that time", "shortest")


def _rank_panel(report: BalanceReport) -> Iterator[str]:
    panel = _Panel(_LEFT + 490, _BOTTOM_ROW, 290, _BOTTOM_HEIGHT, 1)
    left = panel.left - 32
    yield _text(left, _BOTTOM_ROW - 34, "Load of the ranks", "text", weight="bold")
    note = "share of the slowest's work, mean over steps"
    yield _text(left, _BOTTOM_ROW - 17, note, "faint")
    yield from panel.grid([0, 0.25, 0.5, 0.75, 1], ".0%")
    for number, row in enumerate(report.rows):
        yield panel.curve(loads(row), f"way{number}")
    yield from panel.below("least loaded", counted(report.ranks, "rank"), "slowest")
    x = panel.left + panel.width + 22
    yield _text(x, _BOTTOM_ROW - 7, "imbalance", "faint")
    for number, row in enumerate(report.rows):
        y = _BOTTOM_ROW + 10 + 20 * number
        yield _box(x, y, 10, 10, f"way{number}")
        yield _text(x + 16, y + 9, f"{row.imbalance:.4f}", "text")


def _title(report: BalanceReport) -> str:
    path = report.path
    if len(path) > _LONGEST_PATH:
        path = "…" + path[-_LONGEST_PATH:]
    sizes = {"rank": report.ranks, "step": report.steps, "sample": report.samples}
    counts = ", ".join(counted(size, what) for what, size in sizes.items())
    return f"{path}: {counts}, packs of {counted(report.capacity, 'token')}"


def _unit(report: BalanceReport) -> float:
    """Returns the mean cost of a pack."""
    tables = [row.costs for row in report.rows if row.name.startswith("packs") and row.costs.size]
    return float(tables[0].mean()) or 1.0 if tables else 1.0


def _ticks(highest: float, most: float = math.inf) -> list[float]:
    """Returns three to six round values from 0 to `highest` or a little above."""
    if not highest > 0:
        return [0, min(1.0, most)]
    power = 10 ** math.floor(math.log10(highest))
    step = next(power * size for size in (0.1, 0.2, 0.25, 0.5, 1, 2) if highest <= 5 * power * size)
    count = math.ceil(highest / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(count + 1)]


def _percent(ticks: Sequence[float]) -> str:
    """Returns the form of shares with as many digits as their steps need."""
    digits = next(n for n in range(12) if round(ticks[1], n + 2) == ticks[1] or n == 11)
    return f".{digits}%"


# --------------------------------------------------------------------------------------- elements


def _style() -> str:
    """Returns the colours of a dark page; those of a light one are on the elements."""
    dark = {name: pair[1] for name, pair in _GREYS.items()}
    dark |= {f"way{number}": pair[1] for number, pair in enumerate(_COLOURS)}
    rules = [
        f".{name}{{fill:{colour}}}.{name}-line{{stroke:{colour}}}" for name, colour in dark.items()
    ]
    return "@media (prefers-color-scheme: dark) {" + "".join(rules) + "}"


def _light(name: str) -> str:
    return _GREYS[name][0] if name in _GREYS else _COLOURS[int(name.removeprefix("way"))][0]


def _text(
    x: float, y: float, content: str, colour: str, *, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' class='{colour}' "
        f"fill='{_light(colour)}' font-weight='{weight}'>{escape(content)}</text>"
    )


def _box(
    x: float, y: float, width: float, height: float, colour: str, *, opacity: float = 1
) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' "
        f"class='{colour}' fill='{_light(colour)}' fill-opacity='{opacity:g}'/>"
    )


def _line(places: Sequence[tuple[float, float]], colour: str, width: float = 1) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return (
        f"<polyline points='{points}' class='{colour}-line' fill='none' "
        f"stroke='{_light(colour)}' stroke-width='{width:g}'/>"
    )
