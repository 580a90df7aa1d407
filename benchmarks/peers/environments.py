"""One environment per loader, since their packages contradict each other; torch is shared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import REPO

ENVIRONMENTS = REPO / ".venv-peers"
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
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


def answer_of(
    python: str | Path, words: Sequence[object], limit_sec: float, **environment: str
) -> dict[str, Any]:
    """Runs a module in an environment, and ends whatever it leaves behind.

    Args:
        python: of the environment.
        words: the module, what it is to do, and further arguments.
        limit_sec: how long it may take.
        environment: variables for it.

    Returns:
        The JSON of its last line, or the last line of its error as `error`.
    """
    environment = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1", **environment}
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [python, "-m", *map(str, words)], cwd=REPO, env=environment, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_sec)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_sec:g} s to {words[1]}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        print(err, file=sys.stderr)
        lines = [line for line in err.splitlines() if line.strip()]
        named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return {"error": f"{words[1]}: {['no message', *lines, *named][-1]}"}
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer
