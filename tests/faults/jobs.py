"""Training jobs as a test sees them: what they report, which processes they have, what they leave.

Deadlines tell a hang from an end, on a machine where everything takes its time; how long an end
took is returned, for the figures of `make soak`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..programs import REPO, Program

LIMIT_SEC = 60.0  # for anything that does not hang
END_SEC = 60.0  # until nothing may be left of a job; the goal on an idle machine is 2


def wait_until(condition: Callable[[], Any], what: str, limit_sec: float = LIMIT_SEC) -> float:
    """Waits until a condition holds, and returns for how many seconds."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < limit_sec, f"not within {waited:.0f} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - start


def processes_of(session: int) -> dict[int, str]:
    """Command lines of the processes of a session that have not ended, by pid."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            # The first thread may have ended while others still hold files and their locks.
            has_ended = fields[0] in "ZX" and len(list((folder / "task").iterdir())) <= 1
            if int(fields[3]) == session and not has_ended:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = f"{fields[0]} {command[-120:]}"
    return found


class Usage(NamedTuple):
    """What the processes of a job use together.

    Memory that they share is counted once; pages of files are not counted, such as libraries, which
    other programs share.
    """

    memory_kib: int
    files: int
    threads: int

    @classmethod
    def of(cls, session: int) -> Usage:
        """Measures the processes of a session."""
        memory = files = threads = 0
        for pid in processes_of(session):
            with suppress(OSError):
                folder = Path(f"/proc/{pid}")
                lines = (folder / "smaps_rollup").read_text().splitlines()
                memory += sum(
                    int(line.split()[1])
                    for line in lines
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
                )
                files += len(list((folder / "fd").iterdir()))
                threads += len(list((folder / "task").iterdir()))
        return cls(memory, files, threads)


def shared_memory() -> set[str]:
    """Names of the shared memory of the machine."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def unused(names: set[str]) -> set[str]:
    """Names of shared memory that no process maps or has open: nobody will remove it."""
    used = set()
    for folder in Path("/proc").iterdir() if names else ():
        with suppress(OSError):
            places = (folder / "maps").read_text() if folder.name.isdigit() else ""
            for link in (folder / "fd").iterdir() if folder.name.isdigit() else ():
                places += f"{link.readlink()}\n"
            used |= {name for name in names if name in places}
    return names - used


SCENE = """
import importlib, json, sys
from functools import partial
from tests.faults.jobs import report

module, name, file, args = sys.argv[1:]
getattr(importlib.import_module(module), name)(partial(report, file), **json.loads(args))
"""


def report(file: str, value: Any) -> None:
    """Adds a line to the file that the test reads: no pipe, whose ends processes inherit."""
    with Path(file).open("a") as lines:
        lines.write(json.dumps(value) + "\n")


class Job(Program):
    """A process that runs a scene of `scenes`, or of another module: `module:scene`.

    Attributes:
        pid: its process, and its session.
        folder: holds its `stderr`, its `report`, and `tmp`, where its temporary files are.
        args: of the scene.
    """

    def __init__(self, folder: Path, scene: str, args: dict[str, Any]) -> None:
        (folder / "tmp").mkdir(parents=True)
        self.folder, self.args = folder, args
        self._shared_before = shared_memory()
        module, name = f"tests.faults.scenes:{scene}".rsplit(":", 2)[-2:]
        with (folder / "stderr").open("wb") as log:
            super().__init__(
                "-c", SCENE, module, name, folder / "report", json.dumps(args), cwd=REPO,
                env={**os.environ, "TMPDIR": str(folder / "tmp")},
                stdout=log.fileno(), stderr=log.fileno(),
            )  # fmt: skip

    def reports(self) -> list[Any]:
        """What the job has reported so far."""
        with suppress(FileNotFoundError):
            whole, _, _ = (self.folder / "report").read_text().rpartition("\n")
            return [json.loads(line) for line in whole.splitlines()]
        return []

    def wait_for_reports(self, number: int, limit_sec: float = LIMIT_SEC) -> list[Any]:
        """What the job has reported, once there are so many lines."""
        wait_until(
            lambda: len(self.reports()) >= number or self.exit_code() is not None,
            f"{number} reports of {self!r}",
            limit_sec,
        )
        assert len(self.reports()) >= number, f"{self!r} ended: {self.stderr()}"
        return self.reports()

    def stderr(self) -> str:
        """What the job has printed."""
        file = self.folder / "stderr"
        return file.read_text(errors="replace") if file.exists() else ""

    def workers(self) -> list[int]:
        """Processes of the job beside its first."""
        return [pid for pid in processes_of(self.pid) if pid != self.pid]

    def end(self, limit_sec: float = LIMIT_SEC) -> tuple[int, float]:
        """Waits until the first process has ended; returns its exit code and the seconds."""
        waited = wait_until(
            lambda: self.exit_code() is not None, f"end of {self!r}: {self.stderr()}", limit_sec
        )
        assert self._exit_code is not None
        return self._exit_code, waited

    def left(self, *, files: bool = True) -> list[str]:
        """What there is of a job that has ended: processes, shared memory, temporary files."""
        processes = [f"{pid}: {state}" for pid, state in processes_of(self.pid).items()]
        # torch removes a name just after it has made it; a kill may come between.
        shared = sorted(unused(shared_memory() - self._shared_before))
        shared = [name for name in shared if files or not name.startswith("torch_")]
        folder = self.folder / "tmp"
        return processes + shared + [str(p) for p in (folder.rglob("*") if files else ())]

    def seconds_until_clean(self, *, files: bool = True) -> float:
        """Waits until nothing is left of the job."""
        start = time.monotonic()
        while left := self.left(files=files):
            waited = time.monotonic() - start
            assert waited < END_SEC, f"left {waited:.0f} s after the end of {self!r}: {left}"
            time.sleep(0.01)
        return time.monotonic() - start

    def kill(self) -> None:
        """Kills whatever is left."""
        wait_until(self._is_dead, f"end of {self!r}, which was killed")

    def _is_dead(self) -> bool:
        left = processes_of(self.pid)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.exit_code()
        return not left

    def __repr__(self) -> str:
        return f"job {self.pid} ({self.folder.name})"


class Jobs:
    """Starts jobs, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()

    def job(self, scene: str, **args: Any) -> Job:
        """Runs a scene; with its `with` block ends whatever is left of it."""
        return Job(self._folder / f"{next(self._numbers)}-{scene}", scene, args)
