"""Messages between a worker process and the training loop, over a socket that only they share.

A socket reports at once that the other end is gone, also in the middle of a message, and a killed
process can hold no lock that another process waits for. Deliveries are pickled by the worker
process. The memory of a tensor is sent as a file descriptor, which the training loop maps without
a copy; small tensors and other arrays are sent as bytes. What cannot be pickled is replaced by an
`Unsendable` that names the part, so that the training loop does not wait for it in vain.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are pickled
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import reduce_storage

from energon_lite.loader.rank_feed import Delivery

_MAX_DEPTH = 30
# Smaller tensors and arrays are copied into the pickled bytes.
_SMALL_BYTES = 32 << 10


class Unsendable(NamedTuple):
    """Replaces a batch that cannot be pickled.

    Attributes:
        reason: the part that cannot be pickled, its samples, and the remedy.
    """

    reason: str


class Packed(NamedTuple):
    """A pickled value, and the memory that goes beside it.

    Attributes:
        body: the pickled value.
        buffers: memory of arrays, to be copied.
        files: descriptors of the memory of tensors, to be mapped; the caller closes them.
    """

    body: memoryview
    buffers: Sequence[memoryview]
    files: Sequence[int]


class _Beside:
    """The memory beside pickled bytes. It knows no pickler, so none of them stays in a cycle."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.files: list[int] = []

    def reduce_array(self, array: Any) -> Any:
        """Pickles an array."""
        is_whole = array.flags.c_contiguous or array.flags.f_contiguous
        if array.nbytes < _SMALL_BYTES or array.dtype.hasobject or not is_whole:
            return array.__reduce_ex__(4)
        self.buffers.append(array.reshape(-1, order="A").view(np.uint8).data)
        order = "C" if array.flags.c_contiguous else "F"
        return _sent_array, (len(self.buffers) - 1, array.shape, array.dtype, order)

    def reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        """Pickles the memory of tensors."""
        size = storage.nbytes()
        if storage.device.type != "cpu" or size == 0:
            return reduce_storage(storage)  # type: ignore[no-untyped-call]
        if storage.is_shared():
            self.files.append(os.dup(storage._share_fd_cpu_()[0]))
            return _sent_storage, (len(self.files) - 1, size)
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
        if size < _SMALL_BYTES:
            return _copied_storage, (bytearray(memory),)
        # Not torch's own shared memory: it has a name for a moment, which a killed process leaves
        # behind, and containers limit its size.
        self.files.append(os.memfd_create("batch", os.MFD_CLOEXEC))
        written = 0
        while written < size:
            written += os.write(self.files[-1], memory[written:])
        return _sent_storage, (len(self.files) - 1, size)


def _copied_storage(content: bytearray) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


# In pickled bytes these two stand for functions that know the memory beside them.
def _sent_array(content: Packed, index: int, shape: Any, dtype: Any, order: Any) -> Any:
    return np.ndarray(shape, dtype, content.buffers[index], order=order)


def _sent_storage(content: Packed, index: int, size: int) -> Any:
    storages: Any = torch.UntypedStorage
    return storages._new_shared_fd_cpu(content.files[index], size)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: Packed) -> None:
        super().__init__(io.BytesIO(content.body))
        self._content = content

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a pickled name means."""
        found = super().find_class(module, name)
        is_beside = found is _sent_array or found is _sent_storage
        return partial(found, self._content) if is_beside else found


def packed(value: Any) -> Packed:
    """Pickles a value.

    Raises:
        Exception: A part of it cannot be pickled.
    """
    file = io.BytesIO()
    beside = _Beside()
    pickler = ForkingPickler(file)
    reduce = {**pickler.dispatch_table, np.ndarray: beside.reduce_array}
    # Who chose torch's other strategy has more tensors than a process may have files.
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy == "file_descriptor" and hasattr(os, "memfd_create"):
        reduce[torch.UntypedStorage] = beside.reduce_storage
    pickler.dispatch_table = reduce
    try:
        pickler.dump(value)
    except BaseException:
        close(beside.files)
        raise
    return Packed(file.getbuffer(), beside.buffers, beside.files)


def packed_delivery(value: Delivery | ExceptionWrapper) -> Packed:
    """Pickles a delivery, or an error; in place of what cannot be pickled, the reason."""
    try:
        return packed(value)
    except Exception as error:
        if isinstance(value, ExceptionWrapper):
            value.exc_type = RuntimeError  # its own type cannot be pickled; the text names it
            return packed(value)
        reason = Unsendable(_reason(value.item, error))
        return packed(value._replace(item=reason, snapshot=None, skipped=[]))


def unpacked(content: Packed) -> Any:
    """Returns the value; the descriptors may be closed then."""
    return _Unpickler(content).load()


def close(files: Sequence[int]) -> None:
    """Closes descriptors."""
    for file in files:
        os.close(file)


def _reason(item: Any, error: Exception) -> str:
    path, part = unpicklable_part(item)
    name = getattr(part, "__qualname__", None)
    what = f"{type(part).__name__} {name}" if isinstance(name, str) else type(part).__qualname__
    keys = item.get("__key__") if isinstance(item, Mapping) else getattr(item, "__key__", None)
    samples = f" Samples: {str(keys)[:300]}." if keys else ""
    return (
        f"{path} is a {what}, which cannot be sent from a worker process to the training loop "
        f"({type(error).__name__}: {error}).{samples} Leave it out of the batch (encode_batch, or "
        "the hook that adds it), define it at the top level of a module, or use "
        "WorkerConfig(num_workers=0)."
    )


def unpicklable_part(value: Any, path: str = "batch", depth: int = 0) -> tuple[str, Any]:
    """Returns the innermost part of a value that cannot be pickled, and the way to it.

    Example:
        >>> unpicklable_part({"meta": [1, print, lambda: 0]})[0]
        "batch['meta'][2]"
    """
    for name, part in _parts(value) if depth < _MAX_DEPTH else ():
        try:
            close(packed(part).files)
        except Exception:
            return unpicklable_part(part, path + name, depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


# Kind of message, number of the pass, buffers, files, bytes of the body; then bytes of each buffer.
_HEAD = struct.Struct("<BIIIQ")
# Kind of order, its number, and the bytes of its body.
_ORDER = struct.Struct("<BQQ")
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
    """Returns the next message; the caller closes its files.

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


def order(sock: socket.socket, kind: int, number: int = 0, body: bytes = b"") -> bool:
    """Sends an order to a worker process; one without a body only if that needs no wait.

    Returns:
        Whether it was sent.
    """
    try:
        head = _ORDER.pack(kind, number, len(body))
        sock.sendall(head + body, 0 if body else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it has ended, which the next wait for it reports
    return True


def read_order(sock: socket.socket, wait: Wait) -> tuple[int, int, memoryview]:
    """Returns the next order, its number and its body.

    Raises:
        Closed: The training loop is gone.
    """
    kind, number, size = _ORDER.unpack(_read(sock, _ORDER.size, wait))
    return kind, number, _read(sock, size, wait)


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
