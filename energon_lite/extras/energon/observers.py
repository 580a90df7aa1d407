"""Pass-through stages: garbage collection and sample logging."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.samples import field_of
from energon_lite.core.stage import PerItemStage, StageCursor
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream, WorkerConfig

T = TypeVar("T")


class GcDataset(PerItemStage[T]):
    """Collects garbage every few items, in the process that computes them.

    State: none.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items.
        every_n_iter: items of a stream between two collections; 0 for none.
        freeze: accepted, without effect.
        worker_config: by default that of the dataset.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        every_n_iter: int = 10,
        freeze: bool = True,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        del freeze
        super().__init__(dataset, worker_config)
        if every_n_iter < 0:
            raise ValueError(f"every_n_iter={every_n_iter} is negative; 0 for no collections")
        self.every_n_iter = every_n_iter

    def open(self, inner: Cursor[T], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        del stream
        return _GcCursor(self, inner)


class _GcCursor(StageCursor[T]):
    _num_requests = 0

    def __next__(self) -> T:
        self._num_requests += 1
        if self.spec.every_n_iter and self._num_requests % self.spec.every_n_iter == 0:
            gc.collect()
        return super().__next__()


def default_get_keys(item: Any) -> list[str] | None:
    """Returns the sample keys of a sample, a batch or a list of these, if they have any."""
    if isinstance(item, (list, tuple)):
        return [key for entry in item for key in default_get_keys(entry) or ()] or None
    own = field_of(item, "__key__")
    return None if own is None else list(_texts(own))


def _texts(keys: Any) -> Iterator[str]:
    """Yields the texts of a key, or of a list of keys at any depth."""
    if isinstance(keys, (list, tuple)):
        for key in keys:
            yield from _texts(key)
    else:
        yield str(keys)


class LogSampleDataset(PerItemStage[T]):
    """Writes one line of JSON for each item, where `worker_log_level` is at least 1.

    The lines go to the end of `WorkerConfig.worker_debug_path` (where `{worker_id}` and `{pid}` are
    replaced), or to a logger (`WorkerConfig.worker_log`). Each has the fields of Energon's
    `yield_batch`: `t`, rank `r`, worker `w`, mode `m`, the batch's slot `idx`, and `keys` if there
    are any; and `stream`. Items that a resume re-creates are not written again. Where several ranks
    compute one stream, each writes a line for all of its batches.

    State: none.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items.
        mode: a word for the lines, such as "train" or "val".
        worker_config: by default that of the dataset.
        get_keys_fn: returns the sample keys of an item, or None.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        mode: str,
        worker_config: WorkerConfig | None = None,
        get_keys_fn: Callable[[T], list[str] | None] = default_get_keys,
    ) -> None:
        super().__init__(dataset, worker_config)
        self.mode = mode
        self.get_keys_fn = get_keys_fn

    def open(self, inner: Cursor[T], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        is_on = self.worker_config is not None and self.worker_config.worker_log_level > 0
        return _LogCursor(self, inner, stream) if is_on else inner


class _LogCursor(StageCursor[T]):
    def __init__(self, spec: LogSampleDataset[T], inner: Cursor[T], stream: Stream) -> None:
        super().__init__(spec, inner)
        self._stream = stream

    def __next__(self) -> T:
        item = super().__next__()
        context = context_or(self._stream)
        if not context.is_passing:
            config, keys = self.spec.worker_config, self.spec.get_keys_fn(item)
            line = {"t": "yield_batch", "r": config.rank, "w": config.global_worker_id()}
            line |= {"m": self.spec.mode, "idx": context.batch_index, "stream": self._stream.index}
            config.worker_log(line if keys is None else line | {"keys": keys})
        return item
