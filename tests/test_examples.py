"""The examples run, and the demo finds its batches identical."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import energon_lite
from energon_lite.sources.dataset_config import load_factory
from energon_lite.storage.length_files import write_lengths

from .conftest import REPO, write_captions
from .helpers import text_set

pytestmark = pytest.mark.skipif(
    not hasattr(energon_lite, "prepare_dataset"), reason="nothing to prepare the data with yet"
)


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(REPO / "examples" / name), *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_demo_resumes_with_identical_batches(start_method: str, tmp_path: Path) -> None:
    arguments = ["--num-samples", "80", "--steps", "8", "--start-method", start_method]
    output = run_example("train_resume.py", *arguments, cwd=tmp_path)
    assert "The remaining 8 batches are identical" in output
    # 16 steps of 4 packs: target and actual shares of pictures and texts.
    shares = {row[0]: row[1:4] for row in map(str.split, output.splitlines()) if len(row) == 6}
    asked = {name: float(row[0].rstrip("%")) for name, row in shares.items() if name != "source"}
    given = {name: float(shares[name][1].rstrip("%")) for name in asked}
    assert list(asked) == ["pictures", "texts"]
    assert given == pytest.approx(asked, abs=2)
    assert sum(int(shares[name][2].replace(",", "")) for name in asked) > 300
    (packed, padded) = re.findall(r"([0-9.]+)%", next(filter(_is_fill, output.splitlines())))
    assert float(packed) > 99 > 70 > float(padded)
    assert (tmp_path / "demo_data" / "captions" / ".nv-meta" / ".info.json").is_file()

    if start_method == "fork":  # a second run finds the data
        arguments = [*arguments, "--steps", "4", "--num-workers", "0"]
        output = run_example("train_resume.py", *arguments, cwd=tmp_path)
        assert "Data: found" in output
        assert "The remaining 4 batches are identical" in output


def _is_fill(line: str) -> bool:
    return line.startswith("Packs are")


def test_minimal_example_prints_batches(tmp_path: Path) -> None:
    write_captions(tmp_path / "captions", num_shards=10, samples_per_shard=4)
    output = run_example("minimal.py", "captions", cwd=tmp_path)
    assert output.count("torch.Size([4, 3, 16, 24])") == 5


def test_picture_of_blending_is_what_the_example_draws(tmp_path: Path) -> None:
    run_example("draw_blend.py", "picture.svg", cwd=tmp_path)
    committed = REPO / "docs" / "images" / "blending.svg"
    assert committed.read_bytes() == (tmp_path / "picture.svg").read_bytes()
    assert committed.stat().st_size < 150_000


def test_picture_of_packing_is_what_the_example_draws(tmp_path: Path) -> None:
    run_example("draw_packing.py", "picture.svg", cwd=tmp_path)
    committed = REPO / "docs" / "images" / "packing.svg"
    assert committed.read_bytes() == (tmp_path / "picture.svg").read_bytes()
    assert committed.stat().st_size < 50_000


def test_picture_of_balance_is_what_the_example_draws(tmp_path: Path) -> None:
    documents = text_set(tmp_path / "documents", 3000)
    # numpy promises for RandomState, not for newer generators, to draw the same in all versions.
    drawn = np.random.RandomState(1).lognormal(np.log(1500), 1.3, 3000)
    lengths = np.clip(drawn, 1, 32_768).astype(np.int64)
    data = load_factory(documents, split_part="train").data
    write_lengths(documents, "train", "documents", lengths, data)
    arguments = ["documents", "--lengths", "documents", "--capacity", "32768"]
    run_example("draw_balance.py", *arguments, "--out", "picture.svg", cwd=tmp_path)
    committed = REPO / "docs" / "images" / "balance.svg"
    assert committed.read_bytes() == (tmp_path / "picture.svg").read_bytes()
    assert committed.stat().st_size < 80_000
