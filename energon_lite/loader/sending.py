"""Batches that cannot be sent from a worker process: an error that names the part, not a hang.

A `multiprocessing` queue pickles in a thread of its own, and where that fails it prints a traceback
and drops the object; the training loop would wait for it for ever. So the queues of a worker
process send a `Unsendable` in its place. A batch that can be pickled costs nothing more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper

_MAX_DEPTH = 30
_default_handler = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


class Unsendable(NamedTuple):
    """Takes the place of a batch that cannot be pickled.

    Attributes:
        reason: what cannot be, of which samples, and the way out.
    """

    reason: str


def report_unsendable() -> None:
    """Makes the queues of this worker process say what they could not send."""
    Queue._on_queue_feeder_error = _on_feeder_error  # type: ignore[attr-defined]


def _on_feeder_error(queue: Any, error: Exception, sent: Any) -> None:
    """Sends the reason in place of a delivery; called in the thread that pickles."""
    pair: tuple[Any, Any] = sent if isinstance(sent, tuple) and len(sent) == 2 else (None, None)
    index, found = pair
    if isinstance(found, ExceptionWrapper) and found.exc_type is not RuntimeError:
        found.exc_type = RuntimeError  # its own type cannot be pickled; the text names it
        queue.put((index, found))
    elif hasattr(found, "item") and not isinstance(found.item, Unsendable):
        reason = Unsendable(_reason(found.item, error))
        queue.put((index, found._replace(item=reason, snapshot=None, skipped=[])))
    else:  # a queue of somebody else
        _default_handler(error, sent)


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
            ForkingPickler.dumps(part)
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
