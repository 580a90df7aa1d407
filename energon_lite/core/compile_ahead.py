"""Decides whether a kernel runs as plain Python while another process compiles.

Compiling takes some seconds, once after installing. No run waits for it: what is small runs as
plain Python, with the same results, until one process of the machine has filled numba's cache. An
empty file in the folder of the cache then names the code, the Python and the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

# Plain Python that a process runs before anything is compiled: who packs little needs no numba.
_FREE_SEC = 0.2
# Numbers in the arguments of a call; more of them would take longer than compiling.
_MOST_NUMBERS = 1 << 17
# How often it is looked whether the code is there, and when that is given up. [Unit: second]
_LOOK_SEC, _LONGEST_SEC = 0.25, 300.0
# It imports nothing from the current folder, which may be a dataset; and ends at once, to be seen.
_CHILD = """import sys; sys.path[:] = filter(None, sys.path)
import os; from energon_lite.core.compiled import fill_cache; fill_cache(*sys.argv[1:]); os._exit(0)
"""


class CompileAhead:
    """The compiling that a process has asked for; a fork of it continues to look for the code.

    Args:
        modules: those with the kernels.
        free_sec: what kernels may take as plain Python before anything is compiled.

    Attributes:
        plain_sec: what kernels have taken as plain Python.
    """

    def __init__(self, modules: Iterable[str], free_sec: float = _FREE_SEC) -> None:
        self._modules, self._free_sec = modules, free_sec
        self.plain_sec = 0.0
        self._is_over = False
        self._mark: Path | None = None
        self._since = self._looked = 0.0
        self._child: subprocess.Popen[bytes] | None = None

    def allows_plain(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a call runs as plain Python; begins to compile where there were many calls."""
        if self._is_over or sum(getattr(value, "size", 0) for value in arguments) > _MOST_NUMBERS:
            return False
        if self._mark is None:
            return self.plain_sec < self._free_sec or not self.begin()
        now = monotonic()
        if now > self._looked + _LOOK_SEC:
            self._looked = now
            is_there = self._mark.exists()
            # A fork of the process that started it sees no failure, and waits longer.
            has_failed = self._child is not None and self._child.poll() not in (None, 0)
            self._is_over = is_there or has_failed or now > self._since + _LONGEST_SEC
        return not self._is_over

    def begin(self) -> bool:
        """Starts a process that compiles, unless that is done, or one was started for it.

        Returns:
            Whether the code is there, or can be kept nowhere.
        """
        names = sorted(self._modules)
        folder = next((folder for folder in _folders() if _is_writable(folder)), None)
        if folder is None or self._is_over:
            self._is_over = True
            return True
        before, self._mark = self._mark, folder / f"energon_lite-{_named_after(names)}.compiled"
        self._is_over = self._mark.exists()
        if not self._is_over and self._mark != before:
            self._since = monotonic()
            try:
                paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _CHILD, str(self._mark), *names],
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt of the run does not end it
                )
            except OSError:  # the system allows no more processes, for example
                self._is_over = True
        return self._is_over


def _folders() -> list[Path]:
    """Returns where numba keeps code: it takes the first of these that can be written to."""
    own = os.environ.get("NUMBA_CACHE_DIR")
    if own:
        return [Path(own)]
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [Path(__file__).with_name("__pycache__"), Path(user).expanduser() / "numba"]


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _named_after(modules: list[str]) -> str:
    """Names what compiled code depends on: the source, numba, Python and the processor."""
    digest = hashlib.blake2b(digest_size=8)
    for name in modules:
        file = Path(str(sys.modules[name].__file__))
        stamp = file.stat() if file.exists() else None
        digest.update(f"{file} {stamp and (stamp.st_mtime_ns, stamp.st_size)}\n".encode())
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].split("\n")
        kinds = ("model name", "flags", "Features", "CPU part")
        processor = [fact for fact in facts if fact.startswith(kinds)]
    except OSError:
        processor = [platform.processor()]
    digest.update(f"{version('numba')} {sys.version} {processor}".encode())
    return digest.hexdigest()
