"""Stages that change no item: collecting garbage, and writing down what comes by."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.stage import PerItemStage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.stages.map import is_passed_over

T = TypeVar("T")


class _Passing(PerItemStage[T]):
    """A stage that gives the items of the dataset below as they are."""

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """As below: the items are the same with and without this stage."""
        return self.dataset.config()


class _PassingCursor(Cursor[T]):
    def __init__(self, inner: Cursor[T]) -> None:
        self._inner = inner

    def __next__(self) -> T:
        item = next(self._inner)
        self.key = self._inner.key
        return item

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._inner.restore(snapshot)


class GcDataset(_Passing[T]):
    """Collects garbage every few items, in the process that computes them.

    With `freeze`, what there is when the first item is asked for (modules, indexes, in the main
    process also the model) is taken out of all collections, which makes them quick and leaves the
    memory that forked processes share alone. This is done once in a process: later it would also
    keep garbage for ever. In a worker process it stays so, since other streams of the process go
    on, and both end together. In the main process the stream that froze undoes it at the end of
    its pass, so that what the program drops afterwards is freed.

    State: none of its own.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items.
        every_n_iter: items of a stream between two collections; 0 for none.
        freeze: whether to freeze.
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
        super().__init__(dataset)
        self.worker_config = worker_config or self.worker_config
        if every_n_iter < 0:
            raise ValueError(f"every_n_iter={every_n_iter} is negative; 0 for no collections")
        self.every_n_iter = every_n_iter
        self.freeze = freeze

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _GcCursor(self, self.dataset.cursor(stream))


class _GcCursor(_PassingCursor[T]):
    def __init__(self, spec: GcDataset[T], inner: Cursor[T]) -> None:
        super().__init__(inner)
        self._spec = spec
        self._num_asked = 0
        self._has_frozen = False

    def __next__(self) -> T:
        spec = self._spec
        # Whoever has frozen before, another stream or the user, has done it for the process.
        if self._num_asked == 0 and spec.freeze and not gc.get_freeze_count():
            gc.collect()  # or garbage would be kept for ever
            gc.freeze()
            self._has_frozen = True
        self._num_asked += 1
        if spec.every_n_iter and self._num_asked % spec.every_n_iter == 0:
            gc.collect()
        try:
            return super().__next__()
        except StopIteration:
            if self._has_frozen and get_worker_info() is None:
                gc.unfreeze()
                self._has_frozen = False
            raise


def default_get_keys(item: Any) -> list[str] | None:
    """Returns the sample keys of a sample, of a batch or of a list of such, if they have any."""
    if isinstance(item, (list, tuple)):
        found = [default_get_keys(entry) for entry in item]
        keys = [key for entry in found if entry is not None for key in entry]
        return keys or None
    own = item.get("__key__") if isinstance(item, dict) else getattr(item, "__key__", None)
    return None if own is None else list(_texts(own))


def _texts(keys: Any) -> Iterator[str]:
    """Yields the texts of a key, or of a list of keys at any depth."""
    if isinstance(keys, (list, tuple)):
        for key in keys:
            yield from _texts(key)
    else:
        yield str(keys)


class LogSampleDataset(_Passing[T]):
    """Writes one line of JSON for each item, where `worker_log_level` is at least 1.

    The lines go to the end of `WorkerConfig.worker_debug_path` (where `{worker_id}` and `{pid}` are
    replaced), or to a logger (`WorkerConfig.worker_log`). Each has the fields of Energon's
    `yield_batch`: `t`, rank `r`, worker `w`, mode `m`, the batch's slot `idx`, and `keys` if there
    are any; and `stream`. What is made again on a resume is not written again. Where several ranks
    compute one stream, each writes a line for all of its batches.

    State: none of its own.
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
        super().__init__(dataset)
        self.worker_config = worker_config or self.worker_config
        self.mode = mode
        self.get_keys_fn = get_keys_fn

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        inner: Cursor[T] = self.dataset.cursor(stream)
        if self.worker_config is None or self.worker_config.worker_log_level < 1:
            return inner
        return _LogCursor(self, self.worker_config, stream, inner)


class _LogCursor(_PassingCursor[T]):
    def __init__(
        self,
        spec: LogSampleDataset[T],
        config: WorkerConfig,
        stream: Stream,
        inner: Cursor[T],
    ) -> None:
        super().__init__(inner)
        self._spec = spec
        self._config = config
        self._stream = stream

    def __next__(self) -> T:
        item = super().__next__()
        if not is_passed_over():
            self._write(item)
        return item

    def _write(self, item: T) -> None:
        entry: dict[str, Any] = {
            "t": "yield_batch",
            "r": self._config.rank,
            "w": self._config.global_worker_id(),
            "m": self._spec.mode,
            "idx": context_or(self._stream).batch_index,
            "stream": self._stream.index,
        }
        keys = self._spec.get_keys_fn(item)
        if keys is not None:
            entry["keys"] = keys
        self._config.worker_log(entry)
