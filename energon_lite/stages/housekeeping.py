"""Stages that change no item: collecting garbage, and writing down what comes by."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from energon_lite.core.activity import activity_or
from energon_lite.core.dataset import Cursor, SavableDataset, WrapperDataset
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Passing(WrapperDataset[T]):
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

    Nothing in this library needs it; it is for user functions that leave reference cycles behind.

    State: none of its own.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items.
        every_n_iter: items between two collections.
        freeze: whether what exists when a stream's first item is asked for is taken out of the
            collections, which makes them quick (`gc.freeze`; it stays so, since another stream of
            the process may rely on it).
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
        if every_n_iter < 1:
            raise ValueError(f"every_n_iter={every_n_iter} must be at least 1")
        self.every_n_iter = every_n_iter
        self.freeze = freeze

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives a fresh cursor."""
        return _GcCursor(self, self.dataset.cursor(stream))


class _GcCursor(_PassingCursor[T]):
    def __init__(self, spec: GcDataset[T], inner: Cursor[T]) -> None:
        super().__init__(inner)
        self._spec = spec
        self._given = 0

    def __next__(self) -> T:
        if self._given == 0 and self._spec.freeze:
            gc.freeze()
        item = super().__next__()
        self._given += 1
        if self._given % self._spec.every_n_iter == 0:
            gc.collect()
        return item


def default_get_keys(item: Any) -> list[str] | None:
    """Gives the keys of a sample or a batch, if it has them."""
    keys = item.get("__key__") if isinstance(item, dict) else getattr(item, "__key__", None)
    if keys is None:
        return None
    return [str(key) for key in keys] if isinstance(keys, (list, tuple)) else [str(keys)]


class LogSampleDataset(_Passing[T]):
    """Writes one line of JSON for each item, where `worker_log_level` is at least 1.

    The lines go to `WorkerConfig.worker_debug_path` (`{worker_id}` and `{pid}` in it are replaced),
    or to the logger of this module.

    State: none of its own.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the items.
        mode: a word for the lines, such as "train".
        get_keys_fn: gives the sample keys of an item, or None.
        worker_config: by default that of the dataset.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        mode: str,
        get_keys_fn: Callable[[T], list[str] | None] = default_get_keys,
        *,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(dataset)
        self.worker_config = worker_config or self.worker_config
        self.mode = mode
        self.get_keys_fn = get_keys_fn

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives a fresh cursor."""
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
        config, spec = self._config, self._spec
        line = json.dumps(
            {
                "t": "yield_batch",
                "r": config.rank,
                "w": config.rank_worker_id(),
                "m": spec.mode,
                "idx": activity_or(self._stream).batch_index,
                "stream": self._stream.index,
                "keys": spec.get_keys_fn(item),
            }
        )
        if config.worker_debug_path is None:
            logger.info("%s", line)
            return item
        with Path(debug_path(config)).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return item


def debug_path(config: WorkerConfig) -> str:
    """Gives the file of this process: number 0 is the main process of rank 0."""
    info = get_worker_info()
    local = 0 if info is None else 1 + info.id
    worker_id = config.rank * (config.num_workers + 1) + local
    return str(config.worker_debug_path).format(worker_id=worker_id, pid=os.getpid())
