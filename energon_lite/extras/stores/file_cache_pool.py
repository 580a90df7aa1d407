"""A cache pool that copies files to a local folder in the background.

Nothing depends on the cache: whatever fails, is full or not ready, the file is read from its store.

The values of a file hold one `_Copy` object, and the queue holds a weak reference to it. So Python
counts who needs a copy: with the last value the object goes, and with it the file, or the place in
the queue. The threads are daemons, because those of `concurrent.futures` would first copy all that
is queued when the program ends.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing.util
import os
import pickle
import tempfile
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar, get_args

from energon_lite.core.cache_pool import CachePool, Lazy, MockLazy, same_data
from energon_lite.core.file_store import FileStore
from energon_lite.core.samples import SourceInfo
from energon_lite.extras.stores.owned_folders import OwnedFolder, remove_dead_folders
from energon_lite.storage import files

T = TypeVar("T")
Method = Literal["raw", "pickle"]

logger = logging.getLogger(__name__)

_TEMPORARY = ".tmp"


class FileStoreCachePool(CachePool):
    """Copies files of stores to a local folder, where the values that need them read them later.

    The values of one file of one store share one copy, which is removed when the last of them was
    read or dropped. A file that was not copied yet when it is needed is read from its store, and so
    it is if the cache is full. Each process that uses the pool has its own threads and its own
    folder `<parent_cache_dir>/cache_<16 random characters>`; it is removed at the end of the
    process, or after a kill by the next process that makes a pool in the same parent folder.

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
        folder = Path(parent_cache_dir or tempfile.gettempdir())
        self.parent_cache_dir = folder.expanduser().absolute()
        self.num_workers = num_workers
        self.max_cache_size = int(max_cache_size_gbytes * 1024**3)
        self.max_cache_count = max_cache_count
        self.method = method
        self.parent_cache_dir.mkdir(parents=True, exist_ok=True)
        self._used: _FileCache | None = None
        self.workers_ended()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the settings: another process has its own folder."""
        return {name: value for name, value in vars(self).items() if name != "_used"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a pool with the same settings."""
        vars(self).update(state, _used=None)
        self.workers_ended()

    def __repr__(self) -> str:
        """Names the folder and the limits."""
        names = (*self.__getstate__(), "current_cache_size", "current_cache_count")
        return f"FileStoreCachePool({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"

    @property
    def cache_dir(self) -> Path:
        """The folder of this process."""
        return self._cache.folder.path

    @property
    def current_cache_size(self) -> int:
        """Bytes of the copies of this process."""
        return self._used.num_bytes if self._used and self._used.is_usable() else 0

    @property
    def current_cache_count(self) -> int:
        """Number of copies of this process."""
        return self._used.num_files if self._used and self._used.is_usable() else 0

    @property
    def _cache(self) -> _FileCache:
        """The part of the cache that this process has; a new one in a fork, and after `close`."""
        with _changed:
            if (cache := self._used) is not None and cache.is_usable():
                return cache
            cache = self._used = _FileCache(self)
            multiprocessing.util.Finalize(self, cache.close, exitpriority=-10)
        cache.start()  # a thread that starts may collect another pool, whose end takes the lock
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
        return FileCacheLazy(ds=None, fname=name, pool=self, entry=entry)

    def close(self) -> None:
        """Ends the threads and removes the copies; values that were not read are read directly.

        The pool may be used again.
        """
        if self._used is not None:
            self._used.close()
        self.workers_ended()

    def workers_ended(self) -> None:
        """Removes the folders of processes that have ended."""
        remove_dead_folders(self.parent_cache_dir)


class FileCacheLazy(Lazy[T]):
    """A value whose file is copied to a cache, until the first `get` has read it.

    Args:
        ds: the store; None where the data come from no store.
        fname: key of the file.
        pool: which made it.
        entry: the copy.
    """

    ds: Any

    def __init__(self, *, ds: Any, fname: str, pool: FileStoreCachePool, entry: _Copy) -> None:
        super().__init__(ds=ds, fname=fname, pool=pool)
        self.entry: _Copy | None = entry

    def get(self, sample: Any = None) -> T:
        """Returns the data, and frees the copy."""
        data = super().get(sample)
        self.entry = None
        return data

    def _read(self) -> Any:
        entry = self.entry
        raw = None if entry is None else entry.content()
        if entry is not None and raw is not None:
            data = pickle.loads(raw) if entry.is_pickled else self.ds.decode_raw(self.fname, raw)
            return data, entry.source
        if self.ds is None:
            raise RuntimeError(
                f"to_cache(..., {self.fname!r}): the data are gone, as the pool was closed or its "
                "folder was removed; call get() before close()"
            )
        return self.ds[self.fname]

    def __reduce__(self) -> Any:
        """Pickles the place of the file; the data, if they come from no store."""
        if self.ds is None:
            return MockLazy, (self.fname, partial(same_data, self.get()))
        return super().__reduce__()


class _Copy:
    """A copy that values of one file share. With this object the file is removed.

    Attributes:
        cache: that has it.
        ds: the store of the value that was first; None for data from no store.
        fname: its key in the store, or a name.
        made: runs while the copy is made; what fails leaves a copy without content.
        raw: content that is in no file.
        is_pickled: whether the content is a pickled value.
        path: of the file; empty for none.
    """

    def __init__(self, cache: _FileCache, ds: Any, fname: str) -> None:
        self.cache = cache
        self.ds = ds
        self.fname = fname
        self.made: Future[None] = Future()
        self.raw: bytes | None = None
        self.is_pickled = True  # this process wrote it
        self.source: SourceInfo | None = None
        self.path = ""
        self.num_bytes = 0

    def content(self) -> bytes | None:
        """Returns the content, and waits for it if it is being copied; None if there is none."""
        # In a fork no thread makes it.
        if self.cache.process == os.getpid() and self.made.running():
            self.made.result()
        if self.path:
            with suppress(OSError), open(self.path, "rb", buffering=0) as file:  # noqa: PTH123
                raw = file.read()
                if len(raw) == self.num_bytes:
                    return raw
        return self.raw


