"""The package can be imported out of a zip file, as some clusters ship code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import energon_lite

PACKAGE = Path(energon_lite.__file__).parent


def test_names_are_found_in_a_zip_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        for path in (file for end in ("py", "pyi", "txt") for file in PACKAGE.rglob(f"*.{end}")):
            archive.write(path, path.relative_to(PACKAGE.parent))
    code = "import energon_lite; print(energon_lite.SkipSample, energon_lite.__file__)"
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],  # no editable install
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "code.zip")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.startswith("<class 'energon_lite.core.errors.SkipSample'>")
    assert "code.zip" in out
