"""Files of stores that are read later: lazy values, and the pools that they come from.

A buffered sample is a restore key in a state, and is re-created from it. So a lazy value in a
buffer needs no file of a cache: without a pool it is read from its store when it is needed. A pool
that copies files in the background (`FileStoreCachePool`) pays where the stores are slow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from typing_extensions import Self

from energon_lite.core.file_store import FileStore
from energon_lite.core.samples import SourceInfo, add_source_info
from energon_lite.core.topology import current

T = TypeVar("T")


class CachePool(ABC):
    """Reads files of stores now or later; cookers with `@cooker(need_cache=True)` get it."""

    def get(self, ds: FileStore[Any], fname: str, sample: Any = None) -> Any:
        """Reads a file now.

        Args:
            ds: the store.
            fname: key of the file.
            sample: gets the source of the file, if it is not None.
        """
        return ds.get(fname, sample)

    @abstractmethod
    def get_lazy(self, ds: FileStore[Any], fname: str) -> Lazy[Any]:
        """Returns a file as a value that is read when `get` of the value is called.

        Args:
            ds: the store.
            fname: key of the file.
        """

    @abstractmethod
    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """Keeps data until they are needed.

        Args:
            data: any data.
            name: a name for messages.
        """

    def close(self) -> None:  # noqa: B027  a pool may have nothing to end
        """Ends what the pool does in the background, and removes its files."""

    def workers_ended(self) -> None:  # noqa: B027
        """Removes what worker processes left behind; the loader calls it when they have ended."""


class Lazy(Generic[T]):
    """A value that is read when it is needed. Two of the same file of the same store are equal.

    A copy of a lazy value is the same value. In another process it is read from its store.

    Args:
        ds: the store; None where the data come from no store.
        fname: key of the file.
        pool: which made it.
    """

    # No dataclass, so that a batch has a list of values, and no value of lists.
    def __init__(self, *, ds: FileStore[Any], fname: str, pool: CachePool) -> None:
        self.ds = ds
        self.fname = fname
        self.pool = pool
        self._data: tuple[Any, SourceInfo | None] | None = None

    def get(self, sample: Any = None) -> T:
        """Returns the data.

        Args:
            sample: gets the source of the file, if it is not None.
        """
        if self._data is None:
            self._data = self._read()
        data, source = self._data
        if sample is not None and source is not None:
            add_source_info(sample, source)
        return data  # type: ignore[no-any-return]

    def _read(self) -> tuple[Any, SourceInfo | None]:
        raise NotImplementedError(f"{type(self).__name__} has no get")

    def _identity(self) -> tuple[Any, ...]:
        return (id(self),) if self.ds is None else (id(self.ds), self.fname)

    def __eq__(self, other: object) -> bool:
        """Returns whether the other value is the same file of the same store."""
        return isinstance(other, Lazy) and self._identity() == other._identity()

    def __hash__(self) -> int:
        """Returns a hash of the store and the key."""
        return hash(self._identity())

    def __copy__(self) -> Self:
        """Returns the value itself."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Returns the value itself."""
        return self

    def __reduce__(self) -> Any:
        """Pickles the place of the file, not the data."""
        return _direct, (self.ds, self.fname)

    def __repr__(self) -> str:
        """Names the file and the store."""
        return f"{type(self).__name__}(ds={self.ds}, fname={self.fname!r})"


class DirectLazy(Lazy[T]):
    """A value that the first `get` reads from its store, and later ones return again."""

    def _read(self) -> tuple[Any, SourceInfo | None]:
        return self.ds[self.fname]


class MockLazy(Lazy[T]):
    """A value that a function returns; it adds no source to a sample.

    Args:
        fname: a name.
        get_fn: called with the name, each time that the value is needed.
    """

    def __init__(self, fname: str, get_fn: Callable[[str], T]) -> None:
        nothing: Any = None
        super().__init__(ds=nothing, fname=fname, pool=nothing)
        self.get_fn = get_fn

    def get(self, sample: Any = None) -> T:
        """Returns what the function returns."""
        del sample
        return self.get_fn(self.fname)

    def _identity(self) -> tuple[Any, ...]:
        return (self.fname, self.get_fn)

    def __reduce__(self) -> Any:
        """Pickles the function, too."""
        return MockLazy, (self.fname, self.get_fn)

    def __repr__(self) -> str:
        """Names the value and the function."""
        return f"MockLazy(fname={self.fname!r}, get_fn={self.get_fn!r})"


def same_data(data: T, name: str) -> T:
    """Returns the data; a function of the name for `MockLazy`, picklable with the data."""
    del name
    return data


class NoCachePool(CachePool):
    """Reads each file from its store when it is needed; the pool of a loader without another."""

    def get_lazy(self, ds: FileStore[Any], fname: str) -> DirectLazy[Any]:
        """Returns a file as a value that is read when it is needed."""
        return DirectLazy(ds=ds, fname=fname, pool=self)

    def to_cache(self, data: T, name: str) -> MockLazy[T]:
        """Keeps data in memory."""
        return MockLazy(name, partial(same_data, data))


_no_cache = NoCachePool()


def _direct(ds: FileStore[Any], fname: str) -> DirectLazy[Any]:
    return DirectLazy(ds=ds, fname=fname, pool=_no_cache)


def current_cache_pool() -> CachePool:
    """Returns the cache pool of the loader that computes here; by default a `NoCachePool`."""
    pool: CachePool | None = getattr(current.context, "cache_pool", None) or current.cache_pool
    return _no_cache if pool is None else pool