class _FileCache:
    """The copies of one process.

    Args:
        pool: has the settings.
    """

    def __init__(self, pool: FileStoreCachePool) -> None:
        self.folder = OwnedFolder(pool.parent_cache_dir)
        self.process = os.getpid()
        self.num_bytes = self.num_files = 0
        self.num_begun = 0  # copies that are being made
        self._max_bytes = pool.max_cache_size
        self._max_files = pool.max_cache_count
        self._is_decoded = pool.method == "pickle"
        self._is_closed = False
        self._copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()
        self._queue: SimpleQueue[weakref.ref[_Copy] | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._num_threads = pool.num_workers

    def start(self) -> None:
        """Starts the threads."""
        for _ in range(self._num_threads):
            threading.Thread(target=self._make_copies, name="cache", daemon=True).start()

    def is_usable(self) -> bool:
        """Returns whether this process may add copies."""
        return not self._is_closed and self.process == os.getpid()

    def add(self, ds: FileStore[Any], fname: str) -> _Copy:
        """Returns the copy of a file for one more value; queues a new one."""
        key = (id(ds), fname)  # the copy keeps the store, so no other object has its number
        with _changed:
            copy = self._copies.get(key)
            if copy is not None and (copy.path or not copy.made.done()):
                return copy
            copy = self._copies[key] = _Copy(self, ds, fname)
            self._queue.put(weakref.ref(copy))
        return copy

    def keep(self, raw: bytes, name: str) -> _Copy:
        """Returns a copy of a pickled value from no store."""
        copy = _Copy(self, None, name)
        self._write(copy, raw)
        if not copy.path:
            copy.raw = raw
        return copy

    def _make_copies(self) -> None:
        """Makes the copies of the queue, in a thread, until the cache is closed."""
        while (queued := self._queue.get()) is not None:
            with _changed:
                _changed.wait_for(lambda: self._is_closed or not self._is_full())
                copy = None if self._is_closed else queued()
                if copy is None:  # no value needs it any more
                    continue
                self.num_begun += 1
                copy.made.set_running_or_notify_cancel()
            try:
                self._make(copy)
            except BaseException:  # a value waits for the copy
                logger.debug("Not cached: %s of %s", copy.fname, copy.ds, exc_info=True)
            with _changed:
                self.num_begun -= 1
                copy.made.set_result(None)
                _changed.notify_all()
            del copy

    def _is_full(self) -> bool:
        """Returns whether no other file fits in, if it is as large as the others on average."""
        num_files = self.num_files + self.num_begun + 1
        mean_bytes = self.num_bytes / max(1, self.num_files)
        return num_files > self._max_files or max(1, num_files * mean_bytes) > self._max_bytes

    def _make(self, copy: _Copy) -> None:
        ds, fname = copy.ds, copy.fname
        read = ds.__getitem__ if self._is_decoded else ds.get_raw
        # A fault is not waited out here: the value reads the file itself then, and does that.
        value, copy.source = files.retried(lambda: read(fname), Path(fname), lambda *_: 0.0)
        # A store of the user may return anything.
        copy.is_pickled = self._is_decoded or type(value) is not bytes
        self._write(copy, pickle.dumps(value, -1) if copy.is_pickled else value)

    def _write(self, copy: _Copy, raw: bytes) -> None:
        """Writes a copy, if there is room; under its name there is only the whole of it."""
        num_bytes = len(raw)
        with _changed:
            is_too_large = self.num_bytes + num_bytes > self._max_bytes
            if self._is_closed or is_too_large or self.num_files >= self._max_files:
                return
            self.num_files += 1
            self.num_bytes += num_bytes
        path = f"{self.folder.path}/{next(self._numbers)}"
        try:
            with open(path + _TEMPORARY, "xb") as file:  # noqa: PTH123  a hot path
                file.write(raw)
            os.rename(path + _TEMPORARY, path)  # noqa: PTH104
        except OSError as error:
            self._free(path + _TEMPORARY, num_bytes)
            if self.is_usable():
                self._max_bytes = self.num_bytes
                files.warn_once(
                    f"The cache in {self.folder.path} cannot be written ({error.strerror}), and "
                    "does not grow any more. What is not in it is read directly. Make room, or "
                    "choose another parent_cache_dir."
                )
            return
        copy.num_bytes, copy.path = num_bytes, path
        # Not by `__del__`: while that waits for the lock, others could find the object.
        weakref.finalize(copy, self._free, path, num_bytes).atexit = False

    def _free(self, path: str, num_bytes: int) -> None:
        """Removes the file of a copy, which is gone; in a fork it belongs to the parent."""
        if self.process == os.getpid():
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            with _changed:
                self.num_files -= 1
                self.num_bytes -= num_bytes
                _changed.notify_all()

    def close(self) -> None:
        """Ends the threads, and removes the folder."""
        with _changed:
            if not self.is_usable():
                return
            self._is_closed = True
            _changed.notify_all()
        for _ in range(self._num_threads):
            self._queue.put(None)
        self.folder.remove()


# Guards all caches of this process, and is notified when there may be room. A fork holds it, so
# that it is free in the child. It is reentrant, as Python may drop a value, and so free a copy, in
# the middle of anything; that only makes more room.
_changed = threading.Condition()
os.register_at_fork(
    before=_changed.acquire, after_in_parent=_changed.release, after_in_child=_changed.release
)
