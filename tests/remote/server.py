"""A test server of object stores: S3 and plain HTTP.

    with Server(objects={"bucket/key": b"text"}, latency_ms=20) as server:
        server.fail("status", status=503, times=2, path=r"key$")
        ...  # a client reads server.url + "/bucket/key"
        assert [entry.status for entry in server.log()] == [503, 503, 200]

It runs in a process started by exec, so its latency and bandwidth are not those of the tests, and
a test may fork while it runs. `tests/remote` has a file for each part: `object_table` keeps the
objects, `dialects` answers requests, `serving` is the process.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
KINDS = (
    "status", "reset", "lost", "cut", "hang", "slow", "whole", "wrong_range", "short_range",
    "short_body", "page",
)  # fmt: skip


@dataclass(frozen=True)
class Logged:
    """A request as the server saw it.

    Args:
        method: GET, HEAD, PUT, ...
        path: decoded, `/bucket/key` without the first slash.
        query: decoded.
        range: the Range header, or "".
        status: 0 if no answer was begun (yet).
        num_bytes: bytes of the body that were sent.
        fault: the kind of the fault that occurred, or "".
        time_sec: when the request came, after the start of the server or `clear_log`.
    """

    method: str
    path: str
    query: dict[str, str]
    range: str
    status: int
    num_bytes: int
    fault: str
    time_sec: float


class Server:
    """A server process, from entering the context to leaving it.

    Args:
        objects: bytes, or files, by `bucket/key`.
        root: a folder whose files are objects too: `root/a/b` is `a/b` of every bucket. Files are
            read where they lie and never written: what clients write is kept in memory.
        latency_ms: wait before each answer.
        bytes_per_sec: the bandwidth that all connections share, both ways; None is without limit.
        credentials: an access key and its secret: requests that do not name the key are refused.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes | Path] | None = None,
        *,
        root: Path | None = None,
        latency_ms: float = 0,
        bytes_per_sec: float | None = None,
        credentials: tuple[str, str] | None = None,
    ) -> None:
        self.credentials = credentials
        self.port = 0
        self._objects = dict(objects or {})
        self._settings = {
            "root": None if root is None else str(root.resolve()),
            "latency_ms": latency_ms,
            "bytes_per_sec": bytes_per_sec,
            "credentials": credentials,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The address of the server; an object is at `url/bucket/key`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None, "the server runs only within `with`"
        return self._process.pid

    def __enter__(self) -> Server:
        # Without site-packages, which take longer to find than all else.
        command = [sys.executable, "-S", "-m", "tests.remote.server"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=REPO, stdin=pipe, stdout=pipe, text=True)
        self.port = self._exchange(self._settings)
        self.restore()
        return self

    def __exit__(self, *error: object) -> None:
        process, self._process = self._process, None
        assert process is not None
        try:
            errors = self._exchange(["errors", {}], process)["value"]
        finally:
            process.kill()
            process.communicate()
        assert error[0] is not None or not errors, f"the test server failed:\n{errors[0]}"

    def restore(self) -> None:
        """Returns to the start: its objects and settings, no connections or faults, no log.

        So all tests of a module can share one server, also after requests that hang.
        """
        self._command("restore")
        for name, data in self._objects.items():
            self.replace(name, data)

    # ------------------------------------------------------------------------------------ objects

    def replace(self, name: str, data: bytes | Path) -> str:
        """Writes or replaces the object `bucket/key`; returns its new ETag."""
        if isinstance(data, Path):
            return str(self._command("put", name=name, path=str(data.resolve())))
        return str(self._command("put", name=name, data=base64.b64encode(data).decode()))

    def delete(self, name: str) -> None:
        """Deletes an object, also one that is a file of `root`; the file stays."""
        self._command("delete", name=name)

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of an object; None if there is none."""
        data = self._command("read", name=name)
        return None if data is None else base64.b64decode(data)

    # ------------------------------------------------------------------------------------- faults

    def fail(
        self,
        kind: str,
        *,
        times: int = 1,
        skip: int = 0,
        path: str = "",
        method: str = "",
        status: int = 503,
        code: str = "",
        after_bytes: int | None = None,
        seconds: float = 1.0,
        bytes_per_sec: float = 1000.0,
    ) -> None:
        """Lets the next requests fail. Of several faults, the first that fits a request occurs.

        The kinds `cut` to `short_body` wait for a GET of an object, and the last four of these for
        a GET of a range.

        Args:
            kind: the fault:
                `status`: an error with this `status` and `code`; the request is not done.
                `page`: a web page with status 200, as of a proxy; the request is not done.
                `reset`: the connection is reset; without `after_bytes` before the request is done,
                else in the body.
                `lost`: the request is done, and the connection reset before the answer.
                `cut`: the connection ends after `after_bytes`, or half of the body, though
                Content-Length is that of the whole.
                `hang`: nothing is sent for `seconds`, before the request is done or, with
                `after_bytes`, within the body; then the answer continues.
                `slow`: the body comes with `bytes_per_sec`.
                `whole`: status 200 and the whole object in place of the range.
                `wrong_range`: Content-Range has other positions and another size.
                `short_range`: half of the range, as Content-Range and Content-Length say.
                `short_body`: half of the range, with the Content-Range of all of it.
            times: the number of requests that fail.
            skip: the number of requests before them that fit and do not fail.
            path: a regular expression that is found in `bucket/key`.
            method: GET, PUT, ...; empty for all.
            status: the status of `status`.
            code: the code of `status`; empty for the usual one.
            after_bytes: bytes of the body that are sent before.
            seconds: the length of `hang`.
            bytes_per_sec: the speed of `slow`.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind of fault {kind!r}: use one of {', '.join(KINDS)}")
        re.compile(path)
        self._command(
            "fail", kind=kind, times=times, skip=skip, path=path, method=method, status=status,
            code=code, after_bytes=after_bytes, seconds=seconds, bytes_per_sec=bytes_per_sec,
        )  # fmt: skip

    def heal(self) -> None:
        """Removes all faults."""
        self._command("heal")

    def set_bandwidth(self, bytes_per_sec: float | None) -> None:
        """Changes the bandwidth that all connections share."""
        self._command("set_bandwidth", bytes_per_sec=bytes_per_sec)

    # ---------------------------------------------------------------------------------------- log

    def log(self) -> list[Logged]:
        """Returns all requests in the order in which they came, with those still in work."""
        return [Logged(**entry) for entry in self._command("log")]

    def counts(self) -> dict[str, int]:
        """Returns `requests`, `bytes` sent, `connections`, `faults` and `max_in_flight`."""
        names = ("requests", "bytes", "connections", "faults", "max_in_flight")
        return {**dict.fromkeys(names, 0), **self._command("counts")}

    def clear_log(self) -> None:
        """Empties the log and sets the counters to 0, between requests."""
        self._command("clear")

    # ------------------------------------------------------------------------------------ control

    def _command(self, command: str, **settings: Any) -> Any:
        answer = self._exchange([command, settings])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def _exchange(self, message: Any, process: subprocess.Popen[str] | None = None) -> Any:
        process = process or self._process
        assert process is not None, "the server runs only within `with`"
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the test server ended with {process.wait()}")
        return json.loads(answer)


if __name__ == "__main__":
    from tests.remote.serving import main

    main()
