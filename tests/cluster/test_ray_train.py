"""The example with Ray Train proves that its batches are those of a run that never stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import ROOT

pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
pytest.importorskip("pyarrow", reason="Ray Train is not installed; see `make cluster`")


def test_example_resizes_from_two_ranks_to_one_and_to_three() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray_train.py")], text=True, capture_output=True,
        env={**environment, "PYTHONPATH": str(ROOT)}, timeout=400,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "36 batches on 2, 1 and 3 ranks are those of a run" in found.stdout
