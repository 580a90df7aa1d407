"""A report as one HTML file, which opens without network; needs plotly, extra [report]."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from pkgutil import get_data
from string import Template

from energon_lite.extras.report.report_tables import figures, report_tables
from energon_lite.extras.report.run_report import Report
from energon_lite.storage.files import write_atomically


def plotly_source() -> str:
    """Returns the JavaScript of plotly.

    Raises:
        RuntimeError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        text = "The page of a report needs plotly: pip install 'energon_lite[report]'"
        raise RuntimeError(f"{text} ({error})") from None
    return str(get_plotlyjs())


def report_html(report: Report) -> str:
    """Returns the page of a report; raises as `plotly_source`."""
    shown = {"figures": figures(report), "tables": report_tables(report), **report.to_json()}
    template = get_data(__package__, "report_page.html") or b""
    return Template(template.decode()).substitute(
        title=escape(report.title),
        headline=escape(report.headline),
        # In a script element, text ends at "</" whatever quotes are around it.
        data=json.dumps(shown).replace("<", "\\u003c"),
        plotly=plotly_source(),
    )


def write_page(report: Report, file: Path) -> None:
    """Writes the page of a report to a file; raises as `plotly_source`."""
    write_atomically(file, report_html(report).encode())
