"""The comparison with other loaders: what it reads, how it counts, and how it keeps figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import checking, probe, samples
from benchmarks.peers.figures import Figures, cell
from benchmarks.peers.loaders import by_hand, ours, webdataset_
from benchmarks.peers.packs import PackedSamples
from benchmarks.peers.rows import ROWS


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("COUNTS", "CHECKED"):
        monkeypatch.setitem(getattr(samples, name), "text", 300)
    for row in ("text-0", "blend-10"):
        probe.prepare(ours, ROWS[row], tmp_path, checked=True)
    return tmp_path


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of webdataset
@pytest.mark.parametrize("loader", [ours, webdataset_, by_hand])
def test_loaders_return_what_was_written(loader: Any, data: Path) -> None:
    found = probe.check(loader, ROWS["text-0"], data)
    written = list(samples.load_samples(data, "text"))
    assert found == {"samples": 300, "bytes": sum(map(len, written))}
    assert len(set(written)) == 300
    assert probe.check(loader, ROWS["blend-10"], data)["samples"] == 300


def test_a_loader_that_loses_or_changes_a_sample_is_refused(data: Path) -> None:
    texts = [text.decode() for text in samples.load_samples(data, "text")]
    for wrong, message in ((texts[1:], "299 of 300"), ([*texts, "other"], "not written")):
        batches = probe.endless([wrong])
        with pytest.raises(AssertionError, match=message):
            checking.compare(
                samples.load_samples(data, "text"),
                batches,
                lambda batch, row: batch,
                ROWS["text-0"],
            )


@pytest.mark.processes
def test_cpu_time_is_that_of_children_too() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    before = probe.cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = probe.cpu_seconds() - before
        child.communicate(b"\n")
    ended = probe.cpu_seconds() - before
    assert 0.25 < running <= ended + 0.02 < 3


def test_figures_of_several_runs_are_added_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    for times in ((3.0, 4.0), (5.0,)):
        figures = Figures.load(path)
        figures.titles["ours"] = "energon_lite"
        for value in times:
            found = {"cpu_us": value, "wall_us": 2 * value, "first_batch_s": 1.0, "versions": {}}
            figures.add("text-0", "ours", found)
        figures.save(path)
    assert "| texts of 500 B, 0 workers | ≤ 3.5 | **4** (3 – 5) |" in figures.as_markdown()
    figures.forget("text-0", "ours")
    assert "(3 – 5)" not in figures.as_markdown()


def test_a_cell_shows_the_median_and_the_spread() -> None:
    assert cell([1234.5, 10.4, 99.0], is_best=False) == "99 (10 – 1,234)"
    assert cell([3.14159], is_best=False) == "3.1"
    assert cell([], is_best=False) == "–"


def test_samples_are_cut_out_of_packs() -> None:
    tokens = [list(range(8)), list(range(10, 18))]
    packed = PackedSamples(3, zip(tokens, ([0, 3, 7], [0, 5, 5]), strict=True))
    assert len(packed) == 3
    cut = [np.frombuffer(sample, np.uint16).tolist() for sample in packed]
    assert cut == [[0, 1, 2], [3, 4, 5, 6], [10, 11, 12, 13, 14]]
