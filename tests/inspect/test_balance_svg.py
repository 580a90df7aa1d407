"""The picture of the report: well-formed, and with its numbers."""

from __future__ import annotations

import dataclasses
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from typer.testing import CliRunner

from energon_lite.balance import idle_share, imbalance
from energon_lite.cli import app
from energon_lite.inspect.balance import BalanceReport, BalanceRow, balance_report
from energon_lite.inspect.balance_svg import balance_svg, loads, waits

from ..conftest import REPO
from ..helpers import text_set
from .test_balance import store

SVG = "{http://www.w3.org/2000/svg}"
NUM_SAMPLES = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `documents` with the lengths that the committed picture is of."""
    root = tmp_path_factory.mktemp("pictures")
    documents = text_set(root / "documents", NUM_SAMPLES)
    # numpy promises for RandomState, not for newer generators, to draw the same in all versions.
    drawn = np.random.RandomState(1).lognormal(np.log(1500), 1.3, NUM_SAMPLES)
    store(documents, "documents", np.clip(drawn, 1, 32_768))
    return root


def report_of(*tables: object, **changes: object) -> BalanceReport:
    """A report whose steps cost what the tables say."""
    costs = [np.asarray(table, dtype=np.float64) for table in tables]
    rows = tuple(
        BalanceRow(f"packs, way {n}", 0.9, imbalance(table), idle_share(table), table)
        for n, table in enumerate(costs)
    )
    report = BalanceReport(
        path="data", ranks=costs[0].shape[1], steps=len(costs[0]), samples=100, capacity=64,
        overlong=0, skipped=0, rows=rows,
    )  # fmt: skip
    return dataclasses.replace(report, **changes)  # type: ignore[arg-type]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def numbers(svg: str) -> list[float]:
    """All attributes that are places or sizes."""
    found = []
    for element in ET.fromstring(svg).iter():
        for name in ("x", "y", "width", "height"):
            if name in element.attrib:
                found.append(float(element.attrib[name]))
        found += [float(n) for n in re.findall(r"[^ ,]+", element.attrib.get("points", ""))]
    return found


def test_picture_has_the_numbers_of_the_report(folder) -> None:
    report = balance_report(
        folder / "documents", lengths="documents", capacity=32_768, ranks=4, steps=60, window=8
    )
    words = texts(balance_svg(report))
    for row in report.rows:
        assert row.name in words
        assert f"{row.imbalance:.4f}" in words
        assert f"{row.idle:.2%} of the time waiting" in words
        assert f"{1 - row.full:.2%} padding" in words
        assert waits(row).mean() == pytest.approx(row.imbalance)
        assert 1 - loads(row).mean() == pytest.approx(row.imbalance)
    assert f"4 ranks, 60 steps, {report.samples:,} samples, packs of 32,768 tokens" in words[0]


def test_bars_are_the_costs_of_steps_on_one_scale() -> None:
    svg = ET.fromstring(balance_svg(report_of([[1, 3], [2, 2]], [[4, 0], [2, 2]])))
    bars = [
        (float(box.attrib["height"]), box.attrib["fill-opacity"] == "1")
        for box in svg.iter(f"{SVG}rect")
        if box.attrib["class"].startswith("way") and float(box.attrib["width"]) > 20
    ]
    # The slowest of a step, then the mean of its ranks, of which all here are alike.
    assert [is_mean for _, is_mean in bars] == [False, True] * 4
    ratios = np.array([height for height, _ in bars]) / bars[1][0]
    assert ratios == pytest.approx([1.5, 1, 1, 1, 2, 1, 1, 1], abs=0.01)


@given(
    st.lists(arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=50),
                    elements=st.one_of(st.just(0.0), st.floats(1e-9, 1e12))), min_size=1,
             max_size=4)
)  # fmt: skip
def test_any_costs_are_drawn_inside_the_picture(tables) -> None:
    report = report_of(*(np.resize(table, tables[0].shape) for table in tables))
    svg = balance_svg(report)
    assert all(-0.1 <= number <= 990.1 for number in numbers(svg))
    for row in report.rows:
        assert waits(row).mean() == pytest.approx(row.imbalance)
        assert 1 - loads(row).mean() == pytest.approx(row.imbalance)


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (600, 1), (3, 3000), (5000, 2)])
def test_few_and_many_steps_and_ranks_are_drawn(shape) -> None:
    costs = np.random.default_rng(0).random(shape)
    svg = balance_svg(report_of(costs, costs, costs, costs))
    assert len(svg) < 200_000
    assert "nan" not in svg
    ranks = "1 rank" if shape[1] == 1 else f"{shape[1]:,} ranks"
    assert ranks in texts(svg)


def test_way_without_a_step_and_steps_without_cost_are_drawn() -> None:
    report = report_of(np.zeros((4, 2)), np.zeros((4, 2)))
    assert "nan" not in balance_svg(report)
    empty = dataclasses.replace(report.rows[0], costs=np.zeros((0, 2)))
    svg = balance_svg(dataclasses.replace(report, rows=(empty, report.rows[1])))
    assert "nan" not in svg


def test_names_of_paths_are_written_as_text_and_cut_at_the_front() -> None:
    words = texts(balance_svg(report_of([[1, 2]], path="<a> & 'b'")))
    assert words[0].startswith("<a> & 'b': 2 ranks, 1 step, ")
    words = texts(balance_svg(report_of([[1, 2]], path="x/" * 500 + "end")))
    assert words[0].startswith("…")
    assert "x/end: 2 ranks" in words[0]
    assert len(words[0]) < 150


def test_colours_of_dark_pages_are_for_classes_that_the_elements_have() -> None:
    svg = ET.fromstring(balance_svg(report_of(*[[[1, 2], [3, 1]]] * 4)))
    style = svg.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)
    used = {element.attrib["class"] for element in svg.iter() if "class" in element.attrib}
    assert used <= set(re.findall(r"\.([\w-]+)\{", str(style.text)))


def test_command_draws_the_committed_picture(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(folder)
    file = tmp_path / "balance.svg"
    arguments = ["balance", "documents", "--lengths", "documents", "--capacity", "32768"]
    done = CliRunner().invoke(app, [*arguments, "--svg", str(file)])
    assert done.exit_code == 0, done.output
    assert "packs, quantile sync of 64" in done.output
    committed = REPO / "docs" / "images" / "balance.svg"
    assert file.read_bytes() == committed.read_bytes()
    assert committed.stat().st_size < 80_000


def test_file_that_cannot_be_written_is_an_error_without_traceback(folder, tmp_path) -> None:
    arguments = ["balance", str(folder / "documents"), "--lengths", "documents", "--capacity",
                 "32768", "--ranks", "2", "--steps", "3", "--svg"]  # fmt: skip
    for place in (tmp_path / "none" / "a.svg", tmp_path):
        done = CliRunner().invoke(app, [*arguments, os.fspath(place)])
        assert done.exit_code == 1
        assert done.output.startswith("Error: ")
        assert str(place) in done.output
