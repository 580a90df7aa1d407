"""What is built of the project, and what a bare environment has after it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "energon_lite"
BUILD = "import sys; from setuptools import build_meta as b; b.build_wheel('.'); b.build_sdist('.')"


def package_files() -> set[str]:
    """All files of the package, relative to the project."""
    return {
        str(path.relative_to(REPO))
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and not path.name.endswith((".nbi", ".nbc", ".lock"))
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built of a copy without anything else."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, folder)
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_wheel_has_all_files_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == package_files()


def test_the_sdist_has_what_a_build_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *package_files()} <= names


@pytest.mark.processes
def test_an_environment_with_the_wheel_has_the_command_and_the_import(
    built: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    # The dependencies are those of this environment, but not the project's own folder.
    others = sysconfig.get_path("purelib")
    code = f"import sys; sys.path.append({others!r})"
    (Path(site) / "others.pth").write_text(code + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": tmp_path, "env": env, "text": True}
    where = "import energon_lite; energon_lite.WorkerConfig; print(energon_lite.__file__)"
    found = subprocess.check_output([python, "-c", where], **run)
    assert found.startswith(site)
    command = tmp_path / "env" / "bin" / "energon-lite"
    assert subprocess.check_output([command, "--version"], **run) == "energon-lite 0.1.0\n"
