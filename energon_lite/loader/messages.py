"""Messages between a worker process and the training loop, in memory that only they share.

Deliveries are pickled by the worker process into its arena, with larger arrays and tensors beside
the pickled bytes, and their places are rows of a ring in shared memory. What cannot be pickled is
replaced by an `Unsendable` that names the part, so that the training loop does not wait for it in
vain. Orders and reports, which are rare, go through a socket. It reports at once that the other end
is gone, also in the middle of a message.
"""

from __future__ import annotations

import copyreg
import dataclasses
import errno
import functools
import math
import mmap
import os
import pickle
import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice, repeat
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from time import perf_counter
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are pickled
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from energon_lite.core.batch_rows import LARGE_BYTES
from energon_lite.core.edataclass import has_own
from energon_lite.core.errors import Ignored, add_note, pass_on
from energon_lite.core.sample_columns import later_fields
from energon_lite.core.samples import Batch, Sample, SourceInfo
from energon_lite.core.state import Snapshot
from energon_lite.loader.arena import Arena, LentRange, ReadArena, nameless_file
from energon_lite.loader.rank_feed import Delivery
from energon_lite.loader.shared_ring import Bell, SharedRing

_MAX_DEPTH = 30
# Smaller tensors and arrays are copied into the pickled bytes.
_SMALL_BYTES = 32 << 10
# Memory that a tensor has less than 1/256 of is taken for a table from this size on.
_TABLE_BYTES = 16 << 20


class Unsendable(NamedTuple):
    """Replaces a batch that cannot be pickled.

    Attributes:
        reason: the part that cannot be pickled, its samples, and the remedy.
    """

    reason: str


