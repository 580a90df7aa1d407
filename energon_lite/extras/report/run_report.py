"""The report of a run: shares, epochs, rates, ranks, skips, times; and what to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from energon_lite.core.state import JSON
from energon_lite.core.stream_context import SkipRecord
from energon_lite.extras.report.advice import alerts, headline
from energon_lite.extras.report.stats_file import (
    Counts,
    Record,
    read_stats,
    total,
)

_MAX_INTERVALS = 24  # of a report; lines between them are skipped
_MAX_SKIPS = 100  # that a report lists
_APART = "energon-lite bench measures reading, decoding, each hook, packing and transport apart"


@dataclasses.dataclass(frozen=True)
class Interval:
    """The steps between two lines.

    Attributes:
        start: the first step.
        stop: the last one.
        sec: seconds that they took; None where they are not known.
        counts: of all ranks in it.
        asked: shares that the blend asks of each source, in their order.
        given: shares that the training loop got.
        losses: the mean loss of each source that has one.
    """

    start: int
    stop: int
    sec: float | None
    counts: Counts
    asked: list[float]
    given: list[float]
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Report:
    """A run, as far as it was measured; None stands for what was not.

    Attributes:
        title: what the report is of.
        headline: the bottleneck, and what to change.
        step: the last training step.
        unit: what shares are of, "samples" or "tokens".
        num_workers: loader workers of each rank.
        sec: seconds of the run that were measured.
        counts: of all ranks in this time; since the run began, where no time was measured. A batch
            of several sources counts for each of them.
        sources: counts of each source since the run began, with `size`, `epochs`, and shares
            `asked` and `given`.
        intervals: the run in up to 25 parts.
        ranks: the counts of each rank since the run began.
        imbalance: tokens (or samples) of the rank with most of them, over their mean.
        times: seconds of all loader workers, by part of their work.
        skips: skipped samples with their names, up to 100; from a skip log only.
        fill: the part of the tokens of a batch that is no padding; of a dry run only.
        warnings: what the reader should know.
    """

    title: str
    headline: str
    step: int
    unit: str
    num_workers: int | None
    sec: float | None
    counts: Counts
    sources: dict[str, dict[str, float | None]]
    intervals: list[Interval]
    ranks: Sequence[Counts]
    imbalance: float | None
    times: Mapping[str, float]
    skips: Sequence[SkipRecord] = ()
    fill: float | None = None
    warnings: Sequence[str] = ()

    def to_json(self) -> dict[str, JSON]:
        """Returns all figures as plain JSON."""
        skips: list[Any] = [record._asdict() for record in self.skips]
        return {**dataclasses.asdict(self), "skips": skips}


def run_report(source: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Report:
    """Reports what a run did.

    Args:
        source: a `.jsonl` file of `loader.stats().write_to(path, step)`, or those of all ranks,
            with the loader's `skip_log` where there is one.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It has no counts.
    """
    paths = [Path(source)] if isinstance(source, (str, PathLike)) else [*map(Path, source)]
    title = ", ".join(path.name for path in paths)
    records, skips, warnings = read_stats(paths)
    warnings.append(_APART)
    return made_report(title, records, skips=skips[:_MAX_SKIPS], warnings=warnings)


def made_report(
    title: str, records: Sequence[Record], times: Mapping[str, float] | None = None, **more: Any
) -> Report:
    """Makes the report of records, at least one, in the order of steps.

    Args:
        title: as in `Report`.
        records: counts up to a step each.
        times: as in `Report`; by default what the records know.
        more: other fields of `Report`.
    """
    last = records[-1]
    intervals = [interval(a, b) for a, b in pairwise(_thinned(records)) if b.step > a.step]
    timed = [part for part in intervals if part.sec]
    sec = sum(part.sec or 0.0 for part in timed) or None
    counts = total(part.counts for part in timed) if sec else total(last.ranks)
    times = times or {"read and decode": counts["read_sec"], "hooks": counts["encode_sec"]}
    asked, given = (_shares_of(last.sources.values(), key) for key in ("target", last.unit))
    sources: dict[str, dict[str, float | None]] = {
        name: {
            **row, "asked": a, "given": b, "loss": _mean_loss(row),
            "epochs": (row["draws"] - row["read_ahead"]) / row["size"] if row["size"] else None,
        }
        for (name, row), a, b in zip(last.sources.items(), asked, given, strict=True)
    }  # fmt: skip
    line = headline(times, counts["wait_sec"], sec, len(last.ranks), last.num_workers)
    memory = [sum(r.memory_bytes) for r in records if r.began == last.began and r.memory_bytes]
    lines = [*alerts(sources, last.unit, last.num_streams, memory), more.pop("headline", line)]
    amounts = [rank["tokens" if counts["tokens"] else "samples"] for rank in last.ranks]
    return Report(**{
        "title": title, "step": last.step, "unit": last.unit, "num_workers": last.num_workers,
        "headline": ". ".join(lines),
        "sec": sec, "counts": counts, "sources": sources, "intervals": intervals,
        "ranks": last.ranks, "times": times,
        "imbalance": max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else None, **more,
    })  # fmt: skip


def _thinned(records: Sequence[Record]) -> list[Record]:
    """Returns the start of the run, and some of the records, evenly, with the last one."""
    stride = -(-(len(records) - 1) // _MAX_INTERVALS) or 1
    start = Record(0, {}, (), began=math.nan)  # no time is known since then
    return [start, *records[:-1:stride], records[-1]]


def interval(a: Record, b: Record) -> Interval:
    """Returns what was counted between two records."""
    is_same = a.began == b.began  # another process begins to add losses up again
    since: dict[str, dict[str, float]] = {}
    for name, row in b.sources.items():
        before = a.sources.get(name, {})
        since[name] = {key: max(0.0, number - before.get(key, 0)) for key, number in row.items()}
        for key in ("loss_sum", "loss_count"):
            since[name][key] = row[key] - before.get(key, 0) * is_same
    asked, given = (_shares_of(since.values(), key) for key in ("target", b.unit))
    losses = {name: loss for name, row in since.items() if (loss := _mean_loss(row)) is not None}
    sec = b.time - a.time if is_same and b.time > a.time else None
    return Interval(a.step + 1, b.step, sec, total(since.values()), asked, given, losses)


def _mean_loss(row: Counts) -> float | None:
    return row["loss_sum"] / row["loss_count"] if row["loss_count"] else None


def _shares_of(rows: Iterable[Counts], key: str) -> list[float]:
    amounts = [row[key] for row in rows]
    whole = sum(amounts)
    return [round(amount / whole, 6) if whole else 0.0 for amount in amounts]
