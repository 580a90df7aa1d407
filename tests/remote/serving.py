"""The process of the test server: connections, faults, latency, bandwidth, the log, its control.

Commands come as lines of JSON over stdin, and each is answered by a line on stdout; the process
ends with its stdin. All runs in one thread, so that no request sees half of a change.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from .dialects import Answer, ObjectService, Request, refusal
from .object_table import ObjectTable, ReadRange

CHUNK = 64 * 1024
BURST_SEC = 0.01  # more than the sleep of an event loop is late
_OF_BODIES = {"cut", "slow", "whole", "wrong_range", "short_range", "short_body"}
_OF_RANGES = {"whole", "wrong_range", "short_range", "short_body"}


@dataclass
class Fault:
    """One fault of `Server.fail`, and how often it still occurs."""

    kind: str
    times: int
    skip: int
    path: str
    method: str
    status: int
    code: str
    after_bytes: int | None
    seconds: float
    bytes_per_sec: float

    def occurs(self, request: Request) -> bool:
        """Returns whether the fault occurs now, and counts."""
        is_read = request.method == "GET" and not request.is_list
        if self.kind in _OF_BODIES and not is_read:
            return False
        if self.kind in _OF_RANGES and "range" not in request.headers:
            return False
        if self.method and self.method != request.method:
            return False
        if not self.times or re.search(self.path, request.path) is None:
            return False
        self.skip -= 1
        if self.skip >= 0:
            return False
        self.times -= 1
        return True


@dataclass
class Entry:
    """A line of the log; `status` is 0 until the header of the answer is sent."""

    method: str
    path: str
    query: dict[str, str]
    range: str
    status: int
    num_bytes: int
    fault: str
    time_sec: float


class Bandwidth:
    """A token bucket of bytes, shared by all that take from it; None is without a limit."""

    def __init__(self, bytes_per_sec: float | None) -> None:
        self.bytes_per_sec = bytes_per_sec
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Waits until the bytes have passed."""
        if not self.bytes_per_sec:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_SEC) + num_bytes / self.bytes_per_sec
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Reads one request; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ", 2)
    fields = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    path, _, query = target.partition("?")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    values = dict(parse_qsl(query, keep_blank_values=True))
    return Request(method, unquote(path).lstrip("/"), values, headers, body)


