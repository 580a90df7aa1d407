"""Draws docs/images/blending.svg: what two metadatasets give, and what they ask.

    python examples/draw_blend.py [FILE]

Needs no data: which source a draw takes is a function of the weights, the seed and the number of
the draw. Left, the deviation from metadatasets/blend.yaml over 100,000 draws; right, how the shares
of metadatasets/curriculum.yaml change over 2,000 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from drawing import COLOURS, IMAGES, line, text, write_picture

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.metadataset.nodes import Blend
from energon_lite.metadataset.read import read_metadataset
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Weights

REPO = Path(__file__).resolve().parents[1]

NUM_STREAMS = 8
NUM_DRAWS = 100_000
NUM_STEPS, SAMPLES_PER_STEP = 2_000, 512


def read(name: str) -> tuple[list[str], Weights]:
    """Returns the names and the weights of an example in metadatasets/."""
    node = read_metadataset(REPO / "metadatasets" / name, "train")
    assert isinstance(node, Blend)
    names = [member.node.name or Path(member.node.written).name for member in node.members]
    return names, Weights([member.weight for member in node.members])


def draws_of_run(weights: Weights, mode: str, num_draws: int) -> npt.NDArray[np.int64]:
    """Returns which source each draw of the run takes; draw t * S + s is draw t of stream s."""
    key = key_of("picture")
    streams = [
        BlendOrder(weights, mode, key, Stream(s, NUM_STREAMS)).block(0, num_draws // NUM_STREAMS)
        for s in range(NUM_STREAMS)
    ]
    return np.stack(streams, axis=1).ravel()


@dataclass
class Panel:
    """A coordinate system with its drawing: x and y run over these ranges."""

    left: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    top: float = 56
    width: float = 380
    height: float = 250

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns the pixel of a point."""
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        right, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return self.left + right * self.width, self.top + (1 - up) * self.height

    def axes(self, title: str, x_ticks: dict[float, str], y_ticks: dict[float, str]) -> list[str]:
        """Draws title, ticks and grid."""
        parts = [text(self.left, self.top - 32, title, weight="bold")]
        for value, label in y_ticks.items():
            x, y = self.place(self.x_range[0], value)
            parts.append(line([(x, y), (x + self.width, y)], "#ddd", 1))
            parts.append(text(x - 6, y + 4, label, anchor="end"))
        for value, label in x_ticks.items():
            x, y = self.place(value, self.y_range[0])
            parts.append(text(x, y + 18, label, anchor="middle"))
        return parts

    def curve(self, points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
        """Draws a line through points."""
        return line([self.place(x, y) for x, y in points], colour, width)

    def dots(self, points: Iterable[tuple[float, float]], colour: str) -> str:
        """Draws dots at points."""
        places = [self.place(x, y) for x, y in points]
        circles = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6'/>" for x, y in places)
        return f"<g fill='{colour}'>{circles}</g>"


def deviations() -> list[str]:
    """Draws how far each source is from its share, in draws."""
    names, weights = read("blend.yaml")
    asked = weights.constant()
    panel = Panel(60, (0, NUM_DRAWS), (-400, 400))
    thousands = {n * 1_000: f"{n},000" if n else "0" for n in (0, 25, 50, 75, 100)}
    parts = panel.axes(
        "draws more or less than asked, of 100,000",
        {float(x): label for x, label in thousands.items()},
        {float(y): f"{y:+d}" if y else "0" for y in range(-400, 401, 100)},
    )
    largest = {}
    for mode, width in (("random", 1.0), ("exact", 2.4)):
        drawn = draws_of_run(weights, mode, NUM_DRAWS)
        numbers = np.arange(1, NUM_DRAWS + 1)
        largest[mode] = 0.0
        for source in range(len(names)):
            deviation = np.cumsum(drawn == source) - numbers * asked[source]
            largest[mode] = max(largest[mode], float(np.abs(deviation).max()))
            points = [(0.0, 0.0), *((float(n), float(deviation[n - 1])) for n in numbers[499::500])]
            parts.append(panel.curve(points, COLOURS[source], width))
    note = f"blend_mode: random, up to {largest['random']:.0f}"
    parts.append(text(panel.left + 8, panel.top + 14, note))
    x, y = panel.place(0, 0)
    note = f"blend_mode: exact, up to {largest['exact']:.1f}"
    parts.append(text(x + 8, y + 80, note, weight="bold"))
    parts.append(line([(x + 14, y + 66), (x + 14, y + 4)], "#333", 1))
    return parts


def schedules() -> list[str]:
    """Draws the shares that schedules ask, and those of every 50th step."""
    names, weights = read("curriculum.yaml")
    panel = Panel(530, (0, NUM_STEPS), (0, 0.8))
    parts = panel.axes(
        "share of a step's 512 samples: target (line), actual (dots)",
        {float(x): f"{x:,}" for x in range(0, NUM_STEPS + 1, 500)},
        {y / 10: f"{10 * y} %" if y else "0" for y in range(0, 9, 2)},
    )
    drawn = draws_of_run(weights, "exact", NUM_STEPS * SAMPLES_PER_STEP)
    steps = np.arange(0, NUM_STEPS + 1, 5)
    asked = weights.at(steps * SAMPLES_PER_STEP)
    actual = [np.bincount(step, minlength=len(names)) for step in drawn.reshape(NUM_STEPS, -1)]
    for source, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        curve = zip(steps.tolist(), asked[:, source].tolist(), strict=True)
        parts.append(panel.curve(curve, colour, 1.4))
        dots = ((n + 0.5, actual[n][source] / SAMPLES_PER_STEP) for n in range(0, NUM_STEPS, 50))
        parts.append(panel.dots(dots, colour))
        x, y = panel.place(NUM_STEPS, float(asked[-1, source]))
        parts.append(text(x + 8, y + 4, name, colour=colour))
    return parts


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES / "blending.svg"
    write_picture(path, 990, 340, [*deviations(), *schedules()])
