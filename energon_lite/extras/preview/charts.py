"""Numbers of the charts: histograms, and the fill of packs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.extras.preview.browse import Query, SplitBrowser
from energon_lite.extras.preview.slots import SlotReader
from energon_lite.extras.view.fields import field_views, walked
from energon_lite.extras.view.segments import batch_view

_NUM_BARS, _NUM_SAMPLES, _NUM_BATCHES = 20, 400, 12


@dataclass(frozen=True)
class Bar:
    """A bar: `share` is its length in 0..1, `text` its value."""

    label: str
    share: float
    text: str


def histogram(values: Sequence[int] | Int64Array) -> list[Bar]:
    """Returns a bar for each range of some whole numbers; rare large ones are in the last.

    Ranges without a value that follow each other share a bar.
    """
    if not len(values):
        return []
    top = int(np.quantile(values, 0.995, method="higher")) + 1
    low = int(np.min(values))
    step = max(1, -(-(top - low) // _NUM_BARS))
    edges = [*range(low, top, step), max(int(np.max(values)) + 1, top)]
    found = np.histogram(values, edges)[0]
    is_kept = np.append(True, (found[1:] > 0) | (found[:-1] > 0))
    edges, counts = [*np.array(edges)[:-1][is_kept].tolist(), edges[-1]], found[is_kept].tolist()
    return [
        Bar(f"{a:,}" if b == a + 1 else f"{a:,}–{b - 1:,}", n / max(counts), f"{n:,}")
        for n, (a, b) in zip(counts, pairwise(edges), strict=True)
    ]


def sizes(browser: SplitBrowser, limit_sec: float) -> tuple[int, dict[str, tuple[int, list[Bar]]]]:
    """Returns histograms of texts and pictures, of samples that are spread evenly over a split.

    Args:
        browser: the split.
        limit_sec: after so long, the samples that were read are enough.

    Returns:
        The number of samples; and by field and unit, the number of values and their histogram.
    """
    end, (_, stop) = monotonic() + limit_sec, browser.bounds(Query())
    found: dict[str, list[int]] = {}
    spread = np.unique(np.linspace(0, (stop or 1) - 1, _NUM_SAMPLES, dtype=np.int64))
    # Shuffled, those that were read when the time is over are spread, too.
    for number, position in enumerate(np.random.default_rng(0).permutation(spread), 1):  # noqa: B007
        with suppress(Exception):  # a broken sample has no sizes
            for _, view in walked(field_views(browser.at(Query(), int(position)))):
                if view.kind == "text":
                    found.setdefault(f"{view.name}: characters", []).append(len(view.value))
                elif view.kind == "picture":
                    name = f"{view.name}: longest edge in pixels"
                    found.setdefault(name, []).append(view.longest_edge)
        if monotonic() > end:
            break
    return number, {name: (len(values), histogram(values)) for name, values in found.items()}


def fills(slots: SlotReader, encoder: Any, limit_sec: float) -> list[Bar]:
    """Returns the fill of the rows of the first batches of a run.

    Args:
        slots: the run.
        encoder: its task encoder.
        limit_sec: after so long, the batches that were made are enough.
    """
    found: list[Bar] = []
    end = monotonic() + limit_sec
    for number in range(slots.first, slots.first + _NUM_BATCHES):
        if monotonic() > end or (slot := slots.read(number)) is None:
            break
        rows = batch_view(slot.batch, slot.restore_key, encoder).rows
        found += [
            Bar(f"slot {number}.{i}", row.fill, f"{row.fill:.1%}") for i, row in enumerate(rows, 1)
        ]
    return found
