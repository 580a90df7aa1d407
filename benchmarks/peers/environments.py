"""One environment per loader, since their packages contradict each other; torch is shared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import REPO

SHARED = ["torch==2.13.0", "numpy==2.4.6", "pillow==13.0.0", "setuptools"]


def install(root: Path, name: str, packages: Sequence[str]) -> tuple[Path | None, str]:
    """Returns the Python of a loader's environment, made if it is not there, or why it failed."""
    python, error = _install(root / "torch", SHARED, None)
    if python is None:
        return None, error
    return _install(root / name, packages, root / "torch")


def _install(folder: Path, packages: Sequence[str], shared: Path | None) -> tuple[Path | None, str]:
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists() and done.read_text() == "\n".join(packages):
        return python, ""
    print(f"Installing {' '.join(packages)} into {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    if shared is not None:
        # A path file makes one copy of torch serve all environments; a constraint keeps pip from
        # replacing it with another build.
        (site,) = folder.glob("lib/python*/site-packages")
        (their_site,) = shared.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(f"{their_site}\n")
        (folder / "constraints.txt").write_text("torch==2.13.0\n")
        packages = ["-c", str(folder / "constraints.txt"), *packages]
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *packages]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if run.returncode:
        reasons = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        return None, (reasons or run.stderr.splitlines() or ["pip failed"])[-1]
    done.write_text("\n".join(packages[2:] if shared else packages))
    return python, ""
