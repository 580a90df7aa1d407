"""Draws docs/images/packing.svg: how much of a batch is padding, in three kinds of batches.

    python examples/draw_packing.py [FILE]

Needs no data: the lengths are drawn here. The padding is that of all batches of the list; one batch
of each kind is drawn, the one whose padding is nearest to that.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
from drawing import COLOURS, IMAGES, box, line, text, write_picture

from energon_lite.packing import pack_stream

NUM_SAMPLES = 16_000
MEDIAN, SIGMA, LONGEST = 400, 1.0, 4096
ROWS = 16  # of a batch
WINDOW = 320  # samples that are sorted by length, and cut into batches
BUFFER = 256  # samples that packs are chosen from

WIDTH, ROW_HEIGHT, TOP = 296.0, 14.0, 64.0
PADDING = "#e4e4e4"

# A row is the lengths of its samples, a batch a list of rows.
Batch = list[list[int]]


def draw_lengths() -> npt.NDArray[np.int64]:
    """Draws the tokens of each sample, shape (N,)."""
    # numpy promises for RandomState, not for newer generators, to draw the same in all versions.
    drawn = np.random.RandomState(0).lognormal(np.log(MEDIAN), SIGMA, NUM_SAMPLES)
    return np.clip(drawn.round(), 1, LONGEST).astype(np.int64)


def cut(rows: Batch) -> list[Batch]:
    """Cuts rows into batches."""
    return [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]


def rows_as_they_come(lengths_N: npt.NDArray[np.int64]) -> Batch:
    """Returns a row for each sample."""
    return [[length] for length in lengths_N.tolist()]


def rows_sorted_in_windows(lengths_N: npt.NDArray[np.int64]) -> Batch:
    """Returns a row for each sample, those of a window by length."""
    windows = lengths_N.reshape(-1, WINDOW)
    return rows_as_they_come(np.sort(windows, axis=1)[:, ::-1].ravel())


def rows_of_packs(lengths_N: npt.NDArray[np.int64]) -> Batch:
    """Returns a row for each pack."""
    packs = pack_stream(lengths_N, LONGEST, buffer_size=BUFFER)
    return [lengths_N[pack].tolist() for pack in packs]


@dataclass
class Panel:
    """One kind of batches.

    Attributes:
        title: names the kind.
        left: pixel at which rows start.
        batches: all of the list.
        row_length: tokens of each row; None for as many as the longest of the batch has.
    """

    title: str
    left: float
    batches: list[Batch]
    row_length: int | None = None

    def length_of(self, batch: Batch) -> int:
        """Returns the tokens of each row of a batch, padding included."""
        return self.row_length or max(map(sum, batch))

    def draw(self) -> list[str]:
        """Draws a batch, with what is true of all of them above it."""
        filled = np.array([sum(map(sum, batch)) for batch in self.batches])
        sizes = np.array([len(batch) * self.length_of(batch) for batch in self.batches])
        padding = 1 - filled.sum() / sizes.sum()
        # The last batch may have fewer rows.
        shown = self.batches[int(np.abs(1 - filled / sizes - padding)[:-1].argmin())]
        least, most = f"{sizes[:-1].min():,}", f"{sizes[:-1].max():,}"
        percent = f"{100 * padding:.{0 if padding > 0.1 else 1 if padding > 0.01 else 2}f} %"
        each = least if least == most else f"{least} to {most}"
        return [
            text(self.left, 24, f"{self.title}: {percent} padding", weight="bold"),
            text(self.left, 42, f"{each} tokens a batch, padding included"),
            *self.draw_axis(),
            *self.draw_rows(shown),
        ]

    def draw_axis(self) -> list[str]:
        """Draws ticks below the rows."""
        parts, bottom = [], TOP + ROWS * ROW_HEIGHT
        for tokens in range(0, LONGEST + 1, LONGEST // 4):
            x = self.left + WIDTH * tokens / LONGEST
            parts.append(line([(x, TOP - 6), (x, bottom + 4)], "#ddd", 1))
            anchor = "start" if tokens == 0 else "end" if tokens == LONGEST else "middle"
            parts.append(text(x, bottom + 18, f"{tokens:,}", anchor=anchor))
        return parts

    def draw_rows(self, batch: Batch) -> list[str]:
        """Draws each row of a batch: its samples, then its padding."""
        parts, scale = [], WIDTH / LONGEST
        for number, row in enumerate(batch):
            y, height = TOP + number * ROW_HEIGHT, ROW_HEIGHT - 3
            parts.append(box(self.left, y, scale * self.length_of(batch), height, PADDING))
            x = self.left
            colours = cycle(COLOURS[:2])
            for length in row:
                parts.append(box(x, y, scale * length, height, next(colours)))
                x += scale * length
        return parts


def draw() -> list[str]:
    """Draws the three kinds, and what the colours mean."""
    lengths_N = draw_lengths()
    panels = [
        Panel("as they come", 24, cut(rows_as_they_come(lengths_N))),
        Panel(f"sorted in windows of {WINDOW}", 347, cut(rows_sorted_in_windows(lengths_N))),
        Panel("packs", 670, cut(rows_of_packs(lengths_N)), LONGEST),
    ]
    parts = [part for panel in panels for part in panel.draw()]
    y = TOP + ROWS * ROW_HEIGHT + 36
    keys = {"one sample, and the next": COLOURS[:2], "padding": (PADDING,)}
    x = 24.0
    for name, colours in keys.items():
        for colour in colours:
            parts.append(box(x, y, 18, 11, colour))
            x += 18
        parts.append(text(x + 6, y + 10, name))
        x += 170
    mean = f"{lengths_N.mean():.0f} tokens in the mean"
    note = f"{ROWS} rows a batch; {NUM_SAMPLES:,} samples, {mean}"
    parts.append(text(966, y + 10, note, anchor="end"))
    return parts


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES / "packing.svg"
    write_picture(path, 990, 350, draw())
