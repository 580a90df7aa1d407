"""What a program says that cannot use a cluster: nothing answers, or a module is not there."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from energon_lite import RayWorkers

from ..loader.workers import loader_of
from .conftest import ROOT

pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_dead_cluster_is_an_error(form: str) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = form.format(bound.getsockname()[1])
        script = (
            "from energon_lite.extras.cluster.ray_library import connect\n"
            f"try: connect({address!r})\nexcept ConnectionError as error: print(error)"
        )
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
    assert f"No Ray cluster answers at {address} (" in done.stdout


def test_module_that_only_the_program_has_is_named(
    cluster: Any, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from energon_lite import DefaultTaskEncoder\nclass Own(DefaultTaskEncoder): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    encoder = __import__("only_here").Own()
    match = r"No module named 'only_here' on this node.*runtime_env=\{'working_dir': "
    with pytest.raises(RuntimeError, match=match) as caught:
        next(iter(loader_of(texts, encoder, workers=RayWorkers(1, spares=0))))
    assert len(str(caught.value)) < 400
    assert "\x1b" not in str(caught.value)
