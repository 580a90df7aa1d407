"""Lazy values: what they return, when they read, what a full or broken cache does."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    CachePool,
    DecodeFileStore,
    DirectLazy,
    FileStore,
    FileStoreCachePool,
    FileStoreDecoder,
    MockLazy,
    NoCachePool,
    PrimaryFileStore,
    SourceInfo,
    SystemFileStore,
    TextSample,
)

from ..helpers import is_true_in_fork
from ..programs import run_program


class CountingStore(FileStore[Any]):
    """Returns the key as bytes; counts the reads, and waits in each while `gate` is closed."""

    def __init__(self, name: str = "store") -> None:
        self.name = name
        self.reads: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        self.reads[key] += 1
        self.has_begun.set()
        assert self.gate.wait(60)
        if key.startswith("missing"):
            raise KeyError(key)
        return key.encode(), SourceInfo(self.name, key, "", (key,))

    def get_path(self) -> str:
        return self.name


class Upper(FileStoreDecoder):
    def decode(self, fname: str, data: bytes) -> Any:
        return data.decode().upper()


class Numbers(CountingStore):
    """Returns no bytes."""

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        data, source = super().__getitem__(key)
        return list(data), source


class Split(FileStoreDecoder):
    def decode(self, fname: str, data: bytes) -> Any:
        return [fname, data]


def sample() -> TextSample:
    return TextSample(__key__="k", __restore_key__=("s", 0, 0, 0), text="")


def files_of(parent: Path) -> list[str]:
    """The copies in all folders below a parent folder."""
    paths = parent.glob("cache_*/[0-9]*")
    return sorted(path.name for path in paths if path.suffix != ".tmp")


def eventually(is_true: Callable[[], bool], within_sec: float = 60) -> None:
    deadline = time.monotonic() + within_sec
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "caches"


MakePool = Callable[..., FileStoreCachePool]


@pytest.fixture
def make_pool(parent: Path) -> Iterator[MakePool]:
    made: list[FileStoreCachePool] = []

    def make(**settings: Any) -> FileStoreCachePool:
        made.append(FileStoreCachePool(**{"parent_cache_dir": parent, **settings}))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(params=["none", "raw", "pickle"])
def pool(request: pytest.FixtureRequest, make_pool: MakePool) -> CachePool:
    return NoCachePool() if request.param == "none" else make_pool(method=request.param)


def test_the_data_come_with_every_get(pool: CachePool) -> None:
    store = CountingStore()
    lazy = pool.get_lazy(store, "a")
    assert store.reads["a"] <= 1
    assert [lazy.get(), lazy.get()] == [b"a", b"a"]
    assert lazy.ds is store
    assert (lazy.fname, lazy.pool) == ("a", pool)
    assert store.reads["a"] == 1


def test_each_get_with_a_sample_adds_the_source(pool: CachePool) -> None:
    store, user = CountingStore(), sample()
    lazy = pool.get_lazy(store, "a")
    assert lazy.get(user) == b"a"
    lazy.get(crude := {"__sources__": ()})
    assert pool.get(store, "b", user) == b"b"
    found = [(info.dataset_path, info.index) for info in user.__sources__ or ()]
    assert found == [("store", "a"), ("store", "b")]
    assert [info.index for info in crude["__sources__"]] == ["a"]


def test_decoded_and_primary_stores_return_what_they_return_directly(
    pool: CachePool, tmp_path: Path
) -> None:
    for key in ("one", "two"):
        (tmp_path / f"{key}.txt").write_text(key)
    files = SystemFileStore(tmp_path)
    upper, split = (DecodeFileStore(files, decoder=d()) for d in (Upper, Split))
    stores: list[FileStore[Any]] = [files, upper, split]
    for inner in (files, upper, split):
        stores += [PrimaryFileStore(inner, current_key=key) for key in ("one", "two")]
    for key in ("one", "two"):
        primary: FileStore[bytes] = PrimaryFileStore(files, current_key=key)
        stores.append(DecodeFileStore(primary, decoder=Upper()))
    names = [name for store in stores for name in ("one.txt", "two.txt", ".txt")]
    pairs = [(s, n) for s in stores for n in names if n[0] != "." or "Primary" in str(s)]
    lazies = [pool.get_lazy(store, name) for store, name in pairs]
    assert [lazy.get() for lazy in lazies] == [store[name][0] for store, name in pairs]
    numbers = Numbers()
    lazy = pool.get_lazy(numbers, "a")
    assert isinstance(pool, NoCachePool) or numbers.has_begun.wait(60)
    assert lazy.get() == [97]
    assert numbers.reads["a"] == 1


def test_equal_values_are_those_of_one_file_of_one_store(pool: CachePool) -> None:
    store, other = CountingStore(), CountingStore()
    a = pool.get_lazy(store, "a")
    assert a == pool.get_lazy(store, "a")
    assert a not in (pool.get_lazy(store, "b"), pool.get_lazy(other, "a"), "a")
    assert len({a, pool.get_lazy(store, "a"), pool.get_lazy(other, "a")}) == 2
    assert copy.copy(a) is copy.deepcopy([a])[0] is a
    assert a.get() == b"a"
    if isinstance(pool, FileStoreCachePool):  # what a store of the user reads is known to it only
        assert pool.get_lazy(other, "a").get() == b"a"
        assert (store.reads["a"], other.reads["a"]) == (1, 1)
    assert pool.to_cache(1, "a") != pool.to_cache(1, "a")


def test_a_missing_file_is_the_error_of_the_store_each_time(pool: CachePool) -> None:
    store = CountingStore()
    lazy, again = pool.get_lazy(store, "missing"), pool.get_lazy(store, "missing")
    for value in (lazy, lazy, again):
        with pytest.raises(KeyError, match="missing"):
            value.get()
    assert pool.get_lazy(store, "a").get() == b"a"


def test_in_another_process_a_value_is_read_from_its_store(pool: CachePool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"before")
    lazy = pool.get_lazy(SystemFileStore(tmp_path), "a.txt")
    lazy.get()
    text = pickle.dumps(lazy)
    assert b"before" not in text
    (tmp_path / "a.txt").write_bytes(b"after")
    loaded = pickle.loads(text)
    assert type(loaded) is DirectLazy
    assert loaded.get() == b"after"
    assert pickle.loads(pickle.dumps(pool.to_cache([1], "x"))).get() == [1]


def test_a_mock_calls_its_function_each_time() -> None:
    calls: list[str] = []

    def returned(name: str) -> int:
        calls.append(name)
        return len(calls)

    lazy = MockLazy("a", returned)
    assert [lazy.get(), lazy.get(sample())] == [1, 2]
    assert calls == ["a", "a"]
    assert lazy == MockLazy("a", returned) != MockLazy("b", returned)


# --------------------------------------------------------------------------- files of a cache


def test_values_of_one_file_share_a_copy_until_the_last_is_read_or_dropped(
    make_pool: MakePool, parent: Path
) -> None:
    pool, store = make_pool(), CountingStore()
    one, two, three = (pool.get_lazy(store, "a") for _ in range(3))
    eventually(lambda: len(files_of(parent)) == 1)
    assert one.get() == b"a"
    del two
    assert len(files_of(parent)) == 1
    assert (pool.current_cache_count, pool.current_cache_size) == (1, 1)
    assert three.get() == b"a"
    assert files_of(parent) == []
    assert (pool.current_cache_count, pool.current_cache_size) == (0, 0)
    assert store.reads["a"] == 1


def test_what_is_being_copied_is_waited_for_and_not_read_twice(make_pool: MakePool) -> None:
    pool, store = make_pool(), CountingStore()
    store.gate.clear()
    lazy = pool.get_lazy(store, "a")
    assert store.has_begun.wait(60)
    threading.Timer(0.05, store.gate.set).start()
    assert lazy.get() == b"a"
    assert store.reads["a"] == 1


def busy_pool(make_pool: MakePool) -> tuple[FileStoreCachePool, CountingStore, Any]:
    """Returns a pool whose one thread waits for a file, the store of the file, and its value."""
    pool, slow = make_pool(num_workers=1), CountingStore("slow")
    slow.gate.clear()
    first = pool.get_lazy(slow, "first")
    assert slow.has_begun.wait(60)
    return pool, slow, first


def test_what_was_not_begun_is_read_directly_and_not_copied(make_pool: MakePool) -> None:
    pool, slow, first = busy_pool(make_pool)
    store = CountingStore("fast")
    lazy, dropped = pool.get_lazy(store, "a"), pool.get_lazy(store, "b")
    assert lazy.get() == b"a"
    del dropped
    slow.gate.set()
    assert first.get() == b"first"
    assert pool.get_lazy(store, "c").get() == b"c"
    assert store.reads == Counter(a=1, c=1)


def test_a_copy_that_was_removed_or_cut_is_read_from_the_store(
    make_pool: MakePool, parent: Path
) -> None:
    pool, store = make_pool(), CountingStore()
    values = [pool.get_lazy(store, key) for key in ("aa", "bb")]
    eventually(lambda: len(files_of(parent)) == 2)
    first, second = sorted(parent.glob("cache_*/[0-9]*"))
    first.unlink()
    second.write_bytes(b"x")
    assert [value.get() for value in values] == [b"aa", b"bb"]
    assert store.reads == Counter(aa=2, bb=2)


def test_a_folder_that_cannot_be_written_is_logged_once_and_nothing_is_read_for_it(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, store = make_pool(), CountingStore()
    first = pool.get_lazy(store, "first")
    eventually(lambda: pool.current_cache_count == 1)
    assert first.get() == b"first"
    shutil.rmtree(pool.cache_dir)
    kept = pool.to_cache({"x": 1}, "x")
    values = [pool.get_lazy(store, key) for key in "abc"]
    time.sleep(0.1)
    assert [value.get() for value in values] == [b"a", b"b", b"c"]
    assert kept.get() == {"x": 1}
    assert store.reads == Counter(["first", *"abc"])
    assert pool.current_cache_count == 0
    assert [r.message.count("cannot be written") for r in caplog.records] == [1]


def test_after_close_values_are_read_directly_and_the_folder_is_gone(
    make_pool: MakePool, parent: Path
) -> None:
    pool, store = make_pool(), CountingStore()
    value, kept = pool.get_lazy(store, "a"), pool.to_cache(1, "kept")
    eventually(lambda: len(files_of(parent)) == 2)
    pool.close()
    assert list(parent.iterdir()) == []
    assert value.get() == b"a"
    with pytest.raises(RuntimeError, match=r"kept.*pool was closed"):
        kept.get()
    assert pool.get_lazy(store, "b").get() == b"b"


def test_a_pool_that_is_dropped_removes_its_folder(parent: Path) -> None:
    pool = FileStoreCachePool(parent_cache_dir=parent)
    value = pool.get_lazy(CountingStore(), "a")
    assert len(list(parent.iterdir())) == 1
    value.get()
    del pool, value
    gc.collect()
    assert list(parent.iterdir()) == []


def test_a_pickled_pool_has_the_settings_and_its_own_folder(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=3, max_cache_count=7, method="pickle", max_cache_size_gbytes=1)
    pool.get_lazy(CountingStore(), "a")
    loaded = pickle.loads(pickle.dumps(pool))
    assert loaded.cache_dir != pool.cache_dir
    assert loaded.cache_dir.parent == pool.cache_dir.parent
    wanted = ("num_workers", "max_cache_count", "method", "max_cache_size")
    assert all(getattr(loaded, name) == getattr(pool, name) for name in wanted)
    loaded.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_workers": 0}, "num_workers=0.*at least 1"),
        ({"method": "zip"}, "method='zip'.*raw"),
        ({"max_cache_count": -1}, "max_cache_count=-1"),
        ({"max_cache_size_gbytes": -1}, "max_cache_size_gbytes=-1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FileStoreCachePool(**settings)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_its_own_folder_and_reads_what_it_inherited_directly(
    make_pool: MakePool, parent: Path
) -> None:
    pool, store = make_pool(), CountingStore()
    values = [pool.get_lazy(store, key) for key in ("a", "b", "c")]
    eventually(lambda: len(files_of(parent)) == 3)

    def reads_all_and_has_its_own_folder() -> bool:
        own = pool.get_lazy(store, "own")
        folders = list(parent.glob("cache_*"))
        found = [value.get() for value in (*values, own)]
        pool.close()
        return found == [b"a", b"b", b"c", b"own"] and len(folders) == 2

    assert is_true_in_fork(reads_all_and_has_its_own_folder)
    assert len(list(parent.iterdir())) == 1
    assert len(files_of(parent)) == 3
    before = store.reads.copy()
    assert [value.get() for value in values] == [b"a", b"b", b"c"]
    assert store.reads == before


ENDS = """
import sys, time
from energon_lite import FileStore, FileStoreCachePool, SourceInfo

