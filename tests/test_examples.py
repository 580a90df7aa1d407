"""The examples run, and the demo finds its batches identical."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import energon_lite

from .conftest import REPO, write_captions

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
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_demo_resumes_with_identical_batches(start_method: str, tmp_path: Path) -> None:
    arguments = ["--num-samples", "80", "--steps", "8", "--start-method", start_method]
    output = run_example("train_resume.py", *arguments, cwd=tmp_path)
    assert "The remaining 8 batches are identical" in output
    assert (tmp_path / "demo_data" / "captions" / ".nv-meta" / ".info.json").is_file()

    # A second run finds the data and gives the same.
    output = run_example("train_resume.py", *arguments, cwd=tmp_path)
    assert "Data: found" in output
    assert "The remaining 8 batches are identical" in output


def test_minimal_example_prints_batches(tmp_path: Path) -> None:
    write_captions(tmp_path / "captions", num_shards=10, samples_per_shard=4)
    output = run_example("minimal.py", "captions", cwd=tmp_path)
    assert output.count("torch.Size([4, 3, 16, 24])") == 5
