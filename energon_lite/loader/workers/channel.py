"""The way of deliveries from a worker process to the training loop: a socket and an arena.

A message is whole or was not sent: so either side may be killed at any moment, and the other one
learns of it by the end of the socket. Large memory lies in the arena, which both processes map, at
the places that the message has. The training loop answers each delivery when it has taken it: that
is the credit for another one, with the ranges of the arena that are free again.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core import batch_memory
from energon_lite.core.errors import add_note
from energon_lite.loader.workers.arena import Arena, ReadArena
from energon_lite.loader.workers.codec import Packed, unpacked

# Pickled bytes of this size lie in the arena, too: so the socket has room for several deliveries.
_LARGE_BODY = 32 << 10
_READ_BYTES = 1 << 16
# The part of the arena that is returned at once.
_NUM_RETURNED = 100

# How many small deliveries that were quickly made may be unread, and how large they may be
# together: a process that waits for each of them takes as long to wake as to compute half of one.
_MOST_AHEAD, _BYTES_AHEAD, _QUICK_SEC = 32, 512 << 10, 0.001

# Kind of message, its number, and the bytes of its body.
_HEAD = struct.Struct("<BQI")
# A delivery begins with the number of the arena, its length, and how many ranges follow.
_PLACE = struct.Struct("<QQI")
# Start and size of a range.
_RANGE = struct.Struct("<QQ")

# A descriptor that comes beside a message.
_FILE = struct.Struct("i")

# Kinds of messages. To the training loop: a delivery, by the number of its pass; the answer to a
# question, by the number of the question; why the process ends.
DELIVERY, REPORT, FAILED = range(3)
# To the worker process: a delivery was taken; use another arena; a pass; a question.
TAKEN, ARENA, PASS, ASK = range(3, 7)

# What to do about errors of the system in processes that share memory.
_REMEDIES = {
    errno.EMFILE: "each worker process takes three open files: raise the limit (ulimit -n)",
    errno.EFBIG: "batches lie in a file in memory, which may not be so large: raise ulimit -f",
    errno.ENOMEM: "use fewer workers or smaller batches, or raise the limit (ulimit -v)",
    errno.EAGAIN: "use fewer workers, or raise the limit of processes (ulimit -u)",
}


def remedy(error: BaseException) -> str:
    """Returns what to do about an error of the system; "" for other errors."""
    number: Any = getattr(error, "errno", isinstance(error, MemoryError) and errno.ENOMEM)
    return _REMEDIES.get(number, "")


def add_remedy(error: Exception) -> None:
    """Adds the remedy to an error of the system."""
    if not error.args:
        error.args = (remedy(error),)
    elif (note := remedy(error)) and note not in str(error):
        add_note(error, note)


class Closed(Exception):
    """The other end is gone, maybe in the middle of a message."""


class Message(NamedTuple):
    """The messages that one process sends to the other."""

    kind: int
    number: int
    body: bytes


class Channel:
    """One end of a socket that carries messages.

    Args:
        sock: to the other process.

    Attributes:
        files: descriptors that came and were not taken from here.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.files: list[int] = []
        self._buffer = bytearray()
        self._poll = select.poll()
        self.wait_for(sock)

    def wait_for(self, sock: socket.socket) -> None:
        """Lets `is_ready` look at another socket, too."""
        self._poll.register(sock, select.POLLIN)

    def send(
        self, kind: int, number: int = 0, body: bytes = b"", files: Sequence[int] = ()
    ) -> None:
        """Sends a message.

        Raises:
            Closed: The other end is gone.
        """
        message = _HEAD.pack(kind, number, len(body)) + body
        try:
            sent = socket.send_fds(self.sock, [message], files) if files else 0
            self.sock.sendall(message[sent:] if sent else message)
        except TimeoutError:
            raise  # of a signal's handler: the socket waits for any time
        except OSError as error:
            raise Closed from error

    def receive(self) -> Message | None:
        """Returns the next message; None if none has come whole.

        Raises:
            Closed: No other will come.
        """
        while (message := self._whole()) is None:
            try:
                part = self._read()
            except BlockingIOError:
                return None
            except TimeoutError:
                raise  # as in `send`
            except OSError as error:
                raise Closed from error
            if not part:
                raise Closed
            self._buffer += part
        return message

    def _whole(self) -> Message | None:
        if not (end := self._end()):
            return None
        kind, number, _ = _HEAD.unpack_from(self._buffer)
        body = bytes(memoryview(self._buffer)[_HEAD.size : end])
        del self._buffer[:end]
        return Message(kind, number, body)

    def _end(self) -> int:
        """Returns where the next message ends in the buffer; 0 if it has not come whole."""
        if len(self._buffer) < _HEAD.size:
            return 0
        end: int = _HEAD.size + _HEAD.unpack_from(self._buffer)[2]
        return end if len(self._buffer) >= end else 0

    def _read(self) -> bytes:
        flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        # Python 3.11's `recv_fds` has no use for the flags.
        part, beside, _, _ = self.sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_FILE.size), flags)
        for _, _, content in beside:
            self.files += [number for (number,) in _FILE.iter_unpack(content)]
        return part

    def is_ready(self, for_sec: float | None = 0) -> bool:
        """Whether there is something to receive, or the end; waits for it up to some seconds.

        Args:
            for_sec: None for any time.
        """
        if self._end():
            return True
        return bool(self._poll.poll(None if for_sec is None else 1000 * for_sec))


