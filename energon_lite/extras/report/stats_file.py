"""A JSONL file of `loader.stats()`: a line for each logged step, appended and read back.

A run may be killed in the middle of a line, and may resume before the last step of the file: a line
that is cut is skipped, and a later line replaces those of its step and of the steps after it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.stream_context import SkipRecord
from energon_lite.loader.stats import COUNTED

Counts = Mapping[str, float]
ALL_RANKS = -1  # the place of a rank, in a line of all ranks together
_Rows = dict[int, dict[int, dict[str, Any]]]  # lines by step and rank


@dataclasses.dataclass(frozen=True)
class Record:
    """Counts since the run began, up to a step.

    Attributes:
        step: the training step.
        time: when it was written, in seconds since 1970; None for a saved state.
        began: when the process that wrote it began.
        unit: what shares are of, "samples" or "tokens".
        num_workers: loader workers of each rank; None if it is not known.
        sources: of all ranks, by source: the counts of `SourceStats`, with `size` and `target`.
        ranks: the counts of each rank, of all its sources together.
    """

    step: int
    time: float | None
    began: float | None
    unit: str
    num_workers: int | None
    sources: dict[str, dict[str, float]]
    ranks: Sequence[Counts]


def total(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the counts of several sources together."""
    rows = list(rows)
    return {name: sum(row.get(name) or 0 for row in rows) for name in COUNTED}


def read_stats(paths: Sequence[Path]) -> tuple[list[Record], list[SkipRecord], list[str]]:
    """Reads the files of `append_stats`, of one rank or of each, and skip logs of the loader.

    Returns:
        The records, a step each; the skipped samples; and warnings of the lines that were skipped.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The files hold no line of counts.
    """
    found: _Rows = {}
    skips: dict[str, SkipRecord] = {}
    bad = 0
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    if "sample_key" in row:
                        # A resumed run lists again what it skips again.
                        skips[json.dumps([row["stage"], row["restore_key"]])] = SkipRecord(
                            *(row[name] for name in SkipRecord._fields)
                        )
                    else:
                        _add_row(found, row)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    bad += bool(line.strip())
    warnings = [f"{bad:,} lines are cut, or no counts: skipped"] if bad else []
    if not found:
        raise DatasetFormatError(
            f"{', '.join(map(str, paths))}: no line has counts. Write them by "
            "`loader.stats().write_to(path, step)`"
        )
    steps = [_rows_of_step(found[step]) for step in sorted(found)]
    most = max(min(len(rows) / size, 1) for rows, size in steps)
    records = [_record(rows) for rows, size in steps if len(rows) >= most * size]
    if most < 1:
        warnings.append(f"counts of {most:.0%} of the ranks only: give the files of all of them")
    if len(records) < len(found):
        warnings.append(f"{len(found) - len(records):,} steps lack the counts of some ranks")
    return records, list(skips.values()), warnings


def _add_row(found: _Rows, row: dict[str, Any]) -> None:
    """Adds a line; forgets what its rank wrote for this step and later ones, before a resume."""
    rank, step = int(row.get("rank", ALL_RANKS)), int(row["step"])
    row["time"], row["began"] = float(row["time"]), float(row["began"])
    row["world_size"] = max(1, int(row.get("world_size", 1)))
    total([*row["sources"].values(), *row.get("ranks", ())])  # raises where a count is no number
    for later in [own for own in found if own >= step]:
        found[later].pop(rank, None)
        if not found[later]:
            del found[later]
    found.setdefault(step, {})[rank] = row


def _rows_of_step(rows: dict[int, dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Returns the line of all ranks, or those of the last topology; and how many they are."""
    if ALL_RANKS in rows:
        return [rows[ALL_RANKS]], 1
    size = max(rows.values(), key=itemgetter("time"))["world_size"]
    return [rows[n] for n in sorted(rows) if rows[n]["world_size"] == size], size


def _record(rows: list[dict[str, Any]]) -> Record:
    first = rows[0]  # its clock stands for all ranks
    each = [total(row["sources"].values()) for row in rows]
    return Record(
        first["step"], first["time"], first["began"], first.get("unit", "samples"),
        first.get("num_workers"), summed_sources([row["sources"] for row in rows]),
        first.get("ranks") or each,
    )  # fmt: skip


def summed_sources(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Returns the counts of several ranks together, by source; size and target are of the run."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        for name, row in rank.items():
            found.setdefault(str(name), []).append(row)
    return {
        name: {**{key: own[0].get(key) or 0 for key in ("size", "target")}, **total(own)}
        for name, own in found.items()
    }
