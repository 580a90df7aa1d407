"""Makes bytes of deliveries, whatever the channel: pickled, with large memory beside them.

Larger arrays and tensors are not in the pickled bytes (protocol 5), so that a channel may put them
where they need no copy. What cannot be pickled is replaced by an error that names the part, so that
the training loop does not wait for it in vain.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are pickled
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from energon_lite.core.errors import add_note
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.workers.arena import LentRange
from energon_lite.loader.workers.rank_feed import Delivery

_MAX_DEPTH = 30
# Smaller tensors and arrays are copied into the pickled bytes.
_SMALL_BYTES = 32 << 10
# Memory that a tensor has less than 1/256 of is taken for a table from this size on.
_TABLE_BYTES = 16 << 20


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
    # pickle returns a view that is not writable of such an array; the memory below it is.
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
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)


def _sent_with(tensor: torch.Tensor, requires_grad: bool, attributes: Any) -> torch.Tensor:
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    size = storage.nbytes()
    if storage.device.type != "cpu" or size == 0:
        return reduce_storage(storage)  # type: ignore[no-untyped-call]
    # Also of memory that torch shares: it would fetch it from the process, which may have died.
    content: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    if size < _SMALL_BYTES:
        return _sent_storage, (bytearray(content.data),)
    return _sent_storage, (pickle.PickleBuffer(content),)


def _sent_storage(content: Any) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


class SentSnapshot(Snapshot):
    """A snapshot that is made of its bytes when it is looked at.

    Args:
        content: its pickled bytes.
        buffers: the memory beside them. Rows that the worker process still changes are there as
            they are now: the snapshot knows what it has of them.
    """

    __slots__ = ("_buffers", "_content")

    def __init__(self, content: bytes, buffers: Sequence[Any]) -> None:
        self._content, self._buffers = content, buffers

    def __getattr__(self, name: str) -> Any:
        """Returns a field, after all of them were made."""
        if name not in _FIELDS:
            raise AttributeError(name)
        made = pickle.loads(self._content, buffers=self._buffers)
        for field in _FIELDS:
            setattr(self, field, getattr(made, field))
        return getattr(made, name)


def _reduce_sent(snapshot: SentSnapshot) -> Any:
    """Sends the bytes as they are, from the worker process; elsewhere it is sent as any other."""
    return SentSnapshot, (snapshot._content, [*map(pickle.PickleBuffer, snapshot._buffers)])


_FIELDS = tuple(field.name for field in dataclasses.fields(Snapshot))


_REDUCE: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduce_array,
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: methodcaller("__reduce_ex__", 5),
    torch.UntypedStorage: _reduce_storage,
    SentSnapshot: _reduce_sent,
}


def _reduce_rows(array: Any) -> Any:
    """Shares the memory of rows that only grow, where it can be shared."""
    block = getattr(array.base, "base", None)
    if not isinstance(block, LentRange) or block.nbytes < _SMALL_BYTES:
        return array.__reduce_ex__(5)
    block.is_shared = True
    start = array.__array_interface__["data"][0] - block.__array_interface__["data"][0]
    content = pickle.PickleBuffer(block.data)
    return np.ndarray, (array.shape, array.dtype, content, start, array.strides)


_OF_SNAPSHOTS: dict[type, Callable[[Any], Any]] = {np.ndarray: _reduce_rows}


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """Returns how values are pickled, by type."""
    registered: Any = ForkingPickler
    # The numbers change if a module of a hook registers a type.
    return _merged(len(copyreg.dispatch_table), len(registered._extra_reducers))


@functools.lru_cache(maxsize=1)
def _merged(*_: int) -> dict[type, Callable[[Any], Any]]:
    registered: Any = ForkingPickler
    return {**copyreg.dispatch_table, **registered._extra_reducers, **_REDUCE}


def packed(value: Any, reducers: Mapping[type, Callable[[Any], Any]] | None = None) -> Packed:
    """Pickles a value.

    Args:
        value: whatever can be pickled.
        reducers: how values are pickled, by type; by default as those of batches.

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
    pickler.dispatch_table = reducers or _reducers()
    pickler.dump(value)
    return Packed(body, buffers)


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


def packed_delivery(value: Delivery | WorkerError, where: str) -> Packed:
    """Pickles a delivery, or an error; in place of what cannot be pickled, an error.

    Args:
        value: of the worker.
        where: names the worker.
    """
    try:
        if isinstance(value, Delivery) and value.snapshot is not None:
            # Most snapshots are followed by the next one unread.
            body, buffers = packed(value.snapshot, _OF_SNAPSHOTS)
            value = value._replace(snapshot=SentSnapshot(b"".join(body), buffers))
        return packed(value)
    except Exception as error:
        if isinstance(value, WorkerError):
            value.exc_type, value.parts = RuntimeError, None  # its own cannot be pickled
            return packed(value)
        try:
            raise TypeError(_reason(value.item, error)) from error
        except TypeError:
            return packed(WorkerError(where))


class WorkerJob:
    """An order to a worker process.

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
        return functools.partial, (pickle.loads, settings_bytes(ForkingPickler, self._parts))


def settings_bytes(kind: Any, settings: Any) -> bytes:
    """Pickles settings of workers; the process groups of a `WorkerConfig` become their names.

    Args:
        kind: the class of the pickler.
        settings: what the workers need.

    Raises:
        TypeError: A part cannot be pickled; names it.
    """
    dumps = functools.partial(_dumps, kind)
    try:
        return dumps(settings)
    except Exception as error:
        raise unsendable(settings, error, dumps) from error


def _dumps(kind: Any, settings: Any) -> bytes:
    def reducer_override(self: Any, value: Any) -> Any:
        if type(value) is WorkerConfig:
            return _without_groups(value)
        # The pickler for multiprocessing has no such method, that of Ray has.
        return kind.reducer_override(self, value) if has_own else NotImplemented

    has_own, file = hasattr(kind, "reducer_override"), io.BytesIO()
    type("SettingsPickler", (kind,), {"reducer_override": reducer_override})(file).dump(settings)
    return file.getvalue()


def _without_groups(config: WorkerConfig) -> Any:
    sent = copy.copy(config)
    for name in ("data_parallel_group", "peer_group"):
        group = getattr(config, name)
        setattr(sent, name, group and str(group))
    return sent.__reduce_ex__(2)


WAYS = (
    "Define classes and functions at the top level of a module that can be imported, or use "
    'WorkerConfig(start_method="fork") or WorkerConfig(worker_type="thread").'
)


def unsendable(parts: Any, error: Exception, dumps: Callable[[Any], Any]) -> TypeError:
    """Returns the error of settings that cannot be pickled; names the part."""
    path, part = unpicklable_part(parts, "", dumps)
    return TypeError(
        f"{path.rpartition(' of ')[2]} is a {_what(part)}, which cannot be sent to a worker "
        f"process ({error}). It belongs to the task encoder, or to another object that the dataset "
        f"was made with. {WAYS}"
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


def unpacked(body: Any, buffers: Iterable[Any]) -> Any:
    """Returns the value of pickled bytes, and of the memory beside them."""
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
