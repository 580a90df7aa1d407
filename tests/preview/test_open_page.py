"""The command opens the page where it can, and prints the samples where it cannot."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from energon_lite.extras.cli import app
from energon_lite.extras.preview import open_page
from energon_lite.extras.preview.open_page import why_not

from ..helpers import text_set
from ..programs import running_program

INSTALL = "pip install 'energon_lite[preview]'"


def test_the_page_opens_from_a_terminal_or_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(open_page, "find_spec", lambda name: True)
    assert why_not(is_asked=False, is_terminal=True) == ""
    assert why_not(is_asked=True, is_terminal=False) == ""
    assert "--port" in why_not(is_asked=False, is_terminal=False)
    monkeypatch.setattr(open_page, "find_spec", lambda name: None if name == "uvicorn" else True)
    assert INSTALL in why_not(is_asked=False, is_terminal=True)
    with pytest.raises(RuntimeError, match="uvicorn not found"):
        why_not(is_asked=True, is_terminal=True)


def test_samples_are_printed_where_nobody_looks_at_a_page(tmp_path):
    root = str(text_set(tmp_path, 9))
    for options, advice in (([], True), (["--terminal"], False)):
        printed = CliRunner().invoke(app, ["preview", root, *options], input="y\nn\n")
        assert printed.exit_code == 0
        assert "train, sample 1: TextSample" in printed.output
        assert "sample 2" not in printed.output
        assert (INSTALL in printed.stderr) == advice


def test_errors_of_the_data_come_before_the_page(tmp_path):
    pytest.importorskip("starlette", reason="needs the extra [preview]")
    missing = CliRunner().invoke(app, ["preview", str(tmp_path / "no"), "--port", "0"])
    assert missing.exit_code == 1
    assert "does not exist" in missing.stderr
    root = str(text_set(tmp_path / "set", 9))
    wrong = CliRunner().invoke(app, ["preview", root, "--port", "0", "--split", "tran"])
    assert wrong.exit_code == 1
    assert "no split part 'tran'" in wrong.stderr
    encoder = CliRunner().invoke(app, ["preview", root, "--with", "no_module:Encoder"])
    assert encoder.exit_code == 2


@pytest.mark.processes
def test_the_page_is_served_to_this_machine_until_it_is_interrupted(tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra [preview]")
    command = ["-m", "energon_lite", "preview", text_set(tmp_path, 9), "--no-browser"]
    with running_program(*command) as (program, lines):
        address = next(lines).strip()
        assert address.startswith("http://127.0.0.1:")
        page = urllib.request.urlopen(f"{address}browse").read().decode()
        assert "1 to 9 of 9" in page
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address[:-5]}xxxx/browse")
        os.kill(program.pid, signal.SIGINT)
        assert program.wait() in (0, 130)