# What to do about errors of the system in processes that share memory.
_REMEDIES = {
    errno.EMFILE: "each worker process takes six open files: raise the limit (ulimit -n)",
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


class Packed(NamedTuple):
    """A pickled value, of which nothing large was copied yet.

    Attributes:
        body: the pickled bytes, in pieces.
        buffers: memory of arrays and tensors.
        is_in_columns: whether a delivery is to be made of the value.
    """

    body: list[bytes]
    buffers: list[memoryview]
    is_in_columns: bool


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
    is_here = tensor.device.type == "cpu"
    if is_here and tensor.is_leaf and (tensor.requires_grad or tensor.__dict__):
        return _sent_with, (tensor.detach(), tensor.requires_grad, tensor.__dict__)
    if not is_here or tensor.requires_grad or tensor.layout is not torch.strided:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    is_view = tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    if is_view or tensor.is_quantized:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    storage, start = tensor.untyped_storage(), tensor.storage_offset()
    shape, strides = tuple(tensor.shape), tensor.stride()
    # Tensors of a batch that share memory do so on arrival. Of a few rows of a table, only these
    # are sent; of any part of one that processes share, too.
    if storage.nbytes() > _TABLE_BYTES:
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        span *= 0 not in shape
        least = 1 if storage.is_shared() else 256
        if span * tensor.element_size() * least < storage.nbytes():
            storage, start = tensor.as_strided((span,), (1,)).clone().untyped_storage(), 0
    return _sent_tensor, (storage, tensor.dtype, (start, shape, strides))


def _sent_tensor(storage: Any, dtype: torch.dtype, place: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, *place)


def _sent_with(tensor: torch.Tensor, requires_grad: bool, attributes: Any) -> torch.Tensor:
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    size = storage.nbytes()
    if storage.device.type != "cpu" or size == 0:
        return reduce_storage(storage)  # type: ignore[no-untyped-call]
    # Also of memory that torch shares: it would fetch it from the process, which may have died.
    content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    if size < _SMALL_BYTES:
        return _sent_storage, (bytearray(content.data),)
    return _sent_storage, (pickle.PickleBuffer(content),)


def _sent_storage(content: Any) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


# What pickle asks a type for, and what decides how its attributes are found.
_PICKLING = (
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs_ex__",
    "__getnewargs__", "__getattribute__", "__setattr__",
)  # fmt: skip
# Few training loops look at these fields of a batch: they are made when one of them does.
_LATER = ("__restore_key__", "__subflavors__", "__sources__")
_HEAP_TYPE = 1 << 9  # of a type that a `class` statement made


@functools.lru_cache(maxsize=256)
def _slots_of(made: type) -> tuple[str, ...] | None:
    """Returns the slots of a type of batches, but for those in `_LATER`.

    None if the type has more content than slots and attributes, or defines how they are found or
    pickled.
    """
    base = next((base for base in (Batch, Sample) if issubclass(made, base)), None)
    own = all(kind.__flags__ & _HEAP_TYPE for kind in made.__mro__[:-1])
    if base is None or not own or made in _reducers():
        return None
    names = (*_LATER, "__getattr__")
    if any(getattr(made, name) is not getattr(base, name) for name in names) or any(
        getattr(made, name, None) is not getattr(object, name, None) for name in _PICKLING
    ):
        return None
    slots: list[str] = copyreg._slotnames(made)  # type: ignore[attr-defined]
    return tuple(name for name in slots if name not in (*_LATER, "_later"))


def _in_columns(delivery: Delivery) -> tuple[Any, ...] | None:
    """Returns what `_delivery_of` makes a delivery of: few objects, as the rest is in columns.

    Functions and types are looked up by pickle, by name; so columns of the batch have none. None is
    returned for a batch that defines how it is pickled.
    """
    item, snapshot = delivery.item, delivery.snapshot
    made: Any = type(item)
    values: Any
    if made is dict:
        own = {name: item[name] for name in _LATER if name in item}
        made, attributes, values, columns = None, {**item, **dict.fromkeys(own)}, (), None
    elif (slots := _slots_of(made)) is not None:
        try:
            values = [getattr(item, name) for name in slots]
            columns = _sample_columns(item)
            # Of those in the columns, only what was set since.
            names = [name for name in _LATER if columns is None or has_own(item, name)]
            own = {name: getattr(item, name) for name in names}
        except AttributeError:  # a field was deleted
            return None
        attributes = vars(item)
    else:
        return None
    if columns is None and (columns := _source_columns(own.get("__sources__"))) is not None:
        own["__sources__"] = None
    later = pickle.dumps((own, columns), 5)
    place = None if snapshot is None else pickle.dumps(snapshot, 5)
    return (made, attributes, values, later, place, *delivery[1:3], *delivery[4:])


def _sample_columns(item: Any) -> tuple[Any, ...] | None:
    """Returns what the fields of a batch that were left for later are made of."""
    later: Any = getattr(item, "_later", None)
    if getattr(later, "func", None) is not later_fields:
        return None
    origins, restore_keys, *columns = later.args
    own = {name: tuple(origins[name]) for name in {key[0] for key in restore_keys}}
    return own, restore_keys, *columns


def _source_columns(sources: Any) -> tuple[Any, ...] | None:
    """Returns the sources of a batch as columns, with the number of sources of each sample."""
    lengths: list[int] | None = None
    if type(sources) is list and set(map(type, sources)) == {tuple}:
        lengths, sources = [*map(len, sources)], [*chain.from_iterable(sources)]
    elif type(sources) is not tuple:
        return None
    if set(map(type, sources)) != {SourceInfo}:
        return None
    return lengths, *zip(*sources, strict=True)


def _made_of(content: bytes) -> dict[str, Any]:
    """Returns the service fields of a batch that were left for later."""
    own, columns = pickle.loads(content)
    if columns is not None and isinstance(columns[0], dict):
        own = later_fields(*columns) | own
    elif columns is not None:
        lengths, *columns = columns
        infos: Any = map(tuple.__new__, repeat(SourceInfo), zip(*columns, strict=True))
        if lengths is None:
            own["__sources__"] = tuple(infos)
        else:
            own["__sources__"] = [tuple(islice(infos, length)) for length in lengths]
    return own  # type: ignore[no-any-return]


def _delivery_of(
    made: Any, attributes: Any, values: Any, later: bytes, place: bytes | None,
    slot: int, stream: int, *rest: Any,
) -> Delivery:  # fmt: skip
    snapshot = None if place is None else SentSnapshot(place)
    if made is None:
        attributes.update(_made_of(later))
        return Delivery(attributes, slot, stream, snapshot, *rest)
    item = made.__new__(made)
    for name, value in zip(_slots_of(made), values, strict=True):  # type: ignore[arg-type]
        setattr(item, name, value)
    if attributes:
        vars(item).update(attributes)
    item._later = functools.partial(_made_of, later)
    return Delivery(item, slot, stream, snapshot, *rest)


class SentSnapshot(Snapshot):
    """A snapshot that came from a worker process; most are followed by the next one unread.

    Args:
        content: its pickled bytes.
    """

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        """Returns a field, after all of them were made."""
        if name not in _FIELDS:
            raise AttributeError(name)
        made = pickle.loads(self._content)
        for field in _FIELDS:
            setattr(self, field, getattr(made, field))
        return getattr(made, name)

    def __reduce__(self) -> Any:
        """Sends the bytes as they are."""
        return SentSnapshot, (self._content,)


_FIELDS = tuple(field.name for field in dataclasses.fields(Snapshot))


_REDUCE: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduce_array,
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: methodcaller("__reduce_ex__", 5),
    torch.UntypedStorage: _reduce_storage,
}


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """Returns how values are pickled, by type."""
    registered: Any = ForkingPickler
    # Of other numbers if a module of a hook has registered a type.
    return _merged(len(copyreg.dispatch_table), len(registered._extra_reducers))


