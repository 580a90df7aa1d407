"""File stores: random access to files by key, in folders and in prepared tars."""

from __future__ import annotations

import os
import pickle
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DatasetFormatError,
    DecodeFileStore,
    FileStore,
    FileStoreDecoder,
    PrimaryFileStore,
    SampleDecoder,
    SourceInfo,
    SystemFileStore,
    TextSample,
)
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.stores import open_tars
from energon_lite.extras.stores.file_stores import WebdatasetFileStore

from ..conftest import write_tar
from ..helpers import is_true_in_fork


def content(number: int, part: str) -> bytes:
    return f"{number} {part} ".encode() * (number + 1)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Two shards of three samples of two files each."""
    root = tmp_path / "prepared"
    for shard in range(2):
        names = [
            (i, f"dir/{i:04d}.{part}") for i in range(shard, 6, 2) for part in ("json", "a.txt")
        ]
        write_tar(root / f"shard-{shard}.tar", [(n, content(i, n[-3:])) for i, n in names])
    prepare_dataset(root, split_parts={"train": ".*"}, num_workers=0)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "sub").mkdir(parents=True)
    (root / "sub/a.txt").write_bytes(b"text a")
    (tmp_path / "secret.txt").write_bytes(b"secret")
    return root


def index_of(root: Path) -> sqlite3.Connection:
    return sqlite3.connect(root / ".nv-meta/index.sqlite")


def in_threads(number: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_every_member_of_a_prepared_dataset_is_found_by_its_path(prepared: Path) -> None:
    store = WebdatasetFileStore(prepared)
    for i in range(6):
        for name in (f"dir/{i:04d}.json", f"dir/{i:04d}.a.txt"):
            source = SourceInfo(str(prepared), name, f"shard-{i % 2}.tar", (name,))
            assert store[name] == (content(i, name[-3:]), source)
            assert store.get(name) == store.get_raw(name)[0] == content(i, name[-3:])
    assert store.get_path() == str(prepared)


def test_missing_files_are_key_errors_that_name_key_store_and_what_is_there(
    prepared: Path, folder: Path
) -> None:
    store = WebdatasetFileStore(str(prepared))
    with pytest.raises(KeyError) as caught:
        store["dir/0001.jpg"]
    assert str(caught.value) == (
        f"WebdatasetFileStore({str(prepared)!r}): sample 'dir/0001' has no part 'jpg'; it has "
        "a.txt, json"
    )
    with pytest.raises(KeyError, match=r"no file 'x\.txt': no sample has the key 'x'"):
        store["x.txt"]
    for key in ("dir/0001", ".txt", "", "dir/.txt"):
        with pytest.raises(ValueError, match="can be no key"):
            store[key]
    with pytest.raises(KeyError, match=r"SystemFileStore\(.*no file 'no\.txt'"):
        SystemFileStore(folder)["no.txt"]
    with pytest.raises(FileNotFoundError, match=r"no file 'sub/a\.txt/b'"):
        SystemFileStore(folder)["sub/a.txt/b"]


def test_source_is_appended_to_samples_and_crude_samples(prepared: Path, folder: Path) -> None:
    tars, plain = WebdatasetFileStore(prepared), SystemFileStore(folder)
    first = SourceInfo("set", 0, "s.tar", ("k.txt",))
    sample = TextSample(__key__="k", __restore_key__=(), __sources__=(first,), text="")
    crude: dict[str, Any] = {}
    for target in (sample, crude):
        tars.get("dir/0002.json", target)
        plain.get("sub/a.txt", target)
    added = (tars["dir/0002.json"][1], plain["sub/a.txt"][1])
    assert sample.__sources__ == (first, *added)
    assert crude["__sources__"] == added
    assert added[1] == SourceInfo(str(folder), "sub/a.txt", str(folder), ("sub/a.txt",))


def test_decoding_store_decodes_by_name_and_keeps_the_source(prepared: Path) -> None:
    inner = WebdatasetFileStore(prepared)
    store = DecodeFileStore(inner, decoder=SampleDecoder())
    assert store["dir/0001.a.txt"] == ("1 txt 1 txt ", inner["dir/0001.a.txt"][1])
    assert store.get_raw("dir/0001.a.txt") == inner["dir/0001.a.txt"]
    assert store.decode_raw("dir/0001.a.txt", b"text") == "text"
    assert store.get_path() == inner.get_path()
    assert store.config() == inner.config()
    assert isinstance(SampleDecoder(), FileStoreDecoder)


def test_primary_store_completes_keys_that_start_with_a_dot(prepared: Path) -> None:
    inner = WebdatasetFileStore(prepared)
    store = PrimaryFileStore(DecodeFileStore(inner, decoder=SampleDecoder()), "dir/0003")
    assert store.get(".a.txt") == store.get("dir/0003.a.txt") == "3 txt " * 4
    assert store.get("dir/0001.a.txt") == "1 txt 1 txt "
    assert store.get_raw(".a.txt") == inner["dir/0003.a.txt"]
    assert store.decode_raw(".a.txt", b"text") == "text"


def test_own_store_needs_only_two_methods() -> None:
    class Own(FileStore[int]):
        def __getitem__(self, key: str) -> tuple[int, SourceInfo]:
            return len(key), SourceInfo("", key, "", ())

    assert Own().get("four") == 4
    with pytest.raises(NotImplementedError, match="Own has no get_path"):
        Own().get_path()


@pytest.mark.parametrize("key", ["../secret.txt", "sub/../../secret.txt", "/etc/passwd", ""])
def test_no_key_leads_out_of_the_folder(folder: Path, key: str) -> None:
    with pytest.raises(ValueError, match=r"leads out of the folder; write a path inside"):
        SystemFileStore(folder)[key]


def test_links_stay_in_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "in.txt").symlink_to("sub/a.txt")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "up").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    for root in (folder, tmp_path / "link"):
        assert SystemFileStore(root).get("in.txt") == b"text a"
        for key in ("out.txt", "up/secret.txt"):
            with pytest.raises(ValueError, match="is a link that leads out of the folder"):
                SystemFileStore(root)[key]


def test_relative_folder_stays_that_of_the_start(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder.parent)
    store = SystemFileStore("folder")
    assert SystemFileStore().get(str(folder / "sub/a.txt")) == b"text a"
    assert SystemFileStore().get("folder/sub/a.txt") == b"text a"
    monkeypatch.chdir("/")
    assert store.get("sub/a.txt") == pickle.loads(pickle.dumps(store)).get("sub/a.txt") == b"text a"


def test_index_without_parts_is_read_through_the_headers_of_the_sample(prepared: Path) -> None:
    with index_of(prepared) as connection:
        connection.execute("DROP TABLE sample_parts")
    connection.close()
    store = WebdatasetFileStore(prepared)
    for i in range(6):
        assert store.get(f"dir/{i:04d}.a.txt") == content(i, "txt")
    with pytest.raises(KeyError, match=r"sample 'dir/0001' has no part 'jpg'$"):
        store["dir/0001.jpg"]


def test_key_of_two_samples_is_refused_where_an_old_index_has_it(prepared: Path) -> None:
    with index_of(prepared) as connection:
        connection.executescript(
            "CREATE TABLE old AS SELECT * FROM samples; DROP TABLE samples;"
            "ALTER TABLE old RENAME TO samples;"
            "UPDATE samples SET sample_key = 'dir/0000' WHERE sample_key = 'dir/0003'"
        )
    connection.close()
    store = WebdatasetFileStore(prepared)
    assert store.get("dir/0001.json") == content(1, "son")
    with pytest.raises(DatasetFormatError, match="several samples have the key 'dir/0000'"):
        store["dir/0000.json"]


def test_replaced_and_truncated_tars_are_noticed(prepared: Path) -> None:
    store = WebdatasetFileStore(prepared)
    path = prepared / "shard-0.tar"
    os.truncate(path, 1024)
    with pytest.raises(DatasetFormatError, match=r"shard-0\.tar: a file .*the tar has 1024"):
        store["dir/0004.json"]
    path.unlink()
    write_tar(path, [("other.txt", b"x" * 9000)])
    with pytest.raises(DatasetFormatError, match=r"sample 0 has the key 'other', where .*0000"):
        store["dir/0000.json"]
    with pytest.raises(DatasetFormatError, match="sample 0 has the key 'other'"):
        WebdatasetFileStore(prepared)["dir/0000.json"]


@pytest.mark.parametrize("what", ["missing folder", "not prepared", "without an index"])
def test_store_of_what_is_not_prepared_names_the_command(
    prepared: Path, folder: Path, what: str
) -> None:
    (prepared / ".nv-meta/index.sqlite").unlink()
    roots = {
        "missing folder": folder / "no", "not prepared": folder, "without an index": prepared
    }  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"index\.sqlite, in which .*`energon-lite prepare"):
        WebdatasetFileStore(roots[what])


def test_many_threads_read_more_tars_than_may_be_open(prepared: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(open_tars, "_MAX_OPEN", 1)
    store = WebdatasetFileStore(prepared)

    def read(thread: int) -> None:
        for step in range(200):
            i = (step * 5 + thread) % 6
            assert store.get(f"dir/{i:04d}.json") == content(i, "son")

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    in_threads(8, read)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208


def test_a_fork_opens_its_own_files(prepared: Path) -> None:
    store = WebdatasetFileStore(prepared)
    keys = [f"dir/{i:04d}.json" for i in range(6)]
    here = [store.get(key) for key in keys]
    assert is_true_in_fork(lambda: [store.get(key) for key in keys] == here)
    assert [store.get(key) for key in keys] == here


def test_pickled_store_has_no_open_file(prepared: Path) -> None:
    store = DecodeFileStore(WebdatasetFileStore(prepared), decoder=SampleDecoder())
    before = pickle.dumps(store)
    expected = store["dir/0001.a.txt"]
    assert pickle.dumps(store) == before
    assert pickle.loads(before)["dir/0001.a.txt"] == expected


def test_configuration_changes_with_the_data_only(prepared: Path, tmp_path: Path) -> None:
    before = WebdatasetFileStore(prepared).config()
    moved = prepared.rename(tmp_path / "moved")
    assert WebdatasetFileStore(moved).config() == before
    write_tar(moved / "shard-2.tar", [("new.txt", b"x")])
    prepare_dataset(moved, split_parts={"train": ".*"}, num_workers=0, force_overwrite=True)
    assert WebdatasetFileStore(moved).config() != before