class Outlet:
    """The end at which a worker process sends deliveries.

    Args:
        channel: to the training loop, which sends an arena first.
        num_deliveries: how many the training loop may have to take.
    """

    def __init__(self, channel: Channel, num_deliveries: int) -> None:
        self._channel = channel
        self._num_deliveries = self._most_unread = num_deliveries
        self._num_unread = 0
        self._since = 0.0
        # What may be computed ahead, and what the training loop is done with and has not returned.
        self._num_in_arena = num_deliveries + 3
        self._lock = threading.Lock()
        self._arena: Any = None
        self._arena_number = -1

    def is_wanted(self, is_over: bool = False) -> bool:
        """Waits for room for a delivery; returns False where a pass is ordered instead.

        Args:
            is_over: whether there is no delivery, so that only a pass is waited for.

        Raises:
            Closed: The training loop is gone.
        """
        while True:
            while (message := self._channel.receive()) is not None:
                if message.kind == PASS:
                    return False
                self._take(message)
            if self._num_unread < self._most_unread and not is_over:
                self._since = perf_counter()
                return True
            self._channel.is_ready(None)

    def _take(self, message: Message) -> None:
        """Takes what comes to this end beside a pass: a credit with free ranges, or an arena."""
        with self._lock:
            if message.kind == TAKEN:
                self._num_unread -= 1
                self._arena.put_back(_RANGE.iter_unpack(message.body))
                return
            if not self._channel.files:
                raise OSError(errno.EMFILE, "A worker process has as many files as it may have")
            if self._arena is not None:
                self._arena.leave()
            self._arena = Arena(self._channel.files.pop(), self._num_in_arena)
            self._arena_number += 1
            batch_memory.num_memories += 1

    def send(self, number: int, content: Packed) -> None:
        """Sends a delivery, for which there is room.

        Args:
            number: of the pass.
            content: what it carries; its buffers are taken out of it.
        """
        with self._lock:
            arena = self._arena
            places = arena.place(content.buffers) if content.buffers else []
            num_bytes = sum(length for start, length in places if not arena.shared.get(start))
            body = content.body
            if (size := sum(map(len, body))) >= _LARGE_BODY:
                places.append((arena.write(body), size))
                body = []
            head = _PLACE.pack(self._arena_number, arena.length, len(places))
        ranges = [_RANGE.pack(*place) for place in places]
        self._num_unread += 1
        self._most_unread = self._num_deliveries
        if perf_counter() - self._since < _QUICK_SEC:
            most = min(_MOST_AHEAD, _BYTES_AHEAD // (size + num_bytes))
            self._most_unread = max(self._num_deliveries, most)
        self._channel.send(DELIVERY, number, b"".join([head, *ranges, *body]))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array whose values are not set; a large one is sent without a copy."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            return np.ndarray(shape, dtype, self._arena.empty(size).data)

    def keep_writes(self) -> None:
        """In a fork of the process: separates what it writes from what the process sends."""
        self._arena.keep_writes()


class Inlet:
    """The end at which the training loop receives the deliveries of a worker process.

    Args:
        channel: to the worker process.

    Attributes:
        arena: in which the last delivery lies.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arena_number = 0
        self._next_arena: ReadArena | None = None
        self.arena = self._sent_arena()

    def _sent_arena(self) -> ReadArena:
        arena = ReadArena()
        self._channel.send(ARENA, files=[arena.file])
        return arena

    def take(self, number: int) -> Any:
        """Returns the next delivery of a pass, or the error that it met; None if none has come.

        Args:
            number: of the pass; what is of another one is dropped.

        Raises:
            Closed: None will come.
        """
        while (message := self._channel.receive()) is not None:
            try:
                body, buffers = self._content(message.body)
                if message.number == number:
                    return unpacked(body, buffers)
            finally:
                self._confirm()
        return None

    def _content(self, body: bytes) -> tuple[Any, list[Any]]:
        """Returns the pickled bytes of a delivery, and the memory beside them."""
        arena_number, length, num_ranges = _PLACE.unpack_from(body)
        if arena_number != self._arena_number:
            assert self._next_arena is not None
            self.arena, self._next_arena = self._next_arena, None
            self._arena_number = arena_number
        self.arena.map(length)
        rest = _PLACE.size + num_ranges * _RANGE.size
        ranges = _RANGE.iter_unpack(memoryview(body)[_PLACE.size : rest])
        buffers = [self.arena.read(*place) for place in ranges]
        return (memoryview(body)[rest:] if rest < len(body) else buffers.pop()), buffers

    def _confirm(self) -> None:
        """Reports to the worker process that a delivery was taken, and what is no more in use."""
        with suppress(Closed):  # which the next wait for it reports
            if self.arena.is_left and self._next_arena is None:
                self._next_arena = self._sent_arena()
            free = self.arena.take_returned(_NUM_RETURNED)
            self._channel.send(TAKEN, body=b"".join(_RANGE.pack(*place) for place in free))
