"""The comparison with other loaders: what it reads, how it counts, and how it keeps figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import checking, probe, samples
from benchmarks.peers.loaders import by_hand, ours, webdataset_
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
