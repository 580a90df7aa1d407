"""A JSONL file of `loader.stats()`: a line for each logged step, appended and read back.

A run may be killed in the middle of a line, and may resume before the last step of the file: a line
that is cut is skipped, and a later line replaces those of its step and of the steps after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from energon_lite.core.errors import DatasetFormatError, append
from energon_lite.core.stream_context import SkipRecord
from energon_lite.extras.view.words import counted
from energon_lite.loader.count_table import SUMMED
from energon_lite.loader.stats import Stats
from energon_lite.storage import files
from energon_lite.storage.local_paths import growing_path

Counts = Mapping[str, float]
_BEGAN = time.time()  # of the process: time between two of them is no time of the run


@dataclasses.dataclass(frozen=True)
class Record:
    """Counts since the run began, up to a step; of a rank, as a line has them, or of several.

    Attributes:
        step: the training step.
        sources: by source: the counts of `SourceStats`, with `size` and `target`.
        ranks: the counts of each rank, of all its sources together.
        time: when it was written, in seconds since 1970.
        began: when the process that wrote it began.
        unit: what shares are of, "samples" or "tokens".
        rank: whose line it is.
        world_size: of how many ranks there are lines.
        num_workers: loader workers of each rank; None if it is not known.
        num_streams: of the run; 0 if it is not known.
        memory_bytes: of each worker process of the rank.
    """

    step: int
    sources: Mapping[str, Counts]
    ranks: Sequence[Counts]
    time: float = 0.0
    began: float = 0.0
    unit: str = "samples"
    rank: int = 0
    world_size: int = 1
    num_workers: int | None = None
    num_streams: int = 0
    memory_bytes: Sequence[float] = ()


def total(rows: Iterable[Counts]) -> dict[str, float]:
    """Returns the counts of several sources, or ranks, together."""
    rows = list(rows)
    return {name: sum(row[name] for row in rows) for name in SUMMED}


def write_stats(stats: Stats, writer: Any, step: int) -> None:
    """Writes figures as `Stats.write_to` describes it.

    Raises:
        TypeError: `writer` is none of what it takes.
    """
    log = getattr(writer, "log_metrics", getattr(writer, "log", None))
    if isinstance(writer, (str, os.PathLike)):
        _append(os.fspath(writer), _record_of(stats, step))
    elif hasattr(writer, "add_scalar"):
        for name, value in stats.scalars().items():
            writer.add_scalar(name, value, step)
    elif log is not None:
        log(stats.scalars(), step=step)
    else:
        raise TypeError(
            f"{type(writer).__name__} has neither add_scalar(name, value, step) nor log_metrics or "
            "log(dict, step=...), and is no path of a JSONL file; give one of these, or use "
            "scalars()"
        )


def _record_of(stats: Stats, step: int) -> Record:
    sources = {
        name: {
            "size": stats.facts[name].num_samples if name in stats.facts else 0,
            "target": stats.target.get(name, 0.0),
            **total([vars(source)]),
        }
        for name, source in stats.items()
    }
    ranks = [total(rank.values()) for rank in stats.ranks or [sources]]
    place = (*stats.place, stats.num_streams, stats.memory_bytes)
    return Record(int(step), sources, ranks, time.time(), _BEGAN, stats.unit, *place)


def _append(file: str, record: Record) -> None:
    path = growing_path(file.replace("{rank}", str(record.rank)))
    line = f"{json.dumps(vars(record))}\n"
    with suppress(OSError), path.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        if opened.read() != b"\n":  # a run was killed there
            line = f"\n{line}"
    append(path, line)


def read_stats(paths: Sequence[Path]) -> tuple[list[Record], list[SkipRecord], list[str]]:
    """Reads the files of `write_stats`, of one rank or of each, and skip logs of the loader.

    Returns:
        The records of all ranks, a step each; the skipped samples; and warnings of the lines that
        were skipped.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The files hold no line of counts.
    """
    found: dict[int, list[Record]] = defaultdict(list)  # of each rank, by step
    skips: dict[str, SkipRecord] = {}
    bad = 0
    for path in paths:
        if not files.is_there(path):
            raise FileNotFoundError(
                f"{path} does not exist. Write it by `loader.stats().write_to(path, step)`"
            )
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in filter(str.strip, file):
                try:
                    row = json.loads(line)
                    if "sample_key" in row:
                        # A resumed run lists again what it skips again.
                        skips[json.dumps([row["stage"], row["restore_key"]])] = SkipRecord(
                            *(row[name] for name in SkipRecord._fields)
                        )
                        continue
                    record = checked_record(row)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    bad += 1
                    continue
                own = found[record.rank]
                while own and own[-1].step >= record.step:  # was written before a resume
                    own.pop()
                own.append(record)
    if not found:
        raise DatasetFormatError(
            f"{', '.join(map(str, paths))}: no line has counts. Write them by "
            "`loader.stats().write_to(path, step)`"
        )
    records, warnings = _complete_steps(record for rank in sorted(found) for record in found[rank])
    warnings += [f"{bad:,} lines are cut, or no counts: skipped"] if bad else []
    return records, list(skips.values()), warnings


def checked_record(row: dict[str, Any]) -> Record:
    """Returns the record of a line.

    Args:
        row: the fields of `Record`, without those that are not known.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It is no such row.
    """
    row = {**vars(Record(row["step"], {}, ())), **row}
    counts = (*SUMMED, "size", "target")
    sources = {
        # A plus refuses what is no number.
        str(name): {key: +(own.get(key) or 0) for key in counts}
        for name, own in row["sources"].items()
    }
    ranks = [total([rank]) for rank in row["ranks"] or [total(sources.values())]]
    numbers = {key: int(row[key]) for key in ("step", "rank", "world_size", "num_streams")}
    times = {key: float(row[key]) for key in ("time", "began")}
    return Record(**{**row, **numbers, **times, "sources": sources, "ranks": ranks})


def _complete_steps(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Returns a record for each step of which as many ranks as possible are known; and warnings."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_step[record.step].append(record)
    steps = []
    for _, own in sorted(by_step.items()):
        size = max(own, key=attrgetter("time")).world_size  # of the last topology
        steps.append(together([record for record in own if record.world_size == size]))
    parts = [min(1.0, len(record.ranks) / max(1, record.world_size)) for record in steps]
    most = max(parts)
    whole = [record for record, part in zip(steps, parts, strict=True) if part == most]
    warning = (
        f"{len(whole):,} of {counted(len(steps), 'step')} have the counts of {most:.0%} of "
        "the ranks, the others of fewer: give the files of all ranks"
    )
    return whole, [warning] if min(parts) < 1 else []


def together(records: Sequence[Record]) -> Record:
    """Returns the record of several ranks; what is no count is of the run, or of the first rank."""
    found: dict[str, list[Counts]] = defaultdict(list)
    for record in records:
        for name, row in record.sources.items():
            found[name].append(row)
    sources = {name: {**rows[0], **total(rows)} for name, rows in found.items()}
    ranks = [rank for record in records for rank in record.ranks]
    return dataclasses.replace(records[0], sources=sources, ranks=ranks)
