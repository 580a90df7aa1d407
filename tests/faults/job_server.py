"""Starts training jobs quickly: a process that has imported everything, and forks one per request.

A job is the main program of its process, so it ends as a script does: with Python's exit code,
traceback and atexit functions. It leads a session, by which its processes are found. The server
ends with the tests, also where they are killed, and ends the jobs that are left.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Lets the kernel send a signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def serve(jobs: list[int]) -> dict[str, Any]:
    """Answers requests; in the process of a job, returns what it has to do.

    Args:
        jobs: receives the jobs that were started.
    """
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                jobs.remove(pid)
        else:
            answer = os.fork()
            if answer == 0:
                jobs.clear()
                return request
            jobs.append(answer)
        print(json.dumps(answer), flush=True)
    return {}


def end_jobs(jobs: list[int]) -> None:
    """Kills the processes of jobs that are left, and ends this process at once."""
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job, signal.SIGKILL)
    os._exit(0)


def report(file: str, value: Any) -> None:
    """Adds a line to the file that the test reads: no pipe, whose ends processes inherit."""
    with Path(file).open("a") as lines:
        lines.write(json.dumps(value) + "\n")


def become_job(folder: Path) -> None:
    """Makes this process the leader of a session, with files of its own."""
    os.setsid()
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # A shell may have started the tests in the background, where interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    jobs: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: end_jobs(jobs))
    importlib.import_module("tests.faults.scenes")
    request = serve(jobs)
    if not request:
        end_jobs(jobs)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL)
        become_job(Path(request["folder"]))
        module, _, name = request["scene"].rpartition(":")
        scene = getattr(importlib.import_module(module or "tests.faults.scenes"), name)
        scene(partial(report, str(Path(request["folder"]) / "report")), **request["args"])
