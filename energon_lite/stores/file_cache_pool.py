"""A cache pool that copies files to a local folder in the background.

Nothing depends on the cache: whatever fails, is full or not ready, the file is read from its store.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing.util
import os
import pickle
import tempfile
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from energon_lite.core.samples import SourceInfo
from energon_lite.stores.cache_pool import CachePool, Lazy, MockLazy, Returned
from energon_lite.stores.file_stores import DecodeFileStore, FileStore, PrimaryFileStore
from energon_lite.stores.owned_folders import OwnedFolder, remove_dead_folders

T = TypeVar("T")
Method = Literal["raw", "pickle"]
Found = tuple[Any, SourceInfo | None]

logger = logging.getLogger(__name__)

_PREFIX = "cache_"
# How long a full cache waits until it looks for lazy values that were dropped unread.
_POLL_SEC = 1.0
# How long a fork, or the end, waits for a file that is being copied.
_PAUSE_SEC = 10.0
_TEMPORARY = ".part"


class FileStoreCachePool(CachePool):
    """Copies files of stores to a local folder, where the values that need them read them later.

    The values of one file share one copy, which is removed when the last of them was read or
    dropped. A file that was not copied yet when it is needed is read from its store, and so it is
    if the cache is full. Each process that uses the pool has its own threads and its own folder
    `<parent_cache_dir>/cache_<16 random characters>`; it is removed at the end of the process, or
    after a kill by the next process that makes a pool in the same parent folder.

    Args:
        parent_cache_dir: folder for the folders of all processes, by default that for temporary
            files; should be on a local disk.
        num_workers: threads of each process that copy files.
        max_cache_size_gbytes: of the copies of one process [Unit: 1024^3 bytes].
        max_cache_count: copies of one process.
        method: "raw" copies files as they are stored, and decodes them when they are needed;
            "pickle" decodes them in the background, and copies what that returned.

    Raises:
        ValueError: An argument is out of range.
        OSError: `parent_cache_dir` cannot be made.
    """

    def __init__(
        self,
        *,
        parent_cache_dir: str | PathLike[str] | None = None,
        num_workers: int = 8,
        max_cache_size_gbytes: float = 1024,
        max_cache_count: int = 10_000_000,
        method: Method = "raw",
    ) -> None:
        for name, value, is_right, must in (
            ("num_workers", num_workers, num_workers >= 1, "at least 1"),
            ("max_cache_size_gbytes", max_cache_size_gbytes, max_cache_size_gbytes >= 0, ">= 0"),
            ("max_cache_count", max_cache_count, max_cache_count >= 0, ">= 0"),
            ("method", method, method in get_args(Method), '"raw" or "pickle"'),
        ):
            if not is_right:
                raise ValueError(f"FileStoreCachePool({name}={value!r}): {name} must be {must}")
        self.parent_cache_dir = Path(parent_cache_dir or tempfile.gettempdir()).absolute()
        self.num_workers = num_workers
        self.max_cache_size = int(max_cache_size_gbytes * 1024**3)
        self.max_cache_count = max_cache_count
        self.method = method
        self.parent_cache_dir.mkdir(parents=True, exist_ok=True)
        self._used: _FileCache | None = None
        self._clear_at_end()

    def _clear_at_end(self) -> None:
        self.workers_ended()
        multiprocessing.util.Finalize(
            self, remove_dead_folders, (self.parent_cache_dir, _PREFIX), exitpriority=-20
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the settings: another process has its own folder."""
        return {name: value for name, value in vars(self).items() if name != "_used"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a pool with the same settings."""
        vars(self).update(state, _used=None)
        self._clear_at_end()

    def __repr__(self) -> str:
        """Names the folder and the limits."""
        return (
            f"FileStoreCachePool(parent_cache_dir={str(self.parent_cache_dir)!r}, "
            f"num_workers={self.num_workers}, max_cache_size={self.max_cache_size}, "
            f"max_cache_count={self.max_cache_count}, method={self.method!r}, "
            f"current_cache_size={self.current_cache_size}, "
            f"current_cache_count={self.current_cache_count})"
        )

    @property
    def cache_dir(self) -> Path:
        """The folder of this process."""
        return self._cache.folder.path

    @property
    def current_cache_size(self) -> int:
        """Bytes of the copies of this process."""
        return self._used.num_bytes if self._used and not self._used.is_closed else 0

    @property
    def current_cache_count(self) -> int:
        """Number of copies of this process."""
        return self._used.num_files if self._used and not self._used.is_closed else 0

    @property
    def _cache(self) -> _FileCache:
        """What this process has of the cache; a new one in a fork, and after `close`."""
        cache = self._used
        if cache is None or cache.is_closed:
            with _making:
                cache = self._used
                if cache is None or cache.is_closed:
                    self.workers_ended()
                    cache = self._used = _FileCache(
                        OwnedFolder(self.parent_cache_dir, _PREFIX),
                        self.num_workers,
                        self.max_cache_size,
                        self.max_cache_count,
                        self.method,
                    )
                    multiprocessing.util.Finalize(self, cache.close, exitpriority=-10)
        return cache

    def get_lazy(self, ds: FileStore[Any], fname: str) -> FileCacheLazy[Any]:
        """Begins to copy a file, unless that was done, and returns it as a value.

        Raises:
            OSError: The folder of this process cannot be made.
        """
        return FileCacheLazy(ds=ds, fname=fname, pool=self, entry=self._cache.add(ds, fname))

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """Pickles data to a file. If the cache is full, they stay in memory, pickled.

        Raises:
            Exception: The data cannot be pickled.
        """
        entry = self._cache.keep(pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL), name)
        no_store: Any = None
        return FileCacheLazy(ds=no_store, fname=name, pool=self, entry=entry)

    def close(self) -> None:
        """Ends the threads and removes the copies; values that were not read are read directly.

        The pool may be used again.
        """
        if self._used is not None:
            self._used.close()
        self.workers_ended()

    def workers_ended(self) -> None:
        """Removes the folders of processes that have ended."""
        remove_dead_folders(self.parent_cache_dir, _PREFIX)


class FileCacheLazy(Lazy[T]):
    """A value whose file is copied to a cache, until the first `get` has read it.

    Args:
        ds: the store; None where the data come from no store.
        fname: key of the file.
        pool: which made it.
        entry: the copy.
    """

    _has_copy = False

    def __init__(
        self, *, ds: FileStore[Any], fname: str, pool: FileStoreCachePool, entry: _Entry
    ) -> None:
        super().__init__(ds=ds, fname=fname, pool=pool)
        self.entry = entry
        self._has_copy = True

    def _read(self) -> Found:
        has_copy, self._has_copy = self._has_copy, False
        return self.entry.cache.take(self, has_copy)

    def __del__(self) -> None:
        """Releases the copy, if the value was not read."""
        if self._has_copy:
            self.entry.cache.drop(self.entry)

    def __reduce__(self) -> Any:
        """Pickles the place of the file; the data, if they come from no store."""
        if self.entry.ds is None:
            return MockLazy, (self.fname, Returned(self.get()))
        return super().__reduce__()


class _State(Enum):
    QUEUED = "is to be copied"
    READING = "is being read"
    IN_MEMORY = "was read, and is written as soon as there is room"
    STORED = "is in a file"
    NOT_THERE = "is to be read from the store"


@dataclass(eq=False, slots=True)
class _Entry:
    """A copy that values of one file share.

    Attributes:
        cache: that has it.
        ds: the store of the value that was first; None for data from no store.
        fname: its key in the store, or a name.
        key: of the entry in the cache.
        num_values: values that were neither read nor dropped.
        raw: the content, while it is in memory.
        is_pickled: whether the content is a pickled value.
        path: its file; "" for none.
    """

    cache: _FileCache
    ds: FileStore[Any] | None
    fname: str
    key: tuple[Any, ...]
    num_values: int = 1
    state: _State = _State.QUEUED
    raw: bytes | None = None
    is_pickled: bool = False
    source: SourceInfo | None = None
    path: str = ""
    num_bytes: int = 0


def _key_of_copy(ds: FileStore[Any], fname: str, is_decoded: bool) -> tuple[Any, ...]:
    """Returns what distinguishes copies: the store below our wrappers, and the whole key.

    The numbers of objects are those of stores that the copy keeps, so no other object has them.

    Args:
        ds: the store.
        fname: key of the file.
        is_decoded: whether copies are decoded.
    """
    decoders: list[int] = []
    store: Any = ds
    while type(store) in (PrimaryFileStore, DecodeFileStore):
        if type(store) is DecodeFileStore:
            decoders.append(id(store.decoder))
        elif fname.startswith("."):
            fname = store.current_key + fname
        store = store.inner
    is_ours = type(store).__module__.startswith("energon_lite.")
    which = (type(store), store.get_path()) if is_ours else (id(store),)
    return (*which, fname, *(decoders if is_decoded else ()))


class _FileCache:
    """The copies of one process.

    Args:
        folder: for the files.
        num_workers: threads that copy.
        max_bytes: of all copies.
        max_files: number of copies.
        method: "raw" or "pickle".
    """

    def __init__(
        self, folder: OwnedFolder, num_workers: int, max_bytes: int, max_files: int, method: Method
    ) -> None:
        self.folder = folder
        self.is_closed = False
        self.num_bytes = 0
        self.num_files = 0
        self._num_workers = num_workers
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._is_decoded = method == "pickle"
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._queue: OrderedDict[_Entry, None] = OrderedDict()
        self._dropped: deque[_Entry] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._num_busy = 0
        self._num_writing = 0
        self._is_forking = False
        self._numbers = itertools.count()
        self._has_warned = False
        self._make_locks()
        _caches.add(self)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # not reentrant: see drop()
        self._has_work = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)

    # ------------------------------------------------------------------------ values

    def add(self, ds: FileStore[Any], fname: str) -> _Entry:
        """Returns the copy of a file for one more value; queues a new one."""
        key = _key_of_copy(ds, fname, self._is_decoded)
        with self._changes():
            entry = self._entries.get(key)
            if entry is not None:
                entry.num_values += 1
                return entry
            entry = self._entries[key] = _Entry(self, ds, fname, key)
            self._queue[entry] = None
            if len(self._queue) > self._num_idle and len(self._threads) < self._num_workers:
                self._start_thread()
            else:
                self._has_work.notify()
        return entry

    def keep(self, raw: bytes, name: str) -> _Entry:
        """Returns a copy of a pickled value from no store."""
        entry = _Entry(
            self, None, name, (), state=_State.IN_MEMORY, raw=raw, is_pickled=True,
            num_bytes=len(raw),
        )  # fmt: skip
        with self._changes():
            has_room = self._take_room(entry)
        if has_room:
            self._write(entry, raw)
        return entry

    def take(self, value: FileCacheLazy[Any], has_copy: bool) -> Found:
        """Returns the content for a value, which then does not need the copy any more.

        Args:
            value: the value.
            has_copy: whether it still counted for the copy.
        """
        entry = value.entry
        with self._changes():
            while entry.state is _State.READING and not self.is_closed:
                self._changed.wait()
            state, raw = entry.state, entry.raw
            if state is _State.QUEUED and has_copy:
                self._release(entry)
        try:
            if state is _State.STORED:
                raw = _stored_bytes(entry)
            if raw is not None:
                return _content_of(value, raw), entry.source
        finally:
            if state is not _State.QUEUED and has_copy:
                with self._changes():
                    self._release(entry)
        if value.ds is None:
            raise RuntimeError(
                f"to_cache(..., {value.fname!r}): the data are gone, as the pool was closed or its "
                f"folder {self.folder.path} was removed; call get() before close()"
            )
        return value.ds[value.fname]

    def drop(self, entry: _Entry) -> None:
        """Releases a copy for one value that was not read; Python may call it at any moment."""
        self._dropped.append(entry)
        # This thread may have the lock already: then it releases the copy when it frees the lock.
        if self._lock.acquire(blocking=False):
            try:
                self._release_dropped()
            finally:
                self._lock.release()

    @contextmanager
    def _changes(self) -> Iterator[None]:
        with self._lock:
            yield
            self._release_dropped()

    def _release_dropped(self) -> None:
        while self._dropped:
            self._release(self._dropped.popleft())

    def _release(self, entry: _Entry) -> None:
        """Counts one value less; removes the copy with the last one."""
        entry.num_values -= 1
        if entry.num_values > 0:
            return
        if entry.state is not _State.READING:
            entry.state, entry.raw = _State.NOT_THERE, None
        self._queue.pop(entry, None)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if entry.path and not self.is_closed:
            self._remove_file(entry)
        self._room_may_be_there()

    def _room_may_be_there(self) -> None:
        self._changed.notify_all()
        if self._queue:
            self._has_work.notify_all()

    def _remove_file(self, entry: _Entry) -> None:
        with suppress(OSError):
            os.unlink(entry.path)  # noqa: PTH108
        self._free_room(entry)

    # ----------------------------------------------------------------------- threads

    def _start_thread(self) -> None:
        name = f"cache-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (entry := self._next_entry()) is not None:
            try:
                self._read(entry)
            finally:
                with self._changes():
                    self._num_busy -= 1
                    self._changed.notify_all()
            self._store(entry)

    def _next_entry(self) -> _Entry | None:
        """Waits for a file that is to be copied; returns None at the end."""
        with self._changes():
            self._num_idle += 1
            self._wait(self._has_work, lambda: bool(self._queue) and self._has_room(0))
            self._num_idle -= 1
            if self.is_closed:
                return None
            entry, _ = self._queue.popitem(last=False)
            entry.state = _State.READING
            self._num_busy += 1
            return entry

    def _wait(self, condition: threading.Condition, is_ready: Callable[[], bool]) -> None:
        """Waits until there is something to do, or the end."""
        while not self.is_closed and (self._is_forking or not is_ready()):
            condition.wait(_POLL_SEC if self.num_files else None)
            self._release_dropped()

    def _read(self, entry: _Entry) -> None:
        ds, raw = entry.ds, None
        assert ds is not None
        try:
            value, entry.source = ds[entry.fname] if self._is_decoded else ds.get_raw(entry.fname)
            # A store of the user may return anything.
            entry.is_pickled = self._is_decoded or type(value) is not bytes
            raw = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if entry.is_pickled else value
        except BaseException:  # a value waits for the copy
            logger.debug("Not cached: %s of %s", entry.fname, ds, exc_info=True)
        with self._changes():
            if raw is None or len(raw) > self._max_bytes or entry.num_values <= 0 or self.is_closed:
                self._forget(entry)
            else:
                entry.raw, entry.num_bytes = raw, len(raw)
                entry.state = _State.IN_MEMORY
            self._changed.notify_all()

    def _forget(self, entry: _Entry) -> None:
        """Leaves a copy's values to the store, and the next value of the file to another copy."""
        entry.state, entry.raw = _State.NOT_THERE, None
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def _store(self, entry: _Entry) -> None:
        """Writes what was read as soon as there is room."""
        with self._changes():
            self._wait(
                self._changed,
                lambda: entry.state is not _State.IN_MEMORY or self._has_room(entry.num_bytes),
            )
            raw = entry.raw
            if raw is None or not self._take_room(entry):
                return
        self._write(entry, raw)

    def _has_room(self, num_bytes: int) -> bool:
        """Returns whether a copy of a size fits in; 0 for one of any size."""
        is_full = self.num_bytes + max(num_bytes, 1) > self._max_bytes
        return self.num_files < self._max_files and not is_full

    def _take_room(self, entry: _Entry) -> bool:
        if self.is_closed or not self._has_room(entry.num_bytes):
            return False
        self.num_files += 1
        self.num_bytes += entry.num_bytes
        self._num_writing += 1
        return True

    def _free_room(self, entry: _Entry) -> None:
        self.num_files -= 1
        self.num_bytes -= entry.num_bytes
        entry.path = ""

    def _write(self, entry: _Entry, raw: bytes) -> None:
        """Writes a copy; under its name there is only the whole of it."""
        path = str(self.folder.path / str(next(self._numbers)))
        error: OSError | None = None
        try:
            with open(path + _TEMPORARY, "xb", buffering=0) as file:  # noqa: PTH123  a hot path
                view = memoryview(raw)
                while view:
                    view = view[file.write(view) :]
            os.rename(path + _TEMPORARY, path)  # noqa: PTH104
        except OSError as failure:
            error = failure
            with suppress(OSError):
                os.unlink(path + _TEMPORARY)  # noqa: PTH108
        with self._changes():
            self._num_writing -= 1
            entry.path = path
            if error is None and entry.num_values > 0:
                entry.state, entry.raw = _State.STORED, None
            else:
                self._remove_file(entry)
                if entry.ds is not None:
                    self._forget(entry)
            self._room_may_be_there()
        if error is not None and not self.is_closed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The cache in %s cannot be written (%s). What is not in it is read directly. Make "
                "room, or choose another parent_cache_dir.",
                self.folder.path,
                error,
            )

    # --------------------------------------------------------------------------- end

    def close(self) -> None:
        """Ends the threads, and removes the folder."""
        if self.is_closed:
            return
        with self._lock:
            self.is_closed = True
            self._queue.clear()
            self._entries.clear()
            self._has_work.notify_all()
            self._changed.notify_all()
            self._wait_while(lambda: self._num_writing > 0)
        self.folder.remove()

    def before_fork(self) -> None:
        """Waits until no thread copies: a fork would have the locks that its store holds."""
        with self._lock:
            self._is_forking = True
            self._wait_while(lambda: self._num_busy + self._num_writing > 0)

    def _wait_while(self, is_busy: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PAUSE_SEC
        while is_busy() and time.monotonic() < deadline:
            self._changed.wait(_POLL_SEC)

    def after_fork(self) -> None:
        """Continues."""
        with self._lock:
            self._is_forking = False
            self._has_work.notify_all()
            self._changed.notify_all()

    def leave(self) -> None:
        """Leaves all copies to the process that made them, in a fork of it."""
        self._make_locks()
        self.is_closed = True
        self._threads.clear()
        self._dropped.clear()
        self.folder.leave()


def _stored_bytes(entry: _Entry) -> bytes | None:
    """Reads a copy; None if it is not there any more."""
    with suppress(OSError), open(entry.path, "rb", buffering=0) as file:  # noqa: PTH123
        raw = file.read()
        if len(raw) == entry.num_bytes:
            return raw
    return None


def _content_of(value: FileCacheLazy[Any], raw: bytes) -> Any:
    if value.entry.is_pickled:
        return pickle.loads(raw)  # this process wrote it
    return value.ds.decode_raw(value.fname, raw)


_caches: weakref.WeakSet[_FileCache] = weakref.WeakSet()
_making = threading.Lock()


def _before_fork() -> None:
    for cache in list(_caches):
        cache.before_fork()


def _after_fork() -> None:
    for cache in list(_caches):
        cache.after_fork()


def _in_child() -> None:
    global _making
    _making = threading.Lock()
    for cache in list(_caches):
        cache.leave()
    _caches.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
