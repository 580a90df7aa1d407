"""Starts training jobs quickly: a process that has imported everything, and forks one per request.

A job is the main program of its process, so it ends as a script does: with Python's exit code,
traceback and atexit functions. It leads a session, by which its processes are found.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any


def serve() -> dict[str, Any]:
    """Answers requests; in the process of a job, returns what it has to do."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), flush=True)
    return {}


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
    importlib.import_module("tests.faults.scenes")
    request = serve()
    if request:
        become_job(Path(request["folder"]))
        scene = getattr(importlib.import_module("tests.faults.scenes"), request["scene"])
        scene(partial(report, str(Path(request["folder"]) / "report")), **request["args"])
