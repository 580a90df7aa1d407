"""Messages between a worker process and the training loop, over a socket that only they share.

A socket of their own tells each of them at once that the other one has ended, in the middle of a
message, too; and a process that is killed can hold no lock that somebody waits for.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from energon_lite.loader.sending import Packed, close

# Kind of message, number of the pass, buffers, files, bytes of the body; then bytes of each buffer.
_HEAD = struct.Struct("<BIIIQ")
# Kind of order, and its number or the bytes of its body.
_ORDER = struct.Struct("<BQ")
# As many descriptors as one call may send.
_MAX_FILES = 250

Wait = Callable[[], None]


class Closed(Exception):
    """The other end is gone, maybe in the middle of a message."""


class Message(NamedTuple):
    """What a worker process sent.

    Attributes:
        kind: what it is.
        number: of the pass that it belongs to.
        content: a pickled value.
    """

    kind: int
    number: int
    content: Packed


def send(sock: socket.socket, message: Message) -> None:
    """Sends a message, and closes its files.

    Raises:
        OSError: The other end is gone.
    """
    kind, number, (body, buffers, files) = message
    try:
        sizes = struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
        head = _HEAD.pack(kind, number, len(buffers), len(files), len(body)) + sizes
        sock.sendall(head)
        for first in range(0, len(files), _MAX_FILES):
            socket.send_fds(sock, [b"."], files[first : first + _MAX_FILES])
    finally:
        close(files)
    for part in (body, *buffers):
        sock.sendall(part)


def receive(sock: socket.socket, wait: Wait) -> Message:
    """Returns the next message; who asked closes its files.

    Args:
        sock: of the training loop.
        wait: returns when there is something to read; raises where nothing will come.

    Raises:
        Closed: The worker process is gone.
        OSError: This process may have no more open files.
    """
    kind, number, num_buffers, num_files, length = _HEAD.unpack(_read(sock, _HEAD.size, wait))
    sizes = struct.unpack(f"<{num_buffers}Q", _read(sock, 8 * num_buffers, wait))
    files: list[int] = []
    try:
        while len(files) < num_files:
            files += _read_files(sock, min(_MAX_FILES, num_files - len(files)), wait)
        body, *buffers = (_read(sock, size, wait) for size in (length, *sizes))
    except BaseException:
        close(files)
        raise
    return Message(kind, number, Packed(body, buffers, files))


def order(sock: socket.socket, kind: int, number: int) -> bool:
    """Sends an order to a worker process, if that needs no wait; returns whether it was sent."""
    try:
        sock.send(_ORDER.pack(kind, number), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it is gone, which shows where it is waited for
    return True


def order_with(sock: socket.socket, kind: int, body: bytes) -> None:
    """Sends an order with a body to a worker process."""
    with suppress(OSError):  # as above
        sock.sendall(_ORDER.pack(kind, len(body)) + body)


def read_order(sock: socket.socket, wait: Wait) -> tuple[int, int]:
    """Returns the next order, and its number or the bytes of its body.

    Raises:
        Closed: The training loop is gone.
    """
    kind, number = _ORDER.unpack(_read(sock, _ORDER.size, wait))
    return kind, number


def read_body(sock: socket.socket, size: int, wait: Wait) -> memoryview:
    """Returns the body of an order.

    Raises:
        Closed: The training loop is gone.
    """
    return _read(sock, size, wait)


def _read(sock: socket.socket, size: int, wait: Wait) -> memoryview:
    content = np.empty(size, np.uint8).data  # which, unlike bytearray, is not cleared
    rest = content
    while rest.nbytes:
        wait()
        try:
            number = sock.recv_into(rest)
        except OSError as error:
            raise Closed from error
        if number == 0:
            raise Closed
        rest = rest[number:]
    return content


def _read_files(sock: socket.socket, number: int, wait: Wait) -> list[int]:
    wait()
    try:
        mark, files, _, _ = socket.recv_fds(sock, 1, number, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise Closed from error
    if not mark:
        raise Closed
    if len(files) < number:
        close(files)
        raise OSError(
            "This process has as many open files as it may have, and each tensor that a worker "
            "process sends needs one: raise the limit (ulimit -n), keep fewer batches, or call "
            "torch.multiprocessing.set_sharing_strategy('file_system')."
        )
    return files
