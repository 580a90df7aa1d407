"""File stores whose storage fails, whose keys are hostile, or whose files are not what they were.

Nothing waits, as in all tests: the clock of the readers moves on by what they sleep.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    Cooker,
    DatasetFormatError,
    DefaultTaskEncoder,
    FatalSampleError,
    FileStore,
    FileStoreCachePool,
    SystemFileStore,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.stores.file_stores import JsonlFileStore, WebdatasetFileStore
from energon_lite.formats.sqlite import IndexDatabase

from ..conftest import write_tar
from ..faults.failing_storage import FailingStorage as Faults
from ..helpers import metadataset

KEYS = {"folder": "d/1.txt", "tars": "d/1.txt", "lines": "1.json"}
KINDS = sorted(KEYS)
PASSING = ["EIO", "ESTALE"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The same texts in a folder, in tars and in lines."""
    root = tmp_path / "data"
    (root / "folder/d").mkdir(parents=True)
    for i in range(6):
        (root / f"folder/d/{i}.txt").write_text(f"text {i}")
    for shard in range(3):
        names = [(f"d/{i}.txt", f"text {i}".encode()) for i in (2 * shard, 2 * shard + 1)]
        write_tar(root / f"tars/{shard}.tar", names)
    prepare_dataset(root / "tars", split_parts={"train": ".*"}, num_workers=0)
    (root / "lines").mkdir()
    (root / "lines/x.jsonl").write_text("".join(f'{{"text {i}": 1}}\n' for i in range(6)))
    (root / "lines/y.jsonl").write_text("{}\n")
    return root


def store_of(root: Path, kind: str) -> FileStore[bytes]:
    if kind == "folder":
        return SystemFileStore(root / "folder")
    if kind == "tars":
        return WebdatasetFileStore(root / "tars")
    return JsonlFileStore(root / "lines/x.jsonl")


# ------------------------------------------------------------------------------ storage that fails


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_passes_costs_nothing(
    root: Path, faults: Faults, kind: str, name: str
) -> None:
    store = store_of(root, kind)
    for warm in (False, True):
        faults.fail(name, f"data/{kind}", 3)
        assert b"text 1" in store.get(KEYS[kind]), warm
    assert 0 < faults.waited_sec < 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_fails_alone_is_tried_for_seconds_and_then_for_a_moment(
    root: Path, faults: Faults, kind: str
) -> None:
    store = store_of(root, kind)
    faults.fail("EIO", {"folder": "d/1.txt", "tars": "0.tar", "lines": "x.jsonl"}[kind])
    with pytest.raises(OSError, match=r"tried \d+ times in 4\.0 s") as caught:
        store.get(KEYS[kind])
    assert caught.value.errno == errno.EIO
    assert faults.waited_sec == pytest.approx(4)
    with pytest.raises(OSError, match="Input/output error"):
        store.get(KEYS[kind])
    assert faults.waited_sec == pytest.approx(4.1)
    if kind != "lines":
        assert store.get("d/3.txt") == b"text 3"
    if kind == "folder":  # a file beside which there is no other
        (root / "folder/alone").mkdir()
        (root / "folder/alone/1.txt").write_text("x")
        faults.fail("EIO", "alone/1.txt")
        with pytest.raises(OSError, match="Input/output error"):
            store.get("alone/1.txt")


@pytest.mark.parametrize("is_mount_point_left", [False, True])
@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_an_unmounted_folder_is_waited_for(
    root: Path, faults: Faults, kind: str, is_mount_point_left: bool
) -> None:
    store, folder = store_of(root, kind), root / kind
    folder.rename(root / "away")
    if is_mount_point_left:
        folder.mkdir()

    def mount(waited: float) -> None:
        if waited > 60 and (root / "away").exists():
            shutil.rmtree(folder, ignore_errors=True)
            (root / "away").rename(folder)

    faults.while_waiting = mount
    assert store.get("d/1.txt") == b"text 1"
    assert faults.waited_sec > 60


def test_a_missing_file_is_not_waited_for(root: Path, faults: Faults) -> None:
    for kind in ("folder", "tars"):
        with pytest.raises(KeyError, match=r"no file 'd/9\.txt'"):
            store_of(root, kind)["d/9.txt"]
    (root / "empty").mkdir()
    for folder in ("empty", "never there"):
        with pytest.raises(KeyError, match=r"no file 'a\.txt'"):
            SystemFileStore(root / folder)["a.txt"]
    assert faults.waited_sec == 0