@functools.lru_cache(maxsize=1)
def _merged(*_: int) -> dict[type, Callable[[Any], Any]]:
    registered: Any = ForkingPickler
    return {**copyreg.dispatch_table, **registered._extra_reducers, **_REDUCE}


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

    columns = _in_columns(value) if isinstance(value, Delivery) else None
    pickler = pickle.Pickler(body, 5, buffer_callback=is_inside)
    pickler.dispatch_table = _reducers()
    pickler.dump(value if columns is None else columns)
    return Packed(body, buffers, columns is not None)


class WorkerError(ExceptionWrapper):
    """The error that is being handled in a worker, for the training loop.

    Args:
        where: names the worker.
    """

    parts: tuple[Any, Any] | None = None  # of an error that cannot be made of its text

    def __init__(self, where: str) -> None:
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        error: Any = sys.exc_info()[1]
        try:
            self.reraise()
        except BaseException as found:
            if isinstance(found, self.exc_type):
                return
        try:
            self.parts = pickle.loads(pickle.dumps((error.args, vars(error))))
            self._made()
        except Exception:  # then its text names the type
            self.exc_type, self.parts = RuntimeError, None

    def _made(self) -> Any:
        args, attributes = self.parts or ((), {})
        made: Any = self.exc_type.__new__(self.exc_type, *args)
        vars(made).update(attributes)
        add_note(made, f"It was raised {self.where}. Original {self.exc_msg}")
        return made

    def reraise(self) -> None:
        """Raises it, of its type if that can be made, with its text and traceback."""
        if self.parts is not None:
            raise self._made()
        super().reraise()  # type: ignore[no-untyped-call]


def packed_delivery(value: Delivery | WorkerError) -> Packed:
    """Pickles a delivery, or an error; in place of what cannot be pickled, the reason."""
    try:
        return packed(value)
    except Exception as error:
        if isinstance(value, WorkerError):
            value.exc_type, value.parts = RuntimeError, None  # its own cannot be pickled
            return packed(value)
        reason = Unsendable(_reason(value.item, error))
        return packed(value._replace(item=reason, snapshot=None, skipped=[]))


