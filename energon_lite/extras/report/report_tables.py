"""A report as tables, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from energon_lite.core.tables import table_lines
from energon_lite.extras.inspect.text import counted
from energon_lite.extras.report.run_report import Report

NOT_MEASURED = "not measured"
_SHOWN_ROWS = 24  # of a table in a terminal
_SHOWN_SHARES = 4  # sources whose shares have a column
_BAR = 24  # characters
_MAX_NAME = 60  # characters


class Table(NamedTuple):
    """A table, and what belongs to it.

    Attributes:
        title: its heading.
        rows: the names of the columns, and rows of as many cells below them.
        charts: what the page draws beside it.
        bars: of a row each, what the terminal draws beside it, in 0..1.
        is_text: whether cells are texts, not numbers.
    """

    title: str
    rows: list[tuple[str, ...]]
    charts: tuple[str, ...] = ()
    bars: tuple[float, ...] = ()
    is_text: bool = False


def figures(report: Report) -> dict[str, str]:
    """Returns the figures that stand for the whole run, as text."""
    imbalance, tokens = report.imbalance, report.tokens_per_sec
    return {
        "samples/s": _number(report.samples_per_sec),
        "tokens/s": "no sample_length" if tokens == 0 else _number(tokens),
        "padding": NOT_MEASURED if report.fill is None else f"{1 - report.fill:.1%}",
        "waits for data": _share(report.wait_share),
        "step": f"{report.step:,}",
        "ranks": f"{len(report.ranks):,}",
        "workers of a rank": _number(report.num_workers),
        "fullest rank over mean": NOT_MEASURED if imbalance is None else f"{imbalance:.3f}",
        "skipped": counted(report.num_skipped, "sample"),
    }


def report_tables(report: Report) -> list[Table]:
    """Returns the tables that have rows."""
    tables = [_times(report), _sources(report), _over_time(report), _ranks(report)]
    rows = [(f"{n:,}", f"{sec * 1000:,.3g} ms") for n, sec in report.workers.items()]
    tables.append(Table("Workers that keep up", [("workers", "with steps of at least"), *rows]))
    skips = [(s.sample_key, s.source, s.stage, s.error) for s in report.skips]
    names = [tuple(map(_name, row)) for row in (("sample", "source", "stage", "reason"), *skips)]
    tables.append(Table("Skipped samples", names, is_text=True))
    return [table for table in tables if len(table.rows) > 1]


def report_text(report: Report) -> Iterator[str]:
    """Yields a report for a terminal, the headline first."""
    yield report.headline
    yield f"\n{report.title}"
    yield from table_lines(list(figures(report).items()))
    for table in report_tables(report):
        yield f"\n{table.title}"
        rows = table.rows[: _SHOWN_ROWS + 1]
        if table.bars:
            drawn = (("█" * round(bar * _BAR)).ljust(_BAR, "·") for bar in table.bars)
            rows = [(*row, bar) for row, bar in zip(rows, ["", *drawn], strict=False)]
        yield from (line.rstrip() for line in table_lines(rows))
        if len(table.rows) > len(rows):
            yield f"and {len(table.rows) - len(rows):,} more"
    yield from (f"note: {warning}" for warning in report.warnings)


def _times(report: Report) -> Table:
    work_sec = sum(row.sec or 0.0 for row in report.times) or 1.0
    parts = tuple((row.sec or 0.0) / work_sec for row in report.times)
    rows: list[tuple[str, ...]] = [("part", "of the work", "seconds")]
    for row, part in zip(report.times, parts, strict=True):
        known = row.sec is not None
        rows.append(
            (row.name, f"{part:.1%}" if known else "", f"{row.sec:,.2f}" if known else NOT_MEASURED)
        )
    return Table("Where the time of the workers goes", rows, ("times",), parts)


def _sources(report: Report) -> Table:
    heading = ("source", "asked", "given", "samples", "epochs", "tokens", "skipped", "waited")
    rows = [
        (
            _name(row.name), f"{row.asked:.2%}", f"{row.given:.2%}", f"{row.samples:,}",
            "?" if row.epochs is None else f"{row.epochs:,.2f}", f"{row.tokens:,}",
            f"{row.skipped:,}", f"{row.wait_sec:,.1f} s",
        )
        for row in report.sources
    ]  # fmt: skip
    return Table(f"Sources, shares of {report.unit}", [heading, *rows], ("epochs",))


def _over_time(report: Report) -> Table:
    names = [row.name for row in sorted(report.sources, key=lambda row: -row.given)]
    names = names[:_SHOWN_SHARES] if len(names) > 1 else []
    heading = (
        "steps",
        "samples/s",
        "tokens/s",
        "waits",
        *(f"{_name(n)} asked/given" for n in names),
    )
    rows: list[tuple[str, ...]] = [heading]
    for part in report.intervals:
        waits = part.counts["wait_sec"] / part.sec / len(report.ranks) if part.sec else None
        shares = (f"{part.asked.get(n, 0.0):.1%} / {part.given.get(n, 0.0):.1%}" for n in names)
        rates = _number(part.rate("samples")), _number(part.rate("tokens")), _share(waits)
        rows.append((f"{part.start:,}-{part.stop:,}", *rates, *shares))
    return Table("Over time", rows, ("shares", "rates"))


def _ranks(report: Report) -> Table:
    rows = [
        (str(number), *(f"{rank[what]:,.0f}" for what in ("samples", "tokens", "wait_sec")))
        for number, rank in enumerate(report.ranks)
    ]
    heading = ("rank", "samples", "tokens", "seconds waited")
    return Table("Ranks", [heading, *rows] if len(rows) > 1 else [], ("ranks",))


def _name(text: str) -> str:
    """Returns a name of the data in one line of moderate length, without control characters."""
    plain = "".join(c if c.isprintable() else " " for c in str(text))
    return plain if len(plain) <= _MAX_NAME else f"{plain[: _MAX_NAME - 3]}..."


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%} of the time"
