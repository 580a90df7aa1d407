"""What a run did: shares, epochs, rates, ranks, skips, times; and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON
from energon_lite.core.stream_context import SkipRecord
from energon_lite.extras.inspect.checkpoints import checkpoint_info, found_states
from energon_lite.extras.report.advice import TimeRow, headline, timed_together
from energon_lite.extras.report.stats_file import Counts, Record, read_stats, summed_sources, total
from energon_lite.loader.resume import decompressed

_MAX_INTERVALS = 24  # of a report; lines between them are left out
_MAX_SKIPS = 100  # that a report lists


@dataclasses.dataclass(frozen=True)
class SourceRow:
    """What the run drew of a source. Shares are of samples or tokens, as the blend counts them."""

    name: str
    size: int
    samples: int
    tokens: int
    skipped: int
    epochs: float | None
    asked: float
    given: float
    read_sec: float
    encode_sec: float
    wait_sec: float


@dataclasses.dataclass(frozen=True)
class Interval:
    """The steps between two lines.

    Attributes:
        start: the first step.
        stop: the last one.
        sec: seconds that they took; None where they are not known.
        counts: of all ranks in it.
        asked: shares that the blend asks of each source.
        given: shares that the training loop got.
    """

    start: int
    stop: int
    sec: float | None
    counts: dict[str, float]
    asked: dict[str, float]
    given: dict[str, float]

    def rate(self, what: str) -> float | None:
        """Returns the `samples` or `tokens` in a second; None where time is not known."""
        return self.counts[what] / self.sec if self.sec else None


@dataclasses.dataclass(frozen=True)
class Report:
    """A run, as far as its source knows it; None stands for what was not measured.

    Attributes:
        title: what the report is of.
        headline: the bottleneck, and what to change.
        step: the last training step.
        unit: what shares are of, "samples" or "tokens".
        num_workers: loader workers of each rank.
        sec: seconds of the run that were measured.
        wait_share: the part of them that the training loop waited for batches, of the mean rank.
        samples_per_sec: of all ranks.
        tokens_per_sec: of all ranks; 0 without a `sample_length`.
        fill: the part of the tokens of a batch that is no padding.
        sources: a row each.
        intervals: the run in up to 25 parts.
        ranks: the counts of each rank.
        num_skipped: samples skipped.
        skips: some of them, with their names; from a skip log only.
        times: where the time of loader and training loop went.
        workers: shortest training step that does not wait, in seconds, by number of workers; of a
            dry run only.
        warnings: what was left out.
    """

    title: str
    headline: str
    step: int
    unit: str
    num_workers: int | None
    sec: float | None
    wait_share: float | None
    samples_per_sec: float | None
    tokens_per_sec: float | None
    fill: float | None
    sources: list[SourceRow]
    intervals: list[Interval]
    ranks: Sequence[Counts]
    num_skipped: int
    skips: list[SkipRecord]
    times: list[TimeRow]
    workers: dict[int, float]
    warnings: list[str]

    @property
    def imbalance(self) -> float | None:
        """Tokens (or samples) of the rank with most of them, over their mean."""
        unit = "tokens" if sum(rank["tokens"] for rank in self.ranks) else "samples"
        amounts = [rank[unit] for rank in self.ranks]
        return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else None

    def to_json(self) -> dict[str, JSON]:
        """Returns all figures as plain JSON."""
        skips: list[Any] = [record._asdict() for record in self.skips]
        return {**dataclasses.asdict(self), "skips": skips, "imbalance": self.imbalance}


def run_report(source: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Report:
    """Reports what a run did.

    Args:
        source: a `.jsonl` file of `loader.stats().write_to(path, step)`, or those of all ranks,
            with the loader's `skip_log` where there is one; or a saved state, as a file, a folder
            of a trainer, or the files of all ranks.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: A JSONL file has no counts.
        StateError: Another file has no state.
    """
    paths = [Path(source)] if isinstance(source, (str, PathLike)) else [*map(Path, source)]
    title = ", ".join(path.name for path in paths)
    if any(path.suffix == ".jsonl" for path in paths):
        records, skips, warnings = read_stats(paths)
        return made_report(title, records, skips=skips, warnings=warnings)
    found = checkpoint_info(paths)  # checks them
    try:
        record = _state_record(found_states(paths))
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{title}: the counts of the state are damaged ({error!r})") from error
    return made_report(f"state {title}", [record], warnings=found["warnings"])


def made_report(
    title: str,
    records: Sequence[Record],
    *,
    skips: Sequence[SkipRecord] = (),
    times: Sequence[TimeRow] = (),
    fill: float | None = None,
    workers: Mapping[int, float] | None = None,
    advice: str = "",
    num_cores: int | None = None,
    warnings: Sequence[str] = (),
) -> Report:
    """Makes the report of records.

    Args:
        title: what the report is of.
        records: at least one, in the order of steps.
        skips: the samples skipped.
        times: where time went; by default what the records know.
        fill: as in `Report`.
        workers: as in `Report`.
        advice: the headline; by default that of the times.
        num_cores: that the run had.
        warnings: what was left out.
    """
    last, num_ranks = records[-1], len(records[-1].ranks)
    intervals = _intervals(_thinned(records))
    timed = [interval for interval in intervals if interval.sec]
    sec = sum(interval.sec or 0.0 for interval in timed) or None
    # Of the time that was measured; all counts, where none was.
    spent = total(interval.counts for interval in timed) if sec else total(last.sources.values())
    times = list(times) or timed_together(spent)
    sources = _source_rows(last)
    return Report(
        title=title,
        headline=advice
        or headline(times, spent["wait_sec"], sec, num_ranks, last.num_workers, num_cores),
        step=last.step,
        unit=last.unit,
        num_workers=last.num_workers,
        sec=sec,
        wait_share=spent["wait_sec"] / num_ranks / sec if sec else None,
        samples_per_sec=spent["samples"] / sec if sec else None,
        tokens_per_sec=spent["tokens"] / sec if sec else None,
        fill=fill,
        sources=sources,
        intervals=intervals,
        ranks=last.ranks,
        num_skipped=sum(row.skipped for row in sources),
        skips=list(skips[:_MAX_SKIPS]),
        times=times,
        workers=dict(workers or {}),
        warnings=list(warnings),
    )


def _state_record(states: Sequence[Mapping[str, Any]]) -> Record:
    """Returns the counts of the states of a run; of several of a rank, those of the newest."""
    ranks = {}
    for state in sorted(states, key=lambda state: (state["base"], state["count"])):
        ranks[state["rank"]] = decompressed(state["stats"], "stats")
    settings = [part for s in states for part in _settings(decompressed(s["config"], "config"))]
    sizes = {part["name"]: part["samples"] for part in settings if part.get("stage") == "source"}
    sources = summed_sources([ranks[rank] for rank in sorted(ranks)])
    for name, row in sources.items():
        row["size"] = sizes.get(name, 0)
    unit = "tokens" if any(part.get("unit") == "tokens" for part in settings) else "samples"
    each = [total(ranks[rank].values()) for rank in sorted(ranks)]
    # `state` is the newest one.
    step = state["base"] // state["world_size"] + state["count"]
    return Record(step, None, None, unit, None, sources, each)


def _settings(config: Any) -> Iterator[dict[str, Any]]:
    """Yields the settings of all stages of a pipeline."""
    if isinstance(config, dict):
        yield config
        config = list(config.values())
    for part in config if isinstance(config, list) else ():
        yield from _settings(part)


def _source_rows(record: Record) -> list[SourceRow]:
    given = _shares({name: row[record.unit] for name, row in record.sources.items()})
    asked = _shares({name: row["target"] for name, row in record.sources.items()})
    return [
        SourceRow(
            name, int(row["size"]), int(row["samples"]), int(row["tokens"]), int(row["skipped"]),
            row["draws"] / row["size"] if row["size"] else None, asked[name], given[name],
            row["read_sec"], row["encode_sec"], row["wait_sec"],
        )
        for name, row in record.sources.items()
    ]  # fmt: skip


def _thinned(records: Sequence[Record]) -> list[Record]:
    """Returns some of the records, evenly, with the first and the last one."""
    step = -(-(len(records) - 1) // _MAX_INTERVALS) or 1
    return [*records[:-1:step], records[-1]]


def _intervals(records: Sequence[Record]) -> list[Interval]:
    """Returns the parts of the run between the records; the first begins with the run."""
    first = records[0]
    nothing = {name: dict.fromkeys(row, 0.0) for name, row in first.sources.items()}
    start = dataclasses.replace(first, step=0, began=None, sources=nothing)
    return [_interval(a, b) for a, b in pairwise([start, *records]) if b.step > a.step]


def _interval(a: Record, b: Record) -> Interval:
    since = {
        name: {key: max(0.0, row[key] - a.sources.get(name, {}).get(key, 0)) for key in row}
        for name, row in b.sources.items()
    }
    is_timed = a.time is not None and b.time is not None and a.began == b.began
    sec = (b.time or 0.0) - (a.time or 0.0) if is_timed else 0.0
    return Interval(
        a.step + 1, b.step, sec if sec > 0 else None, total(since.values()),
        _shares({name: row["target"] for name, row in since.items()}),
        _shares({name: row[b.unit] for name, row in since.items()}),
    )  # fmt: skip


def _shares(amounts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(amounts.values())
    return {name: amount / whole if whole else 0.0 for name, amount in amounts.items()}