class Slow(FileStore):
    def __getitem__(self, key):
        time.sleep(1)
        return b"", SourceInfo("", key, "", ())

    def get_path(self):
        return ""

pool = FileStoreCachePool(parent_cache_dir=sys.argv[1], num_workers=2)
held = [pool.get_lazy(Slow(), str(i)) for i in range(1000)]
"""


def test_a_program_ends_though_files_are_queued_for_minutes(parent: Path) -> None:
    """A pool of `concurrent.futures` would copy them all first."""
    run_program("-c", ENDS, parent).check_returncode()
    assert list(parent.iterdir()) == []


USES = st.lists(
    st.tuples(st.sampled_from(["lazy", "keep", "get", "drop", "close", "lose"]), st.integers(0, 9)),
    max_size=40,
)


@given(
    uses=USES,
    max_count=st.integers(0, 4),
    size=st.integers(0, 40),
    method=st.sampled_from(("raw", "pickle")),
)
def test_any_use_keeps_to_the_limits_and_returns_the_right_data(
    uses: list[tuple[str, int]], max_count: int, size: int, method: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = FileStoreCachePool(
            parent_cache_dir=folder, num_workers=2, max_cache_count=max_count,
            max_cache_size_gbytes=size / 2**30, method=method,
        )  # fmt: skip
        store = CountingStore()
        held: list[tuple[Any, Any, bool]] = []
        for use, number in uses:
            if use == "lazy":
                key = "x" * number
                held.append((key.encode(), pool.get_lazy(store, key), True))
            elif use == "keep":
                held.append((number, pool.to_cache(number, "kept"), False))
            elif use == "close":
                held = [entry for entry in held if entry[2]]
                pool.close()
            elif use == "lose":
                held = [entry for entry in held if entry[2]]
                for path in Path(folder).glob("cache_*/[0-9]*"):
                    path.unlink(missing_ok=True)
            elif held:
                expected, value, _ = held[number % len(held)]
                if use == "get":
                    assert value.get() == value.get() == expected
                else:
                    del held[number % len(held)], value
            assert pool.current_cache_count <= max_count
            assert pool.current_cache_size <= size
        assert all(value.get() == expected for expected, value, _ in held)
        held.clear()
        value = None
        eventually(lambda: pool.current_cache_count == pool.current_cache_size == 0)
        eventually(lambda: files_of(Path(folder)) == [])
        pool.close()
        assert list(Path(folder).iterdir()) == []


def test_any_use_by_any_threads_returns_the_right_data_and_leaves_nothing(
    make_pool: MakePool, parent: Path
) -> None:
    pool = make_pool(num_workers=4, max_cache_count=20)
    store = CountingStore()
    wrong: list[Any] = []

    def use(seed: int) -> None:
        held: list[tuple[str, Any]] = []
        for step in range(400):
            key = str((step * 7 + seed * 13) % 40)
            held.append((key, pool.get_lazy(store, key)))
            if len(held) > 15:
                key, value = held.pop((step * 31 + seed) % len(held))
                if step % 3:
                    wrong.extend({value.get()} - {key.encode()})
        wrong.extend(k for k, value in held if value.get() != k.encode())

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    gc.collect()
    eventually(lambda: pool.current_cache_count == 0 and files_of(parent) == [])
    assert pool.current_cache_size == 0
