"""Messages between a worker process and the training loop, over a socket that only they share.

A socket reports at once that the other end is gone, also in the middle of a message, and a killed
process can hold no lock that another process waits for. Deliveries are pickled by the worker
process into its arena, with larger arrays and tensors beside the pickled bytes; the socket only
carries where they lie. What cannot be pickled is replaced by an `Unsendable` that names the part,
so that the training loop does not wait for it in vain.
"""

from __future__ import annotations

import copyreg
import dataclasses
import math
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice, repeat
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are pickled
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from energon_lite.core.batch_rows import LARGE_BYTES
from energon_lite.core.samples import SourceInfo
from energon_lite.loader.arena import Arena, LentRange, ReadArena
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
    """A pickled value, of which nothing large was copied yet.

    Attributes:
        body: the pickled bytes, in pieces.
        buffers: memory of arrays and tensors.
    """

    body: list[bytes]
    buffers: list[memoryview]


class _Pieces(list[bytes]):
    """A file that keeps the objects that are written to it."""

    write = list.append


def _reduce_array(array: Any) -> Any:
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    if array.nbytes < _SMALL_BYTES or array.dtype.hasobject or not is_whole:
        return array.__reduce_ex__(4)
    content = pickle.PickleBuffer(array.reshape(-1, order="A").view(np.uint8).data)
    order = "C" if array.flags.c_contiguous else "F"
    return _sent_array, (content, array.shape, array.dtype, order)


def _sent_array(content: Any, shape: Any, dtype: Any, order: Any) -> Any:
    # Of an array that is not writable, pickle returns a view that is not; the memory below it is.
    return np.ndarray(shape, dtype, getattr(content, "obj", content), order=order)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_dense or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _sent_tensor, (tensor.untyped_storage(), tensor.dtype, place)


def _sent_tensor(storage: Any, dtype: torch.dtype, place: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, *place)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    size = storage.nbytes()
    if storage.device.type != "cpu" or size == 0 or storage.is_shared():
        return reduce_storage(storage)  # type: ignore[no-untyped-call]
    content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    if size < _SMALL_BYTES:
        return _sent_storage, (bytearray(content.data),)
    return _sent_storage, (pickle.PickleBuffer(content),)


def _sent_storage(content: Any) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


class _Sources(NamedTuple):
    """The `__sources__` of a batch, pickled by columns: in a third of the time."""

    rows: list[tuple[SourceInfo, ...]]


def _reduce_sources(sources: _Sources) -> Any:
    columns = map(list, zip(*chain.from_iterable(sources.rows), strict=True))
    return _sent_sources, (list(map(len, sources.rows)), *columns)


def _sent_sources(lengths: list[int], *columns: list[Any]) -> list[tuple[SourceInfo, ...]]:
    infos: Any = map(tuple.__new__, repeat(SourceInfo), zip(*columns, strict=True))
    if lengths.count(1) == len(lengths):
        return list(zip(infos, strict=True))
    return [tuple(islice(infos, length)) for length in lengths]


def _by_columns(fields: Any) -> Any:
    """Returns the fields of a batch with its sources as columns, if it has such."""
    rows = fields.get("__sources__") if type(fields) is dict else None
    if type(rows) is not list or set(map(type, rows)) != {tuple}:
        return fields
    are_infos = set(map(type, chain.from_iterable(rows))) == {SourceInfo}
    return {**fields, "__sources__": _Sources(rows)} if are_infos else fields


def _reduce_batch(batch: Any) -> Any:
    reduced = batch.__reduce_ex__(5)
    if len(reduced) < 3 or isinstance(reduced, str):
        return reduced
    made, arguments, state, *rest = reduced
    # Of a class with slots, the state is a pair: attributes and slots.
    state = tuple(map(_by_columns, state)) if type(state) is tuple else _by_columns(state)
    return made, arguments, state, *rest


_REDUCE: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduce_array,
    torch.Tensor: _reduce_tensor,
    torch.UntypedStorage: _reduce_storage,
    _Sources: _reduce_sources,
}


def packed(value: Any) -> Packed:
    """Pickles a value.

    Raises:
        Exception: A part of it cannot be pickled.
    """
    body: Any = _Pieces()
    buffers: list[memoryview] = []

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _SMALL_BYTES:
            return True
        buffers.append(memory)
        return False

    pickler = pickle.Pickler(body, 5, buffer_callback=is_inside)
    registered: Any = ForkingPickler
    table = {**copyreg.dispatch_table, **registered._extra_reducers, **_REDUCE}
    if isinstance(value, Delivery) and type(value.item) is dict:
        value = value._replace(item=_by_columns(value.item))
    elif isinstance(value, Delivery) and hasattr(value.item, "__sources__"):
        table.setdefault(type(value.item), _reduce_batch)
    pickler.dispatch_table = table
    pickler.dump(value)
    return Packed(body, buffers)


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
            packed(part)
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


# Kind of message, number of the pass, length of the arena; start and size of the body, and how many
# buffers there are: the start and size of each follow the body.
_HEAD = struct.Struct("<BIQQQI")
_RANGE = struct.Struct("<QQ")
# Kind of order, its number, and the bytes of its body.
_ORDER = struct.Struct("<BQI")

