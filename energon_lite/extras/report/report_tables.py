"""A report as tables, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from energon_lite.core.tables import table_lines
from energon_lite.extras.report.run_report import Interval, Report

_SHARES = {"padding", "waits for data", "of the work", "asked", "given"}
_COUNTS = ("samples", "tokens", "skipped", "wait_sec")
_SHOWN_ROWS = 24  # of a table in a terminal
_SHOWN_SHARES = 4  # sources whose shares have a column
_MAX_NAME = 60  # characters


class Table(NamedTuple):
    """A table, and what belongs to it.

    Attributes:
        title: its heading.
        rows: the names of the columns, and rows of as many cells below them.
        charts: what the page draws beside it.
    """

    title: str
    rows: list[tuple[str, ...]]
    charts: tuple[str, ...] = ()


def figures(report: Report) -> dict[str, str]:
    """Returns the figures that stand for the whole run, as text."""
    found = {
        **_rates(report, report),
        "padding": None if report.fill is None else 1 - report.fill,
        "step": report.step,
        "ranks": len(report.ranks),
        "workers of a rank": report.num_workers,
        "fullest rank over mean": report.imbalance,
        "samples skipped": sum(row["skipped"] or 0 for row in report.sources.values()),
    }
    return {name: _cell(name, value) for name, value in found.items()}


def report_tables(report: Report) -> list[Table]:
    """Returns the tables that have rows."""
    work_sec = sum(report.times.values()) or 1.0
    ranks = enumerate(report.ranks if len(report.ranks) > 1 else ())
    has_loss = any(row["loss_count"] for row in report.sources.values())
    columns = ("asked", "given", "epochs", *_COUNTS, "read_ahead", *(["loss"] * has_loss))
    found: list[tuple[str, list[dict[str, Any]], tuple[str, ...]]] = [
        ("Where the time of the workers goes", [
            {"part": name, "of the work": sec / work_sec, "seconds": sec}
            for name, sec in report.times.items()
        ], ("times",)),
        (f"Sources, shares of {report.unit}", [
            {"source": name, **{key: row[key] for key in columns}}
            for name, row in report.sources.items()
        ], ("epochs",)),
        ("Over time", _over_time(report), ("shares", "rates")),
        ("Ranks", [
            {"rank": str(n), **{key: row[key] for key in _COUNTS}} for n, row in ranks
        ], ("ranks",)),
        ("Skipped samples", [
            {"sample": s.sample_key, "source": s.source, "stage": s.stage, "reason": s.error}
            for s in report.skips
        ], ()),
    ]  # fmt: skip
    return [
        Table(title, [
            tuple(map(_short_name, rows[0])),
            *(tuple(_cell(*item) for item in row.items()) for row in rows),
        ], charts)
        for title, rows, charts in found if rows
    ]  # fmt: skip


def report_text(report: Report) -> Iterator[str]:
    """Yields a report for a terminal, the headline first."""
    yield report.headline
    yield f"\n{report.title}"
    yield from table_lines(list(figures(report).items()))
    for title, rows, _ in report_tables(report):
        yield f"\n{title}"
        yield from map(str.rstrip, table_lines(rows[: _SHOWN_ROWS + 1]))
        if len(rows) > _SHOWN_ROWS + 1:
            yield f"and {len(rows) - _SHOWN_ROWS - 1:,} more"
    yield from (f"note: {warning}" for warning in report.warnings)


def _over_time(report: Report) -> list[dict[str, Any]]:
    names = list(report.sources)
    shown = sorted(range(len(names)), key=lambda i: -(report.sources[names[i]]["given"] or 0.0))
    shown = shown[:_SHOWN_SHARES] if len(names) > 1 else []
    parts = report.intervals if len(report.intervals) > 1 else ()
    with_loss = [i for i in shown if any(names[i] in part.losses for part in parts)]
    return [
        {"steps": f"{part.start:,}-{part.stop:,}", **_rates(part, report)}
        | {f"{names[i]} given/asked": f"{part.given[i]:.1%} / {part.asked[i]:.1%}" for i in shown}
        | {f"{names[i]} loss": part.losses.get(names[i]) for i in with_loss}
        for part in parts
    ]


def _rates(part: Report | Interval, report: Report) -> dict[str, float | None]:
    """Returns the rates of a part of a run, and the share of its time that a rank waited."""
    amounts = {"samples/s": part.counts["samples"]}
    if report.counts["tokens"]:
        amounts["tokens/s"] = part.counts["tokens"]
    amounts["waits for data"] = part.counts["wait_sec"] / len(report.ranks)
    return {name: part.sec and amount / part.sec for name, amount in amounts.items()}


def _cell(column: str, value: float | str | None) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return _short_name(value)
    if column in _SHARES:
        return f"{value:.2%}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _short_name(text: str) -> str:
    """Returns a name of the data in one line of moderate length, without control characters."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) <= _MAX_NAME else f"{plain[: _MAX_NAME - 3]}..."
