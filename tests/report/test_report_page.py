"""The page of a report: opens without network, and shows text of the data as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite import run_report
from energon_lite.extras.report.report_page import report_html, write_page

from ..preview.screen import CHROMIUM, FLAGS

pytest.importorskip("plotly")

EVIL = "</script><img src=x onerror=\"document.title='evil'\">"
COUNTS = {"size": 50, "target": 3.0, "read_sec": 2.0, "encode_sec": 1.0, "wait_sec": 0.4}


def line(step: int, rank: int, names: list[str]) -> str:
    counts = {**COUNTS, "samples": 4 * step, "draws": 4 * step, "tokens": 90 * step}
    row = {"step": step, "time": 100.0 + step, "began": 1.0, "rank": rank, "world_size": 2}
    return json.dumps({**row, "num_workers": 2, "sources": dict.fromkeys(names, counts)}) + "\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page of two ranks and sources with hostile names."""
    stats, skips = tmp_path / "stats.jsonl", tmp_path / "skips.jsonl"
    names = ["photos", EVIL, "<b>x</b> ${title} $y", "ключ/train"]
    stats.write_text("".join(line(s, r, names) for s in range(1, 9) for r in range(2)))
    fields = {
        "restore_key": [1], "sample_key": EVIL, "source": "photos", "stage": "decode",
        "error": EVIL, "on_purpose": False, "num_samples": 1,
    }  # fmt: skip
    skips.write_text(json.dumps(fields) + "\n")
    file = tmp_path / "page.html"
    write_page(run_report([stats, skips]), file)
    return file


def test_page_is_small_and_names_no_address(page: Path) -> None:
    html = page.read_text()
    assert 4_000_000 < len(html.encode()) < 6_000_000
    own = html[: html.index('<script id="data"')]
    assert "http:" not in own
    assert "https:" not in own
    assert "<img src=x" not in html
    assert EVIL not in html


def test_page_of_a_thousand_sources_keeps_its_size(tmp_path: Path) -> None:
    stats = tmp_path / "stats.jsonl"
    names = [f"a/rather/long/path/of/source-{n:04d}/train" for n in range(1000)]
    stats.write_text("".join(line(s, r, names) for s in range(1, 27) for r in range(2)))
    assert len(report_html(run_report(stats)).encode()) < 6_000_000


def test_page_without_plotly_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stats = tmp_path / "stats.jsonl"
    stats.write_text(line(1, 0, ["a"]) + line(1, 1, ["a"]))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(RuntimeError, match=r"pip install 'energon_lite\[report\]'"):
        report_html(run_report(stats))


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def test_page_opens_offline_without_errors(browser: Any, page: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 800})
    opened, messages, requests = context.new_page(), [], []
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(page.as_uri())
    report = run_report(page.parent / "stats.jsonl")
    assert opened.inner_text("h1") == report.headline
    opened.wait_for_selector(".chart .main-svg")
    assert opened.locator(".chart").count() == 5
    assert EVIL in opened.inner_text("table >> nth=1")
    for scheme in ("light", "dark"):
        opened.emulate_media(color_scheme=scheme)
        found = axe.run(opened)
        assert found.violations_count == 0, found.generate_report()
    assert opened.title() == "Report: stats.jsonl, skips.jsonl"
    for width in (1200, 390):  # a phone's
        opened.set_viewport_size({"width": width, "height": 800})
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert (messages, requests) == ([], [page.as_uri()])
