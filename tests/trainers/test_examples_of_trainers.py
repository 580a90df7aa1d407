"""The examples run as their first lines say, and find the samples of the unbroken run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import REPO

pytestmark = pytest.mark.processes


def run(folder: Path, *command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("lightning_fit", "lightning"),
        ("accelerate_loop", "accelerate"),
        ("hf_trainer", "transformers"),
    ],
)
def test_example_of_one_process_resumes(name: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make trainers has it")
    output = run(tmp_path, str(REPO / "examples" / "trainers" / f"{name}.py"))
    assert "steps after the resume have the samples of the unbroken run" in output


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="make trainers runs it; slow elsewhere"
)
@pytest.mark.parametrize(
    ("name", "ranks"), [("ddp", (2, 3, 1)), ("dcp", (4, 2)), ("megatron_style", (4, 4))]
)
def test_example_under_torchrun_resumes(name: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    outputs = []
    for number in ranks:
        script = str(REPO / "examples" / "trainers" / f"{name}.py")
        options = ["--standalone", "--nproc-per-node", str(number)]
        outputs.append(run(tmp_path, "-m", "torch.distributed.run", *options, script))
    for output, number in zip(outputs, ranks, strict=True):
        assert output.count("...") >= number, output
    assert outputs[0] != outputs[1]