def test_an_index_that_cannot_be_read_for_a_moment_is_opened_again(
    root: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(root, "tars")
    assert store.get("d/0.txt") == b"text 0"
    asked: list[IndexDatabase] = []
    find_part = IndexDatabase.find_part

    def fails(index: IndexDatabase, *names: str) -> Any:
        asked.append(index)
        if len(asked) < 4:
            raise OSError(errno.EIO, "disk I/O error")
        return find_part(index, *names)

    monkeypatch.setattr(IndexDatabase, "find_part", fails)
    assert store.get("d/5.txt") == b"text 5"
    assert len(set(asked)) == len(asked) == 4


def test_copies_in_the_background_do_not_wait_and_values_do(root: Path, faults: Faults) -> None:
    pool = FileStoreCachePool(parent_cache_dir=root / "caches")
    store = store_of(root, "folder")
    faults.fail("ENOTCONN", "data/folder", until_sec=100)
    value = pool.get_lazy(store, "d/1.txt")
    entry = value.entry
    assert entry is not None
    while not entry.made.done():
        os.sched_yield()
    assert faults.waited_sec == 0
    assert value.get() == b"text 1"
    assert faults.waited_sec >= 100
    pool.close()


@stateless
@cooker
def cook(sample: Any, notes: Any) -> TextSample:
    text = notes.get(sample["txt"].decode(), sample).decode()
    return TextSample(**basic_sample_keys(sample), text=text)


class Notes(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = (Cooker(cook),)
    decoder = None


@pytest.fixture
def load(root: Path) -> Callable[[str], Any]:
    names = [(f"{i:03d}.txt", f"d/{i}.txt".encode()) for i in range(6)]
    write_tar(root / "crude/0.tar", names)
    prepare_dataset(root / "crude", split_parts={"train": ".*"}, num_workers=0)
    text = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (root / "crude/.nv-meta/dataset.yaml").write_text(text)

    def loader(aux: str) -> Any:
        (root / "m.yaml").write_text(
            json.dumps(metadataset({"path": "crude", "aux": {"notes": aux}}))
        )
        config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        return get_savable_loader(
            get_train_dataset(
                root / "m.yaml", worker_config=config, batch_size=None, task_encoder=Notes(),
                repeat=False, shuffle_buffer_size=None, max_samples_per_sequence=None,
            )
        )  # fmt: skip

    return loader


@pytest.mark.parametrize("aux", ["filesystem://folder", "tars"])
def test_an_outage_of_a_store_loses_no_sample(
    root: Path, load: Any, faults: Faults, aux: str
) -> None:
    loader = load(aux)
    expected = sorted(f"text {i}" for i in range(6))
    faults.fail("ENOTCONN", f"data/{aux[-6:].lstrip('/')}", until_sec=100)
    assert sorted(sample.text for sample in loader) == expected
    assert loader.num_skipped == {}
    loader = load(aux)
    faults.fail("ENOTCONN", f"data/{aux[-6:].lstrip('/')}")
    with pytest.raises(FatalSampleError, match=r"an outage.*Bring the storage"):
        list(loader)
    assert loader.num_skipped == {}


def test_one_file_that_cannot_be_read_costs_one_sample(
    root: Path, load: Any, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    loader = load("filesystem://folder")
    faults.fail("EIO", "d/4.txt")
    assert sorted(sample.text for sample in loader) == [f"text {i}" for i in (0, 1, 2, 3, 5)]
    assert loader.num_skipped == {"crude/train": 1}
    assert "Input/output error" in caplog.text


# ----------------------------------------------------------------------------------- hostile keys

HOSTILE = [
    "", ".", "..", "../x", "d/../../x", "/etc/passwd", "/dev/zero", "d", "d/", "./d",
    "d//1.txt/x", "a\0b.txt", "\0", "\udc80.txt", "x" * 300 + ".txt", "x/" * 3000 + "a.txt",
    "x" * 100_000, "pipe.txt", "socket.txt", "loop.txt", "dangling.txt", "out.txt", "up/x.txt",
    "zero.txt", "9" * 5000 + ".json", "-1.json", "1e3.json", "1.json\n",
    "'; DROP TABLE samples; --.txt",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_keys_are_refused_at_once(
    root: Path, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = root / "folder"
    (tmp_path / "x.txt").write_text("secret")
    (tmp_path / "x").write_text("secret")
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "dangling.txt").symlink_to("nothing.txt")
    (folder / "out.txt").symlink_to(tmp_path / "x.txt")
    (folder / "up").symlink_to(tmp_path)
    (folder / "zero.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(folder)
        server.bind("socket.txt")  # a whole path may be too long
        store = store_of(root, kind)
        for key in HOSTILE:
            with pytest.raises((KeyError, ValueError, OSError)) as caught:
                store[key]
            assert str(caught.value), key
    assert faults.waited_sec < 1


def test_any_path_that_is_no_file_is_refused_by_a_store_without_a_folder(root: Path) -> None:
    os.mkfifo(root / "pipe")
    for path in ("/dev/zero", "/dev/tty", "/proc", str(root / "pipe"), "a\0b", ""):
        with pytest.raises((KeyError, ValueError, OSError)):
            SystemFileStore()[path]


# ------------------------------------------------------------------------------- replaced files


def test_a_corrupt_index_is_an_error_or_returns_what_is_right(root: Path) -> None:
    index = root / "tars/.nv-meta/index.sqlite"
    whole = index.read_bytes()
    rng = random.Random(0)
    num_errors = 0
    for trial in range(60):
        damaged = bytearray(whole)
        if trial < 10:
            damaged = damaged[: rng.randrange(len(whole))]
        else:
            start = rng.randrange(len(whole))
            damaged[start : start + 40] = rng.randbytes(40)
        index.write_bytes(damaged[: len(whole)])
        store = store_of(root, "tars")
        for i in range(6):
            try:
                assert store.get(f"d/{i}.txt") == f"text {i}".encode()
            except (DatasetFormatError, KeyError):
                num_errors += 1
    assert num_errors > 10


@pytest.mark.parametrize(
    "names", [["d/0.txt", "a/new.txt", "d/1.txt"], ["d/1.txt", "d/0.txt"], ["d/0.txt", "d/7.txt"]]
)
def test_a_tar_that_was_replaced_is_noticed_by_its_first_or_last_sample(
    root: Path, names: list[str]
) -> None:
    write_tar(root / "tars/0.tar", [(name, b"other") for name in names])
    with pytest.raises(
        DatasetFormatError, match=r"0\.tar: sample .* was replaced after\s+preparing"
    ):
        store_of(root, "tars")["d/0.txt"]
    assert store_of(root, "tars").get("d/2.txt") == b"text 2"


def test_an_index_with_wild_places_takes_no_memory_and_no_time(root: Path) -> None:
    for column, value in (
        ("content_byte_offset", -1), ("content_byte_offset", 1 << 62), ("content_byte_size", -5),
        ("tar_file_id", 99), ("tar_file_id", -1),
    ):  # fmt: skip
        folder = shutil.copytree(root / "tars", root / f"copy{column}{value}")
        with sqlite3.connect(folder / ".nv-meta/index.sqlite") as connection:
            connection.execute(f"UPDATE sample_parts SET {column} = {value}")
            if column == "tar_file_id":
                connection.execute(f"UPDATE samples SET {column} = {value}")
        connection.close()
        words = "has a shard" if column == "tar_file_id" else None
        with pytest.raises((DatasetFormatError, KeyError), match=words):
            WebdatasetFileStore(folder)["d/1.txt"]


# ------------------------------------------------------------------------- folders of the cache


def removed(folder: Path) -> None:
    for _ in range(1000):  # the pool may write into it at the same time
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    raise AssertionError(f"{folder} is still there")


def replaced_by_a_file(folder: Path) -> None:
    removed(folder)
    folder.write_text("")


def filled_with_other_bytes(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"")


@pytest.mark.parametrize("harm", [removed, replaced_by_a_file, filled_with_other_bytes])
def test_a_cache_folder_that_is_harmed_changes_no_content(root: Path, harm: Any) -> None:
    pool = FileStoreCachePool(parent_cache_dir=root / "caches", num_workers=2)
    store = store_of(root, "folder")
    for number in range(30):
        values = [pool.get_lazy(store, f"d/{i}.txt") for i in range(6)]
        if number == 10:
            harm(pool.cache_dir)
        assert [value.get() for value in values] == [f"text {i}".encode() for i in range(6)]
    pool.close()


def test_a_full_disk_changes_no_content(root: Path) -> None:
    """Here a limit of the length of files, which ends the writing in the middle as a full disk."""
    for i in range(6):
        (root / f"folder/d/{i}.txt").write_text(f"{i}" * 10_000)
    pool = FileStoreCachePool(parent_cache_dir=root / "caches", num_workers=2)
    store = store_of(root, "folder")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        kept = pool.to_cache("x" * 9000, "kept")
        values = [pool.get_lazy(store, f"d/{i}.txt") for i in range(6)]
        assert [value.get() for value in values] == [f"{i}".encode() * 10_000 for i in range(6)]
        assert kept.get() == "x" * 9000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert pool.current_cache_count == 0
    assert list(pool.cache_dir.iterdir()) == []
    pool.close()
