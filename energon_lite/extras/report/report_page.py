"""A report as one HTML file, which opens without network; needs plotly, extra [report]."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from pkgutil import get_data
from string import Template
from typing import Any

from energon_lite.extras.report.report_tables import Table, figures, report_tables
from energon_lite.extras.report.run_report import Report
from energon_lite.storage.files import write_atomically

_MAX_SOURCES = 12  # of a chart


def report_html(report: Report) -> str:
    """Returns the page of a report.

    Raises:
        RuntimeError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        text = "The page of a report needs plotly: pip install 'energon_lite[report]'"
        raise RuntimeError(f"{text} ({error})") from None
    content = get_data(__package__ or "", "report_page.html")
    assert content is not None
    return Template(content.decode()).substitute(
        title=escape(report.title),
        headline=escape(report.headline),
        figures="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in figures(report).items()
        ),
        tables="".join(map(_section, report_tables(report))),
        notes="".join(f"<li>{escape(warning)}</li>" for warning in report.warnings),
        # In a script element, text ends at "</" whatever quotes are around it.
        data=json.dumps(_charts(report)).replace("<", "\\u003c"),
        plotly=get_plotlyjs(),
    )


def write_page(report: Report, file: Path) -> None:
    """Writes the page of a report to a file; raises as `report_html`."""
    write_atomically(file, report_html(report).encode())


def _section(table: Table) -> str:
    """Returns a table with its charts beside it."""
    (first, *names), *body = table.rows
    title = escape(table.title)
    kind = ' class="text"' * table.is_text
    size = " broad" * (len(names) > 3)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name in (first, *names))
    lines = (
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row[1:])
        for row in body
    )
    charts = (
        f'<div class="chart" data-chart="{name}" role="img" aria-label="Chart: the table {title}">'
        "</div>"
        for name in table.charts
    )
    content = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return (
        f'<section><h2>{title}</h2><div class="pair"><div class="wide{size}" tabindex="0" '
        f'role="region" aria-label="{title}"><table>{content}</table></div>'
        f"{''.join(charts)}</div></section>"
    )


def _charts(report: Report) -> dict[str, Any]:
    """Returns the figures that are drawn, of the largest sources."""
    sources = sorted(report.sources, key=lambda row: -row.given)[:_MAX_SOURCES]
    return {
        "times": [[row.name, row.sec] for row in report.times if row.sec is not None],
        "steps": [part.stop for part in report.intervals],
        "samples": [part.rate("samples") for part in report.intervals],
        "tokens": [part.rate("tokens") for part in report.intervals],
        "shares": [
            {
                "name": row.name,
                "asked": [part.asked.get(row.name, 0.0) for part in report.intervals],
                "given": [part.given.get(row.name, 0.0) for part in report.intervals],
            }
            for row in sources
        ],
        "epochs": [[row.name, row.epochs] for row in sources if row.epochs is not None],
        "ranks": [rank["tokens"] or rank["samples"] for rank in report.ranks],
    }