def spoiled(answer: Answer, kind: str) -> Answer:
    """Changes the header or the length of an answer to a range."""
    if answer.source is None or answer.status != 206:
        return answer
    size, start = answer.source.size, answer.start
    if kind == "whole":
        answer.status, answer.start, answer.stop = 200, 0, size
        del answer.headers["Content-Range"]
    elif kind == "wrong_range":
        answer.headers["Content-Range"] = f"bytes {start + 1}-{answer.stop}/{size + 1}"
    elif kind in ("short_range", "short_body"):
        answer.stop = start + max(answer.num_bytes // 2, 1)
        if kind == "short_range":
            answer.headers["Content-Range"] = f"bytes {start}-{answer.stop - 1}/{size}"
    return answer


def header_of(answer: Answer) -> bytes:
    """Returns the first line and the headers of an answer."""
    phrase = HTTPStatus(answer.status).phrase
    lines = [f"HTTP/1.1 {answer.status} {phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status not in (204, 304):
        lines.append(f"Content-Length: {answer.num_bytes}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclass
class Body:
    """A body on its way: what reads it, the limit of its speed, and who counts it."""

    writer: asyncio.StreamWriter
    read: ReadRange
    bandwidth: Bandwidth
    count: Callable[[int], None]
    chunk: int = CHUNK

    async def send(self, start: int, stop: int, header: bytes = b"") -> None:
        """Sends `[start, stop)`; the header goes with the first bytes."""
        for at in range(start, stop, self.chunk):
            data = self.read(at, min(at + self.chunk, stop))
            await self.bandwidth.take(len(data))
            self.count(len(data))
            self.writer.write(header + data)
            header = b""
            await self.writer.drain()
        if header:
            self.writer.write(header)
            await self.writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset instead of a regular end."""
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class ServerProcess:
    """Serves connections, and does what the lines of its control ask for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        root = settings["root"]
        credentials = settings["credentials"]
        self.table = ObjectTable(Path(root) if root else None)
        self.service = ObjectService(self.table, tuple(credentials) if credentials else None)
        self.settings = settings
        self.errors: list[str] = []
        self.connections: set[asyncio.Task[Any]] = set()
        self.in_flight = 0
        self.command_restore()

    # ------------------------------------------------------------------------------- connections

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, one after the other."""
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)
        self.counts["connections"] += 1
        writer.transport.set_write_buffer_limits(high=0)
        try:
            while (request := await read_request(reader)) is not None:
                self.counts["requests"] += 1
                self.in_flight += 1
                most = max(self.counts["max_in_flight"], self.in_flight)
                self.counts["max_in_flight"] = most
                try:
                    if not await self._exchange(request, writer):
                        break
                finally:
                    self.in_flight -= 1
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client ended the connection, or `restore` did
        except Exception:
            self.errors.append(traceback.format_exc())
        finally:
            writer.close()

    async def _exchange(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; returns whether the connection is still of use."""
        fault = next((fault for fault in self.faults if fault.occurs(request)), None)
        kind = fault.kind if fault else ""
        ranged = request.headers.get("range", "")
        age = time.monotonic() - self.started
        entry = Entry(request.method, request.path, request.query, ranged, 0, 0, kind, age)
        self.log.append(entry)
        if fault:
            self.counts["faults"] += 1
        if self.latency_sec:
            await asyncio.sleep(self.latency_sec)
        if fault and kind == "hang" and fault.after_bytes is None:
            await asyncio.sleep(fault.seconds)
        if len(request.body):
            await self.bandwidth.take(len(request.body))
        if fault and kind == "status":
            answer = refusal(fault.status, "A fault of the test.", fault.code)
        elif kind == "page":
            answer = Answer(200, {"Content-Type": "text/html"}, b"<html>Sign in, please.</html>")
        elif kind == "reset" and fault and fault.after_bytes is None:
            answer = Answer(0)
        else:
            answer = spoiled(self.service.answer(request), kind)
        return await self._send(request, answer, entry, fault, writer)

    async def _send(
        self,
        request: Request,
        answer: Answer,
        entry: Entry,
        fault: Fault | None,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Sends an answer, or a part of it; returns whether the connection is still of use."""
        kind = fault.kind if fault else ""
        with answer.opened() as read:
            if answer.status == 0 or kind == "lost":
                reset(writer)
                return False
            entry.status = answer.status
            body = Body(writer, read, self.bandwidth, partial(self._count_sent, entry))
            if fault and kind == "slow":
                body.bandwidth = Bandwidth(fault.bytes_per_sec)
                body.chunk = max(int(fault.bytes_per_sec / 50), 1)
            start, stop = answer.span
            if request.method == "HEAD":
                stop = start
            middle = min(self._breaks_at(answer, fault), stop)
            await body.send(start, middle, header_of(answer))
            if kind == "reset":
                reset(writer)
            if kind in ("reset", "cut"):
                return False
            if fault and middle < stop:
                await asyncio.sleep(fault.seconds)
                await body.send(middle, stop)
        return True

    def _breaks_at(self, answer: Answer, fault: Fault | None) -> int:
        """The position at which a fault stops the body; its end without one."""
        start, stop = answer.span
        if fault is None or fault.kind not in ("reset", "cut", "hang"):
            return stop
        after = fault.after_bytes
        if after is None:
            after = (stop - start) // 2 if fault.kind == "cut" else stop - start
        return min(start + after, stop)

    def _count_sent(self, entry: Entry, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self.counts["bytes"] += num_bytes

    # ----------------------------------------------------------------------------------- control

    def command_put(self, name: str, data: str | None = None, path: str | None = None) -> str:
        """Writes or replaces an object; returns its ETag."""
        source = Path(path) if path is not None else base64.b64decode(data or "")
        return self.table.put(name, source).etag

    def command_delete(self, name: str) -> None:
        """Deletes an object."""
        self.table.delete(name)

    def command_read(self, name: str) -> str | None:
        """Returns the bytes of an object; None if there is none."""
        found = self.table.find(name)
        if found is None:
            return None
        with found.opened() as read:
            return base64.b64encode(read(0, found.size)).decode()

    def command_fail(self, **fault: Any) -> None:
        """Adds a fault behind those that are left."""
        self.faults.append(Fault(**fault))

    def command_restore(self) -> None:
        """Ends connections, forgets objects, faults, log, and returns to the first settings."""
        for task in self.connections:
            task.cancel()
        self.table.clear()
        self.latency_sec = self.settings["latency_ms"] / 1000
        self.bandwidth = Bandwidth(self.settings["bytes_per_sec"])
        self.faults: list[Fault] = []
        self.command_clear()

    def command_heal(self) -> None:
        """Removes all faults."""
        self.faults.clear()

    def command_set_bandwidth(self, bytes_per_sec: float | None) -> None:
        """Changes the bandwidth."""
        self.bandwidth.bytes_per_sec = bytes_per_sec

    def command_log(self) -> list[dict[str, Any]]:
        """Returns the log."""
        return [asdict(entry) for entry in self.log]

    def command_counts(self) -> dict[str, int]:
        """Returns the counters."""
        return dict(self.counts)

    def command_clear(self) -> None:
        """Empties the log and sets the counters to 0."""
        self.log: list[Entry] = []
        self.counts = Counter[str]()
        self.started = time.monotonic()

    def command_errors(self) -> list[str]:
        """Returns tracebacks of the errors of this server itself."""
        return self.errors


async def serve() -> None:
    """Serves until stdin ends; its first line has the settings, and gets the port as answer."""
    loop = asyncio.get_running_loop()
    control = asyncio.StreamReader(limit=1 << 30)
    protocol = asyncio.StreamReaderProtocol(control)
    await loop.connect_read_pipe(lambda: protocol, sys.stdin)
    process = ServerProcess(json.loads(await control.readline()))
    server = await asyncio.start_server(process.connection, "127.0.0.1", 0, backlog=1024)
    print(json.dumps(server.sockets[0].getsockname()[1]), flush=True)
    while line := await control.readline():
        command, settings = json.loads(line)
        try:
            answer = {"value": getattr(process, f"command_{command}")(**settings)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Serves, and ends at once: no connection is waited for."""
    with suppress(KeyboardInterrupt):
        asyncio.run(serve())
    os._exit(0)
