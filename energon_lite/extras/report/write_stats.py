"""Writes `loader.stats()` to loggers, and to JSONL files for reports."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from energon_lite.core.errors import append
from energon_lite.core.state import JSON
from energon_lite.extras.report.stats_file import ALL_RANKS, total
from energon_lite.loader.stats import COUNTED, Stats

_BEGAN = time.time()  # of the process: time between two of them is no time of the run


def write_stats(stats: Stats, writer: Any, step: int, prefix: str) -> None:
    """Writes figures as `Stats.write_to` describes it.

    Raises:
        TypeError: `writer` is none of what it takes.
    """
    if hasattr(writer, "add_scalar"):
        for name, value in stats.scalars(prefix).items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(stats.scalars(prefix), step=step)
    elif hasattr(writer, "log"):
        writer.log(stats.scalars(prefix), step=step)
    elif hasattr(writer, "write"):
        writer.write(_line(stats, step))
    elif isinstance(writer, (str, os.PathLike)):
        _append_line(stats, os.fspath(writer), _line(stats, step))
    else:
        raise TypeError(
            f"{type(writer).__name__} has neither add_scalar(name, value, step) nor log_metrics or "
            "log(dict, step=...), and is no path of a JSONL file; give one of these, or use "
            "scalars()"
        )


def _append_line(stats: Stats, file: str, line: str) -> None:
    rank = "all" if stats.ranks or stats.place is None else stats.place[0]
    path = Path(file.replace("{rank}", str(rank)))
    with suppress(OSError), path.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        if opened.read() != b"\n":  # a run was killed there
            line = f"\n{line}"
    append(path, line)


def _line(stats: Stats, step: int) -> str:
    sources = {
        name: {
            "size": stats.facts[name].num_samples if name in stats.facts else None,
            "target": _finite(stats.target.get(name, 0.0)),
            **_finite_counts(vars(source)),
        }
        for name, source in stats.items()
    }
    row: dict[str, Any] = {
        "step": int(step), "time": time.time(), "began": _BEGAN, "unit": stats.unit,
        "sources": sources,
    }  # fmt: skip
    if stats.place is not None:
        row |= dict(zip(("rank", "world_size", "num_workers"), stats.place, strict=True))
    if stats.ranks:
        row["rank"] = ALL_RANKS
    row["ranks"] = [total(map(_finite_counts, rank.values())) for rank in stats.ranks]
    return json.dumps(row, allow_nan=False) + "\n"


def _finite_counts(row: Mapping[str, Any]) -> dict[str, JSON]:
    return {name: _finite(row[name]) for name in COUNTED}


def _finite(value: float) -> float | None:
    """Returns a number that JSON has; None for another one."""
    return round(value, 6) if math.isfinite(value) else None
