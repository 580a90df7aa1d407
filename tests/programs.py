"""Runs Python programs quickly: a process that has imported torch and the library forks for each.

A program is the main program of its process: it ends as a script does, with Python's exit code,
traceback and `atexit` functions. It leads a session, by which its processes are found. Tests about
imports, options of the interpreter, or variables that Python reads as it starts need `subprocess`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import Any, TextIO

REPO = Path(__file__).resolve().parent.parent
LIMIT_SEC = 120.0  # for anything that does not hang
_MAX_BYTES = 1 << 18  # of a request
_PR_SET_PDEATHSIG = 1


def run_program(
    *argv: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stdin: int | None = None,
    timeout: float = LIMIT_SEC,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as `subprocess.run` does with `capture_output` and `text`.

    Args:
        argv: what follows `python`: a script, "-c" and code, or "-m" and a module; then arguments.
        cwd: its folder; by default that of the test.
        env: its environment; by default that of the test.
        stdin: a file descriptor; by default of nothing.
        timeout: seconds, after which all of its processes are killed.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with Program(
            *argv, cwd=cwd, env=env, stdin=stdin, stdout=out.fileno(), stderr=err.fileno()
        ) as program:
            code = program.wait(timeout)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(
            argv, code, *(file.read().decode(errors="replace") for file in (out, err))
        )


@contextmanager
def running_program(*argv: object, **options: Any) -> Iterator[tuple[Program, TextIO]]:
    """A program that runs in a `with` block, and what it prints."""
    ours, theirs = os.pipe()
    with os.fdopen(ours) as lines:
        try:
            program = Program(*argv, **options, stdout=theirs)
        finally:
            os.close(theirs)
        with program:
            yield program, lines


class Program:
    """A program that runs; its processes are killed at the end of its `with` block.

    Attributes:
        pid: its process, and its session.
    """

    def __init__(
        self,
        *argv: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self._exit_code: int | None = None
        request = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        with Path(os.devnull).open() as nothing:
            files = (nothing.fileno() if stdin is None else stdin, stdout, stderr)
            self.pid: int = _server.ask(request, *files)

    def exit_code(self) -> int | None:
        """The exit code as `subprocess` has it; None as long as the program runs."""
        if self._exit_code is None:
            self._exit_code = _server.ask({"wait": self.pid})
        return self._exit_code

    def wait(self, timeout: float = LIMIT_SEC) -> int:
        """Waits for the end, and returns the exit code."""
        end = time.monotonic() + timeout
        while (code := self.exit_code()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """Kills the processes of the program that are left."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.exit_code() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class _Server:
    """The process that forks, started for the first program; it ends with that of the tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None

    def ask(self, request: dict[str, Any], *files: int) -> Any:
        """Sends a request, and returns the answer."""
        with self._lock:
            self._requests = self._requests or self._start()
            socket.send_fds(self._requests, [json.dumps(request).encode()], files)
            return json.loads(self._requests.recv(_MAX_BYTES))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.programs import serve; exec(serve())"],
                cwd=REPO,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=theirs,
                stdout=theirs,  # which cannot seek, as a pipe cannot
                start_new_session=True,
            )
        return ours


_server = _Server()


def serve() -> CodeType:
    """Answers requests, in the server; in the process of a program, returns its code."""
    for name in ("torch", "energon_lite", "tests.helpers"):
        importlib.import_module(name)
    (_,) = Path("/proc/self/task").iterdir()  # a fork would have none of other threads
    gc.collect()
    gc.freeze()
    sys.path[0] = str(REPO)
    requests, tests = socket.socket(fileno=0), os.getppid()
    requests.settimeout(1)
    programs: set[int] = set()
    while os.getppid() == tests:
        try:
            message, files, *_ = socket.recv_fds(requests, _MAX_BYTES, 3)
        except TimeoutError:
            continue
        if not message:
            break
        request = json.loads(message)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            programs.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                requests.detach()
                return _become(files, **request)
            programs.add(answer)
            for file in files:
                os.close(file)
        requests.send(json.dumps(answer).encode())
    for pid in programs:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _become(files: list[int], argv: list[str], cwd: str, env: dict[str, str]) -> CodeType:
    """Makes this process that of a program, and returns its code."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # A shell may have started the tests in the background, where interrupts are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    if argv[0] in ("-c", "-m"):
        kind, code, *arguments = argv
        if kind == "-m":
            code = f"import runpy; runpy._run_module_as_main({code!r})"
        sys.argv = [kind, *arguments]
        sys.path.insert(0, "")
        return compile(code, "<string>", "exec")
    script = Path(argv[0]).resolve()
    sys.argv = argv
    sys.path.insert(0, str(script.parent))
    sys.modules["__main__"].__file__ = str(script)
    return compile(script.read_bytes(), str(script), "exec")