# Kinds of messages. Before the first message about an arena comes the arena.
DELIVERY, REPORT, ARENA = range(3)
# Kinds of orders: deliveries were taken, so were they and the arena is left, a pass, a question.
TAKEN, LEFT, PASS, ASK = range(4)

Wait = Callable[[], None]


class Closed(Exception):
    """The other end is gone, maybe in the middle of a message."""


class Message(NamedTuple):
    """What a worker process sent.

    Attributes:
        kind: what it is.
        number: of the pass that it belongs to.
        body: a pickled value.
        buffers: memory of its arrays and tensors.
    """

    kind: int
    number: int
    body: Any
    buffers: list[LentRange]

    def unpacked(self) -> Any:
        """Returns the value."""
        return pickle.loads(self.body, buffers=self.buffers)


class Outlet:
    """Where a worker process sends messages.

    Args:
        sock: to the training loop.
        num_deliveries: how many deliveries have room in an arena.
    """

    def __init__(self, sock: socket.socket, num_deliveries: int) -> None:
        self._sock = sock
        self._num_deliveries = num_deliveries
        self._lock = threading.Lock()
        self._arena: Arena | None = None

    def send(self, kind: int, number: int, content: Packed) -> None:
        """Sends a message.

        Args:
            kind: what it is.
            number: of the pass.
            content: what it carries; its buffers are taken out of it.

        Raises:
            OSError: The other end is gone.
        """
        with self._lock:
            arena = self._begun_arena()
            ranges = [_RANGE.pack(*place) for place in arena.place(content.buffers)]
            start, size = arena.write([*content.body, *ranges]), sum(map(len, content.body))
            self._sock.sendall(_HEAD.pack(kind, number, arena.length, start, size, len(ranges)))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array whose values are not set; a large one is sent without a copy."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < LARGE_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            return np.ndarray(shape, dtype, self._begun_arena().empty(size).data)

    def _begun_arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(self._num_deliveries)
            self._sock.sendall(_HEAD.pack(ARENA, 0, 0, 0, 0, 0))
            socket.send_fds(self._sock, [b"."], [self._arena.file])
        return self._arena

    def put_back(self, ranges: memoryview, *, is_left: bool) -> None:
        """Takes back ranges of the arena; where it is left, the next message begins another one."""
        with self._lock:
            if self._arena is not None:
                self._arena.put_back(_RANGE.iter_unpack(ranges))
                if is_left:
                    self._arena.leave()
                    self._arena = None


class Inlet:
    """Where the training loop receives the messages of a worker process.

    Args:
        sock: to the worker process.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._num_taken = 0
        self._left: ReadArena | None = None
        self.arena: ReadArena | None = None

    def receive(self, wait: Wait) -> Message:
        """Returns the next message.

        Args:
            wait: returns when there is something to read; raises where nothing will come.

        Raises:
            Closed: The worker process is gone.
            OSError: This process may have no more open files.
        """
        head = _HEAD.unpack(_read(self._sock, _HEAD.size, wait))
        while head[0] == ARENA:
            self.arena = ReadArena(_read_descriptor(self._sock, wait))
            head = _HEAD.unpack(_read(self._sock, _HEAD.size, wait))
        kind, number, length, start, size, num_buffers = head
        arena = self.arena
        assert arena is not None
        arena.map(length)
        body: Any = arena.read(start, size + num_buffers * _RANGE.size)
        ranges = _RANGE.iter_unpack(body[size:].data) if num_buffers else ()
        return Message(kind, number, body, [arena.read(*place) for place in ranges])

    def confirm(self) -> None:
        """Counts a delivery as taken, and returns what is no more in use of the arena."""
        arena = self.arena
        assert arena is not None
        self._num_taken += 1
        kind = LEFT if arena.is_left and arena is not self._left else TAKEN
        ranges = arena.take_returned()
        body = b"".join(_RANGE.pack(*place) for place in ranges)
        if order(self._sock, kind, self._num_taken, body):
            self._num_taken = 0
            self._left = arena if kind == LEFT else self._left
        else:
            arena.keep_returned(ranges)


def order(sock: socket.socket, kind: int, number: int = 0, body: bytes = b"") -> bool:
    """Sends an order to a worker process; any but a pass only if that needs no wait.

    Returns:
        Whether it was sent.
    """
    try:
        head = _ORDER.pack(kind, number, len(body))
        sock.sendall(head + body, 0 if kind == PASS else socket.MSG_DONTWAIT)
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
        try:
            number = sock.recv_into(rest, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            wait()
            continue
        except OSError as error:
            raise Closed from error
        if number == 0:
            raise Closed
        rest = rest[number:]
    return content


def _read_descriptor(sock: socket.socket, wait: Wait) -> int:
    wait()
    try:
        mark, files, _, _ = socket.recv_fds(sock, 1, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    except OSError as error:
        raise Closed from error
    if not mark:
        raise Closed
    if not files:
        raise OSError(
            "This process has as many open files as it may have, and each worker process needs "
            "one more: raise the limit (ulimit -n)."
        )
    return files[0]