class WorkerJob:
    """What a worker process is to do.

    It is pickled apart, so that an error names its part, and that of `__call__` reaches the loop.

    Args:
        parts: of the job.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __call__(self) -> Any:
        """Returns the parts."""
        return self._parts

    def __reduce__(self) -> Any:
        """Pickles the parts.

        Raises:
            TypeError: A part cannot be pickled; names it.
        """
        try:
            content: Any = ForkingPickler.dumps(self._parts)
        except Exception as error:
            path, part = unpicklable_part(self._parts, "", ForkingPickler.dumps)
            raise TypeError(
                f"{path.rpartition(' of ')[2]} is a {_what(part)}, which cannot be sent to a "
                f"worker process ({error}). It belongs to the task encoder, or to another object "
                f"that the dataset was made with. {WAYS}"
            ) from error
        return functools.partial, (pickle.loads, bytes(content))


WAYS = (
    "Define classes and functions at the top level of a module that can be imported, or use "
    'WorkerConfig(start_method="fork") or WorkerConfig(worker_type="thread").'
)


def _what(part: Any) -> str:
    name = getattr(part, "__qualname__", None)
    return f"{type(part).__name__} {name}" if isinstance(name, str) else type(part).__qualname__


def _reason(item: Any, error: Exception) -> str:
    path, part = unpicklable_part(item)
    keys = item.get("__key__") if isinstance(item, Mapping) else getattr(item, "__key__", None)
    samples = f" Samples: {str(keys)[:300]}." if keys else ""
    return (
        f"{path} is a {_what(part)}, which cannot be sent from a worker process to the training "
        f"loop ({type(error).__name__}: {error}).{samples} Leave it out of the batch "
        "(encode_batch, or the hook that adds it), define it at the top level of a module, or use "
        "WorkerConfig(num_workers=0)."
    )


def _unpickled(body: memoryview, buffers: Any) -> Any:
    try:
        return pickle.loads(body, buffers=buffers)
    except Exception as error:
        text = "A batch of a worker process cannot be unpickled: the class whose function is last "
        add_note(error, text + 'here refuses. Send another type, or use worker_type="thread"')
        raise


def unpicklable_part(
    value: Any, path: str = "batch", dumps: Callable[[Any], Any] = packed, depth: int = 0
) -> tuple[str, Any]:
    """Returns the innermost part of a value that cannot be pickled, and the way to it.

    Example:
        >>> unpicklable_part({"meta": [1, print, lambda: 0]})[0]
        "batch['meta'][2]"
    """
    for name, part in _parts(value) if depth < _MAX_DEPTH else ():
        try:
            dumps(part)
        except Exception:
            return unpicklable_part(part, path + name, dumps, depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif isinstance(value, MethodType):
        yield f" of {type(value.__self__).__qualname__}", value.__self__
    elif not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


# A delivery: number of the pass; number of the arena and its length; start and size of the pickled
# bytes, and how many buffers there are: the start and size of each follow these bytes; whether
# the delivery is in columns; and how many deliveries may be unread.
_COLUMNS = 8
# How many small deliveries that were quickly made may be unread, and how large they may be
# together: to wake a process takes about half as long as to compute one.
_MOST_AHEAD, _BYTES_AHEAD, _QUICK_SEC = 32, 512 << 10, 0.001
# What is returned of the arena: start and size.
_RANGE = struct.Struct("<QQ")
_NUM_RETURNED = 500
# Kind of order, its number, and the bytes of its body.
_ORDER = struct.Struct("<BQI")
# Number of the question, and the bytes of the answer.
_REPORT = struct.Struct("<QI")

# Number of the report of a process that ends; questions have others.
FAILED = 0
# Kinds of orders: another arena, a pass, a question.
LEAVE, PASS, ASK = range(3)

Wait = Callable[[], None]


class Closed(Exception):
    """The other end is gone, maybe in the middle of a message."""


class _Shared:
    """The rings and bells of a worker process, as one end has them.

    Args:
        file: descriptor of the memory of the rings.
        num_deliveries: how many there may be that the training loop has not taken.
        has_delivery: rung by the worker process.
        has_room: rung by the training loop.
    """

    def __init__(self, file: int, num_deliveries: int, has_delivery: Bell, has_room: Bell) -> None:
        sizes = (max(num_deliveries, _MOST_AHEAD), _COLUMNS), (_NUM_RETURNED, 2)
        first, second = (SharedRing.num_bytes(*size) for size in sizes)
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, first + second)
        memory = memoryview(mmap.mmap(file, first + second))
        self.deliveries = SharedRing(memory[:first], *sizes[0])
        self.returned = SharedRing(memory[first:], *sizes[1])
        self.has_delivery = has_delivery
        self.has_room = has_room


class Outlet:
    """Where a worker process sends deliveries.

    Args:
        sock: to the training loop.
        num_deliveries: how many the training loop may have to take.
        wait: returns when there is something to read in the socket; raises where nothing will come.

    Raises:
        Closed: The training loop is gone.
    """

    def __init__(self, sock: socket.socket, num_deliveries: int, wait: Wait) -> None:
        arena, rings, *bells = _read_descriptors(sock, wait, 4)
        self._sock = sock
        half = len(bells) // 2
        self._shared = _Shared(rings, num_deliveries, Bell(bells[:half]), Bell(bells[half:]))
        os.close(rings)
        self._num_deliveries = self._most_unread = num_deliveries
        self._since = 0.0
        # What may be computed ahead, and what the training loop is done with and has not returned.
        self._num_in_arena = num_deliveries + 3
        self._lock = threading.Lock()
        self._arena = Arena(arena, self._num_in_arena)
        self._arena_number = 0
        # Pickled bytes that the training loop may still read.
        self._bodies: deque[tuple[Arena, tuple[int, int]]] = deque()

    def send(self, number: int, content: Packed) -> None:
        """Sends a delivery, for which there is room.

        Args:
            number: of the pass.
            content: what it carries; its buffers are taken out of it.
        """
        deliveries = self._shared.deliveries
        with self._lock:
            self._take_back()
            arena = self._arena
            places = arena.place(content.buffers) if content.buffers else []
            size, end = sum(map(len, content.body)), len(places) * _RANGE.size
            start = arena.write([*content.body, *[_RANGE.pack(*p) for p in places]])
            self._set_most_unread(size + sum([part[1] for part in places]))
            self._bodies.append((arena, (start, size + end)))
            row = (
                number, self._arena_number, arena.length, start, size, len(places),
                content.is_in_columns, self._most_unread,
            )  # fmt: skip
            if deliveries.put([row]):
                self._shared.has_delivery.ring()

    def _set_most_unread(self, size: int) -> None:
        """Decides how many deliveries may be unread, by the size of the last one and its time."""
        now, since = perf_counter(), self._since
        self._since, self._most_unread = now, self._num_deliveries
        if now - since < _QUICK_SEC:
            most = min(_MOST_AHEAD, _BYTES_AHEAD // size)
            self._most_unread = max(self._num_deliveries, most)

    def await_room(self) -> None:
        """Waits until there may be room for a delivery, or `wake` is called."""
        shared, most = self._shared, self._most_unread
        # Where many may be unread, some of them are to be read before it continues.
        until = max(self._num_deliveries - 1, most // 2)
        if shared.deliveries.lacks_room(most, until):
            if shared.deliveries.is_awaited:
                shared.has_delivery.ring()
            shared.has_room.wait()
            self._since = perf_counter()

    def has_room(self) -> bool:
        """Whether a delivery may be sent."""
        return self._shared.deliveries.num_unread < self._most_unread

    def wake(self) -> None:
        """Ends a wait for room, from another thread."""
        self._shared.has_room.ring()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an array whose values are not set; a large one is sent without a copy."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < LARGE_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            return np.ndarray(shape, dtype, self._arena.empty(size).data)

    def keep_writes(self) -> None:
        """In a fork of the process: separates what it writes from what the process sends."""
        self._arena.keep_writes()

    def _take_back(self) -> None:
        """Takes back what the training loop is done with."""
        for _ in range(len(self._bodies) - self._shared.deliveries.num_unread):
            arena, body = self._bodies.popleft()
            arena.put_back([body])
        returned = []
        while (row := self._shared.returned.peek()) is not None:
            returned.append(row)
            self._shared.returned.drop()
        if returned:
            self._arena.put_back(returned)

    def leave(self, wait: Wait) -> None:
        """Leaves the arena for another one, whose descriptor comes next."""
        (file,) = _read_descriptors(self._sock, wait, 1)
        with self._lock:
            self._take_back()
            self._arena.leave()
            self._arena = Arena(file, self._num_in_arena)
            self._arena_number += 1


class Inlet:
    """Where the training loop receives the deliveries of a worker process.

    Args:
        sock: to the worker process.
        num_deliveries: how many there may be that were not taken.

    Attributes:
        arena: in which the last delivery lies.
    """

    def __init__(self, sock: socket.socket, num_deliveries: int) -> None:
        self._sock = sock
        self._arena_number = 0
        self._num_deliveries = num_deliveries
        self._num_awaited = 1
        self._next_arena: ReadArena | None = None
        self._part_of_report = b""
        try:
            self._share(num_deliveries)
        except OSError as error:
            text = f"No memory can be shared with a worker process ({error.strerror})"
            raise OSError(error.errno, f"{text}; {remedy(error)}") from error
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._shared.has_delivery.files[0], select.POLLIN)

    def _share(self, num_deliveries: int) -> None:
        """Makes all that is shared, and sends it to the worker process."""
        self.arena = ReadArena()
        bells = Bell(), Bell()
        rings = nameless_file()
        try:
            self._shared = _Shared(rings, num_deliveries, *bells)
            files = [self.arena.file, rings, *bells[0].files, *bells[1].files]
            socket.send_fds(self._sock, [b"."], files)
        finally:
            os.close(rings)

    def is_ready(self, for_sec: float = 0) -> bool:
        """Whether there is a delivery, or something to read in the socket; may return early."""
        # A worker process that makes many in a short time is to ring once for several.
        for num, sec in (self._num_awaited, min(for_sec, _QUICK_SEC)), (1, for_sec):
            if not self._shared.deliveries.is_empty(num):
                return True
            for file, _ in self._poll.poll(1000 * sec):
                if file == self._sock.fileno():
                    return True
                self._shared.has_delivery.wait()
        return not self._shared.deliveries.is_empty()

    def take(self, number: int) -> Any:
        """Returns the next delivery of a pass, or the error that it met; None if none has come.

        Args:
            number: of the pass; what is of another one is dropped.
        """
        while (row := self._shared.deliveries.peek()) is not None:
            try:
                body, buffers = self._content(*row[1:-2])
                if row[0] == number:
                    most = row[-1]
                    self._num_awaited = most // 2 if most > self._num_deliveries else 1
                    value = _unpickled(body, buffers)
                    return _delivery_of(*value) if row[-2] else value
            finally:
                self._confirm()
        return None

    def _content(
        self, arena_number: int, length: int, start: int, size: int, num_buffers: int
    ) -> tuple[memoryview, list[LentRange]]:
        if arena_number != self._arena_number:
            assert self._next_arena is not None
            self.arena, self._next_arena = self._next_arena, None
            self._arena_number = arena_number
        arena = self.arena
        arena.map(length)
        end = start + size
        ranges = arena.bytes(end, end + num_buffers * _RANGE.size) if num_buffers else b""
        return arena.bytes(start, end), [arena.read(*p) for p in _RANGE.iter_unpack(ranges)]

    def _confirm(self) -> None:
        """Lets the worker process use again what is no more in use."""
        arena, returned = self.arena, self._shared.returned
        if arena.is_left and self._next_arena is None:
            self._next_arena = ReadArena()
            order(self._sock, LEAVE)
            with suppress(OSError):  # it has ended, which the next wait for it reports
                socket.send_fds(self._sock, [b"."], [self._next_arena.file])
        elif arena.returned and (ranges := arena.take_returned(returned.num_free)):
            returned.put(ranges)
        if self._shared.deliveries.drop():
            self._shared.has_room.ring()

    def take_report(self) -> tuple[int, str] | None:
        """Returns the number of a question and the answer to it; None if none has come whole.

        Raises:
            Closed: The worker process is gone.
        """
        while True:
            buffer = self._part_of_report
            if len(buffer) >= _REPORT.size:
                number, size = _REPORT.unpack_from(buffer)
                end = _REPORT.size + size
                if len(buffer) >= end:
                    self._part_of_report = buffer[end:]
                    return number, buffer[_REPORT.size : end].decode()
            try:
                part = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                pass_on(error)
                raise Closed from error
            if not part:
                raise Closed
            self._part_of_report += part


def report(sock: socket.socket, number: int, text: str) -> None:
    """Answers a question of the training loop."""
    body = text.encode(errors="replace")
    with suppress(ConnectionError):  # it is gone, which the next order reports
        sock.sendall(_REPORT.pack(number, len(body)) + body)


def order(sock: socket.socket, kind: int, number: int = 0, body: bytes = b"") -> None:
    """Sends an order to a worker process; a question only if that needs no wait."""
    head = _ORDER.pack(kind, number, len(body))
    # One that has ended is reported by the next wait for it; one that does not read is stuck.
    with Ignored(OSError):
        sock.sendall(head + body, socket.MSG_DONTWAIT if kind == ASK else 0)


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


def _read_descriptors(sock: socket.socket, wait: Wait, at_least: int) -> list[int]:
    wait()
    try:
        mark, files, _, _ = socket.recv_fds(sock, 1, 6, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    except OSError as error:
        raise Closed from error
    if not mark:
        raise Closed
    if len(files) < at_least:
        raise OSError(errno.EMFILE, "A worker process has as many open files as it may have")
    return files
