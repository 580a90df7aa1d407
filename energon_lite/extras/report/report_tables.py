"""A report as tables, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from energon_lite.core.tables import table_lines
from energon_lite.extras.report.run_report import Report

_UNKNOWN = "not measured"
_SHOWN_ROWS = 24  # of a table in a terminal
_SHOWN_SHARES = 4  # sources whose shares have a column
_BAR = 24  # characters
_MAX_NAME = 60  # characters

_Row = tuple[str, ...]


class Table(NamedTuple):
    """A table, and what belongs to it.

    Attributes:
        title: its heading.
        rows: the names of the columns, and rows of as many cells below them.
        charts: what the page draws beside it.
    """

    title: str
    rows: list[_Row]
    charts: tuple[str, ...] = ()


def figures(report: Report) -> dict[str, str]:
    """Returns the figures that stand for the whole run, as text."""
    sec, num_ranks, tokens = report.sec, len(report.ranks), report.counts["tokens"]
    skipped = sum(row["skipped"] or 0 for row in report.sources.values())
    return {
        "samples/s": _figure(report.counts["samples"], sec),
        "tokens/s": _figure(tokens, sec) if tokens else "no sample_length",
        "padding": _UNKNOWN if report.fill is None else f"{1 - report.fill:.1%}",
        "waits for data": _share(report.counts["wait_sec"] / num_ranks, sec),
        "step": f"{report.step:,}",
        "ranks": f"{num_ranks:,}",
        "workers of a rank": _figure(report.num_workers),
        "fullest rank over mean": _figure(report.imbalance),
        "samples skipped": f"{skipped:,.0f}",
    }


def report_tables(report: Report) -> list[Table]:
    """Returns the tables that have rows."""
    ranks = enumerate(report.ranks if len(report.ranks) > 1 else ())
    tables = [
        Table("Where the time of the workers goes", list(_times(report)), ("times",)),
        Table(f"Sources, shares of {report.unit}", list(_sources(report)), ("epochs",)),
        Table("Over time", list(_over_time(report)), ("shares", "rates")),
        Table("Ranks", _below("rank samples tokens waited", (
            (str(rank), f"{c['samples']:,.0f}", f"{c['tokens']:,.0f}", f"{c['wait_sec']:,.1f} s")
            for rank, c in ranks
        )), ("ranks",)),
        Table("Workers that keep up with training steps", _below("workers steps", (
            (f"{n:,}", f"of {sec * 1000:,.3g} ms or more") for n, sec in report.workers.items()
        ))),
        Table("Skipped samples", _below("sample source stage reason", (
            tuple(map(_short_name, (s.sample_key, s.source, s.stage, s.error)))
            for s in report.skips
        ))),
    ]  # fmt: skip
    return [table for table in tables if len(table.rows) > 1]


def report_text(report: Report) -> Iterator[str]:
    """Yields a report for a terminal, the headline first."""
    yield report.headline
    yield f"\n{report.title}"
    yield from table_lines(list(figures(report).items()))
    for title, rows, charts in report_tables(report):
        yield f"\n{title}"
        if charts == ("times",):
            parts = (float(row[1].rstrip("%") or 0) / 100 for row in rows[1:])
            bars = (("█" * round(part * _BAR)).ljust(_BAR, "·") for part in parts)
            rows = [(*row, bar) for row, bar in zip(rows, ("", *bars), strict=True)]
        yield from map(str.rstrip, table_lines(rows[: _SHOWN_ROWS + 1]))
        if len(rows) > _SHOWN_ROWS + 1:
            yield f"and {len(rows) - _SHOWN_ROWS - 1:,} more"
    yield from (f"note: {warning}" for warning in report.warnings)


def _below(names: str, rows: Iterable[_Row]) -> list[_Row]:
    return [tuple(names.split()), *rows]


def _times(report: Report) -> Iterator[_Row]:
    yield "part", "of the work", "seconds"
    work_sec = sum(sec or 0.0 for sec in report.times.values()) or 1.0
    for name, sec in report.times.items():
        known = ("", _UNKNOWN) if sec is None else (f"{sec / work_sec:.1%}", f"{sec:,.2f}")
        yield (name, *known)


def _sources(report: Report) -> Iterator[_Row]:
    yield "source", "asked", "given", "samples", "epochs", "tokens", "skipped", "waited"
    for name, row in report.sources.items():
        epochs = f"{row['epochs']:,.2f}" if row["size"] else "?"
        numbers = [f"{row[key]:,.0f}" for key in ("samples", "tokens", "skipped")]
        yield (
            _short_name(name), f"{row['asked']:.2%}", f"{row['given']:.2%}", numbers[0], epochs,
            *numbers[1:], f"{row['wait_sec']:,.1f} s",
        )  # fmt: skip


def _over_time(report: Report) -> Iterator[_Row]:
    names = list(report.sources)
    shown = sorted(range(len(names)), key=lambda i: -(report.sources[names[i]]["given"] or 0.0))
    shown = shown[:_SHOWN_SHARES] if len(names) > 1 else []
    yield (
        "steps",
        "samples/s",
        "tokens/s",
        "waits",
        *(f"{_short_name(names[i])} given/asked" for i in shown),
    )
    for part in report.intervals if len(report.intervals) > 1 else ():
        rates = [_figure(part.counts[what], part.sec) for what in ("samples", "tokens")]
        shares = [f"{part.given[i]:.1%} / {part.asked[i]:.1%}" for i in shown]
        waits = _share(part.counts["wait_sec"] / len(report.ranks), part.sec)
        yield f"{part.start:,}-{part.stop:,}", *rates, waits, *shares


def _short_name(text: str) -> str:
    """Returns a name of the data in one line of moderate length, without control characters."""
    plain = "".join(c if c.isprintable() else " " for c in str(text))
    return plain if len(plain) <= _MAX_NAME else f"{plain[: _MAX_NAME - 3]}..."


def _figure(value: float | None, sec: float | None = 1.0) -> str:
    if value is None or sec is None:
        return _UNKNOWN
    return f"{value / sec:,.4g}" if value / sec < 1000 else f"{value / sec:,.0f}"


def _share(value: float, sec: float | None) -> str:
    return _UNKNOWN if sec is None else f"{value / sec:.1%}"
