from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import sqlite3
import stat
import tarfile
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.prepare import indexing, pool, prepare_dataset
from energon_lite.extras.prepare.choose_shards import Shard
from energon_lite.extras.prepare.indexing import rename_samples
from energon_lite.extras.prepare.pool import ordered_results
from energon_lite.formats.nvmeta import SplitFile, is_prepared, read_index, read_info
from energon_lite.formats.sqlite import sample_indices
from energon_lite.formats.tar import sample_headers, split_name
from energon_lite.storage.yaml import load_yaml

from ..conftest import examples, write_tar
from ..programs import running_program

ALL_TRAIN = {"split_ratio": "1,0,0", "num_workers": 1}


def write_shards(root: Path, num_shards=4, num_samples=5) -> None:
    for shard in range(num_shards):
        numbers = range(shard * num_samples, (shard + 1) * num_samples)
        pairs = itertools.product(numbers, ("txt", "json"))
        members = [(f"{i:05d}.{part}", f"{part} of {i}".encode()) for i, part in pairs]
        write_tar(root / f"parts/data-{shard:02d}.tar", members)


@pytest.fixture
def root(tmp_path):
    write_shards(tmp_path / "data")
    return tmp_path / "data"


def files(root: Path) -> dict[str, bytes]:
    """All files but the tars, the random id, and the hash of it."""
    found = {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".tar" and path.name != "index.uuid"
    }
    return {
        name: data[8:] if name.endswith("offsets.bin") else data for name, data in found.items()
    }


# What is written


def test_a_prepared_folder_has_the_files_of_the_format(root):
    report = prepare_dataset(
        root, split_ratio="2,1,1", sample_type="TextSample", field_map={"text": "txt"}
    )
    assert (report.shards, report.samples, report.resumed_shards) == (4, 20, 0)
    assert report.parts == {"txt": 20, "json": 20}
    assert {name: (s.shards, s.samples) for name, s in report.splits.items()} == {
        "train": (2, 10), "val": (1, 5), "test": (1, 5),
    }  # fmt: skip
    json.dumps(report.to_json())
    meta = root / ".nv-meta"
    assert sorted(path.name for path in meta.iterdir()) == [
        ".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "offsets.bin", "split.yaml",
    ]  # fmt: skip
    assert json.loads((meta / ".info.json").read_text()) == {
        "energon_version": "7.4.1",
        "shard_counts": {f"parts/data-{i:02d}.tar": 5 for i in range(4)},
    }
    assert (meta / "split.yaml").read_text() == (
        "split_parts:\n  train:\n  - parts/data-{00..01}.tar\n  val:\n  - parts/data-02.tar\n"
        "  test:\n  - parts/data-03.tar\nexclude: []\n"
    )
    assert (meta / "dataset.yaml").read_text() == (
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\n"
        "field_map:\n  text: txt\n"
    )
    text = (meta / "index.uuid").read_text()
    assert str(uuid.UUID(text, version=4)) == text
    index = (root / "parts/data-00.tar.idx").read_bytes()
    assert index[:16] == bytes(8) + (2048).to_bytes(8, "little")


def test_the_database_has_the_schema_and_rows_of_the_format(root):
    prepare_dataset(root, **ALL_TRAIN)
    connection = sqlite3.connect(root / ".nv-meta/index.sqlite")
    schema = {name: " ".join(sql.split()) for name, sql in connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    )}  # fmt: skip
    assert schema == {
        "samples": "CREATE TABLE samples ( tar_file_id INTEGER NOT NULL, "
        "sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL, "
        "byte_offset INTEGER, byte_size INTEGER )",
        "sample_parts": "CREATE TABLE sample_parts ( tar_file_id INTEGER, "
        "sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, "
        "content_byte_size INTEGER )",
        "idx_samples_by_tar_and_idx": "CREATE INDEX idx_samples_by_tar_and_idx ON "
        "samples(tar_file_id, sample_index)",
        "idx_sample_parts_seq": "CREATE INDEX idx_sample_parts_seq ON "
        "sample_parts(tar_file_id, sample_index, content_byte_offset)",
        "idx_sample_parts_full": "CREATE INDEX idx_sample_parts_full ON sample_parts( "
        "tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)",
    }
    assert connection.execute("SELECT * FROM samples WHERE sample_key = '00006'").fetchall() == [
        (1, "00006", 1, 2048, 2048)
    ]
    assert connection.execute(
        "SELECT * FROM sample_parts WHERE tar_file_id = 1 AND sample_index = 1 "
        "ORDER BY content_byte_offset"
    ).fetchall() == [(1, 1, "txt", 2560, 8), (1, 1, "json", 3584, 9)]
    keys = [*(f"{i:05d}" for i in range(20)), "none"] * 100
    assert sample_indices(root, keys) == {f"{i:05d}": divmod(i, 5) for i in range(20)}


def test_members_that_belong_to_no_sample_are_part_of_the_one_before_them(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in [
            "d/",
            "d/1.txt",
            "d/noext",
            "d/1.json",
            "__meta__/x.txt",
            "d/2.txt",
            ".hidden",
        ]:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = 0 if name.endswith("/") else 3
            tar.addfile(info, io.BytesIO(b"abc"))
    report = prepare_dataset(tmp_path, **ALL_TRAIN)
    assert (report.samples, report.parts) == (2, {"txt": 2, "json": 1})
    stored = (tmp_path / "a.tar.idx").read_bytes()
    assert [int.from_bytes(stored[i : i + 8], "little") for i in (0, 8, 16)] == [512, 4608, 6656]
    assert read_index(tmp_path / "a.tar", 2).tolist() == [0, 4608, 6656]


part = st.sampled_from(["txt", "json", "seg.png", "jpg"])
samples = st.dictionaries(
    st.from_regex(r"(a/|b\.c/)?[a-z0-9]{1,90}", fullmatch=True),
    st.dictionaries(part, st.binary(max_size=900), min_size=1), min_size=1, max_size=9,
)  # fmt: skip


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=samples, tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_every_sample_is_found_again_by_the_index(tmp_path, content, tar_format):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tar_format) as tar:
        for key, parts in content.items():
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    prepare_dataset(tmp_path, **ALL_TRAIN, force_overwrite=True)
    offsets = read_index(path, len(content)).tolist()
    data = path.read_bytes()
    found = {}
    for start, stop in itertools.pairwise(offsets):
        for header in sample_headers(data, start, stop):
            key, part = split_name(header.name)
            found.setdefault(key, {})[part] = data[header.data : header.data + header.size]
    assert found == content
    assert list(found) == list(content)


def test_split_patterns_exclusion_and_other_config_names(root):
    report = prepare_dataset(
        root, split_parts={"train": "parts/data-{00..01}", "dev": [r".*02\.tar"]},
        exclude=r"03\.tar$", split_config="my.json",
    )  # fmt: skip
    assert report.shards == 3
    split = SplitFile(root, read_info(root), "my.json")
    assert split.names == ("train", "dev")
    assert split.part("dev").shards == ("parts/data-02.tar",)
    assert not (root / ".nv-meta/split.yaml").exists()


def test_tars_behind_links_are_found_and_a_circle_of_links_ends(tmp_path):
    write_shards(tmp_path / "real", 2)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/linked").symlink_to(tmp_path / "real")
    (tmp_path / "real/up").symlink_to(tmp_path / "data")
    with pytest.raises(DatasetFormatError, match=r"a link leads out of .*--follow-links"):
        prepare_dataset(tmp_path / "data", **ALL_TRAIN)
    assert not list((tmp_path / "real").rglob("*.idx"))
    assert prepare_dataset(tmp_path / "data", **ALL_TRAIN, follow_links=True).shards == 2


def test_one_process_and_several_write_the_same(root):
    prepare_dataset(root, **ALL_TRAIN)
    one = files(root)
    prepare_dataset(root, split_ratio="1,0,0", num_workers=2, force_overwrite=True)
    assert files(root) == one


def test_a_part_that_gets_no_shard_is_a_warning(root):
    report = prepare_dataset(root, **{**ALL_TRAIN, "split_ratio": "8,1,1"})
    assert {part: count.shards for part, count in report.splits.items()} == {
        "train": 3, "val": 0, "test": 1,
    }  # fmt: skip
    assert any("leaves 'val' empty: there are only 4 shards" in line for line in report.warnings)
    assert prepare_dataset(root, **ALL_TRAIN, force_overwrite=True).warnings == ()


# What is refused, before anything is read


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_ratio": None}, "give a split"),
        ({"split_parts": {"train": "parts/*.tar"}}, "looks like a glob"),
        ({"sample_type": "TextSampl"}, "unknown sample type 'TextSampl'. Did you mean"),
        ({"sample_type": "Sample"}, "unknown sample type 'Sample'"),
        ({"sample_type": "TextSample"}, "TextSample needs a field map .* for: text"),
        ({"field_map": {"text": "txt"}}, "needs a sample type"),
        ({"sample_type": "CrudeWebdataset", "field_map": {"a": "b"}}, "has no field map"),
        ({"sample_type": "TextSample", "field_map": {"txt": "txt"}}, "no field 'txt'"),
        ({"sample_type": "CaptioningSample", "field_map": {"image": "jpg"}}, "needs .* 'caption'"),
        ({"sample_type": "TextSample", "field_map": {"text": "json[a"}}, "json"),
        ({"exclude": "("}, "no regular expression"),
        ({"tar_index_only": True}, "keeps split and sample type"),
    ],
)
def test_wrong_options_are_refused_before_a_tar_is_read(root, options, message, monkeypatch):
    monkeypatch.setattr(
        "energon_lite.extras.prepare.indexing.scan_shard", lambda path: pytest.fail("read")
    )
    with pytest.raises(ValueError, match=message):
        prepare_dataset(root, **{**ALL_TRAIN, **options})
    assert files(root) == {}


def test_a_missing_folder_a_file_a_remote_path_and_a_folder_without_tars_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        prepare_dataset(tmp_path / "none", **ALL_TRAIN)
    with pytest.raises(FileNotFoundError, match=r"no \.tar file in this folder"):
        prepare_dataset(tmp_path, **ALL_TRAIN)
    with pytest.raises(ValueError, match="'hdfs://p/x' is remote"):
        prepare_dataset("hdfs://p/x", **ALL_TRAIN)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match="is for folders of tars"):
        prepare_dataset(tmp_path / "a.jsonl", **ALL_TRAIN)
    write_shards(tmp_path, 1)
    with pytest.raises(NotADirectoryError, match="is a file"):
        prepare_dataset(tmp_path / "parts/data-00.tar", **ALL_TRAIN)
    with pytest.raises(FileNotFoundError, match="exclude 'data' leaves none"):
        prepare_dataset(tmp_path, **ALL_TRAIN, exclude="data")


def test_a_folder_that_cannot_be_written_to_is_named(root, monkeypatch):
    (root / ".nv-meta").write_text("a file where the folder should be")
    with pytest.raises(
        NotADirectoryError, match="a file is in the place of a folder; move it away"
    ):
        prepare_dataset(root, **ALL_TRAIN)
    (root / ".nv-meta").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "parts")
    with pytest.raises(PermissionError, match="parts cannot be written to"):
        prepare_dataset(root, **ALL_TRAIN)


def test_prepared_and_edited_files_are_overwritten_only_by_option(root):
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/dataset.yaml").write_text("__class__: Mine\n")
    with pytest.raises(FileExistsError, match=r"dataset\.yaml exists and would be changed"):
        prepare_dataset(root, **ALL_TRAIN, sample_type="CrudeWebdataset")
    prepare_dataset(root, **ALL_TRAIN)  # no word about dataset.yaml
    with pytest.raises(FileExistsError, match="already prepared"):
        prepare_dataset(root, **ALL_TRAIN)
    assert load_yaml(root / ".nv-meta/dataset.yaml") == {"__class__": "Mine"}
    options = {**ALL_TRAIN, "sample_type": "CrudeWebdataset", "force_overwrite": True}
    prepare_dataset(root, **options, dataset_config="other.json")
    assert json.loads((root / ".nv-meta/other.json").read_text())["__class__"] == "CrudeWebdataset"
    prepare_dataset(root, **options)
    assert load_yaml(root / ".nv-meta/dataset.yaml")["__class__"] == "CrudeWebdataset"


# What is refused in the tars


def txt(*keys):
    return [(f"{key}.txt", b"x") for key in keys]


def break_tar(root: Path, members=None, data=None) -> None:
    path = root / "parts/data-02.tar"
    if data is None:
        write_tar(path, members)
    else:
        path.write_bytes(data(path.read_bytes()))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"members": txt("x", "00001")}, "key '00001' is also in .*data-00.tar"),
        ({"members": txt("a", "b", "a")}, "key 'a' is there twice: member 'a.txt' comes again"),
        ({"members": [*txt("a", "b"), ("a.json", b"")]}, "'a' are apart: 'a.txt',.*'a.json'"),
        ({"members": txt("a", "a")}, r"member 'a\.txt' is there twice in a row"),
        ({"members": [("noext", b""), (".h", b"")]}, r"holds no sample.*\(2 other files"),
        ({"data": lambda data: data[:1100]}, r"header at byte 1024 is cut off .*'00010\.txt'"),
        ({"data": lambda data: data[:1540]}, r"'00010\.json' is cut off .*'00010\.txt'"),
        ({"data": lambda data: data[:1600]}, r"ends in the padding after member '00010\.json'"),
        ({"data": lambda data: b""}, "the file is empty"),
        ({"data": lambda data: bytes(range(1, 256)) * 4}, "no tar header at byte 0"),
        ({"data": lambda data: gzip.compress(data, 0)}, "is no tar, but gzip data; decompress"),
        ({"members": [("a\udcff.txt", b"")]}, "not UTF-8; rename it"),
    ],
)
def test_a_bad_tar_is_refused_by_name_and_the_folder_stays_unprepared(root, broken, message):
    break_tar(root, **broken)
    with pytest.raises(DatasetFormatError, match=message) as caught:
        prepare_dataset(root, **ALL_TRAIN)
    assert "parts/data-02.tar" in str(caught.value)
    assert not is_prepared(root)
    assert not list(root.rglob("*.idx"))


def test_all_bad_tars_are_listed_at_once(root):
    for name in ("data-01.tar", "data-03.tar"):
        (root / "parts" / name).write_bytes(b"")
    with pytest.raises(DatasetFormatError, match=r"(?s)2 of 4 shards .*data-01.*data-03"):
        prepare_dataset(root, split_ratio="1,0,0", num_workers=2)


def test_a_failed_run_leaves_a_prepared_dataset_as_it_was(root):
    prepare_dataset(root, **ALL_TRAIN)
    before = files(root)
    uid = (root / ".nv-meta/index.uuid").read_text()
    break_tar(root, data=lambda data: data[:700])
    with pytest.raises(DatasetFormatError):
        prepare_dataset(root, **ALL_TRAIN, force_overwrite=True)
    after = {name: data for name, data in files(root).items() if "prepare.partial" not in name}
    assert after == before
    assert (root / ".nv-meta/index.uuid").read_text() == uid


def test_a_field_map_that_the_data_cannot_fill_is_refused(root):
    typed = {**ALL_TRAIN, "sample_type": "TextSample"}
    with pytest.raises(DatasetFormatError, match=r"'text' is mapped to 'jpg,png', but no sample"):
        prepare_dataset(root, **typed, field_map={"text": "jpg,png"})
    assert not is_prepared(root)
    assert prepare_dataset(root, **typed, field_map={"text": "jpg,txt"}).resumed_shards == 4


def test_a_field_map_that_no_single_sample_can_fill_is_refused_with_counts(tmp_path):
    members = [(f"{i}.jpg", b"x") for i in range(3)] + [(f"{i}-cap.txt", b"x") for i in range(2)]
    write_tar(tmp_path / "a.tar", members)
    field_map = {"image": "png,jpg", "caption": "txt"}
    options = {"sample_type": "CaptioningSample", "field_map": field_map}
    message = r"none of 5 samples .*: 'image' \(png or jpg\) is in 3; 'caption' \(txt\) is in 2\."
    with pytest.raises(DatasetFormatError, match=message):
        prepare_dataset(tmp_path, **ALL_TRAIN, **options)
    assert not is_prepared(tmp_path)
    write_tar(tmp_path / "b.tar", [("x.txt", b"x"), ("x.jpg", b"x")])
    assert prepare_dataset(tmp_path, **ALL_TRAIN, **options).samples == 6


def test_a_missing_end_mark_and_shards_in_no_split_part_are_a_warning(root):
    break_tar(root, data=lambda data: data[: 10 * 1024])
    cut, unused = prepare_dataset(root, split_parts={"train": ".*0[01]"}, num_workers=1).warnings
    assert "data-02.tar: has no end-of-archive mark" in cut
    assert unused == "2 of 4 shards are in no split part"


# Indexes only


def test_only_the_indexes_are_made_again_and_counts_corrected(root):
    with pytest.raises(FileNotFoundError, match="not a prepared dataset"):
        prepare_dataset(root, tar_index_only=True)
    prepare_dataset(root, split_ratio="2,1,1", num_workers=1)
    uid = (root / ".nv-meta/index.uuid").read_text()
    split = (root / ".nv-meta/split.yaml").read_text()
    (root / "parts/data-00.tar.idx").unlink()
    report = prepare_dataset(root, tar_index_only=True)
    assert ".nv-meta/.info.json" not in report.written
    assert read_index(root / "parts/data-00.tar", 5)[-1] == 10240
    write_tar(root / "parts/data-00.tar", txt(*"abc"))
    report = prepare_dataset(root, tar_index_only=True)
    assert ".nv-meta/.info.json" in report.written
    assert read_info(root).shard_counts["parts/data-00.tar"] == 3
    assert sample_indices(root, ["b"]) == {"b": (0, 1)}
    assert (root / ".nv-meta/split.yaml").read_text() == split
    assert (root / ".nv-meta/index.uuid").read_text() != uid
    (root / "parts/data-01.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"data-01\.tar is listed in"):
        prepare_dataset(root, tar_index_only=True)
    info = root / ".nv-meta/.info.json"
    info.write_text(info.read_text().replace("data-01", "a name that no file can have" * 10))
    with pytest.raises(FileNotFoundError, match=r"can have\.tar is listed in"):
        prepare_dataset(root, tar_index_only=True)


# Killed runs

KILLED = """
import sys, time
from multiprocessing import active_children
from energon_lite.extras.prepare import indexing, pool, prepare_dataset

def report(progress):
    print(progress.shards, *[child.pid for child in active_children()], flush=True)
    if progress.shards == 2:
        time.sleep(600)

prepare_dataset(sys.argv[1], split_ratio="2,1,1", num_workers=2, progress=report)
"""


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.processes
def test_a_killed_run_is_continued_and_never_looks_prepared(root):
    with running_program("-c", KILLED, root) as (program, lines):
        workers = next(line.split()[1:] for line in lines if line.startswith("2 "))
        with pytest.raises(RuntimeError, match="another run is preparing"):
            prepare_dataset(root, split_ratio="2,1,1", num_workers=1)
        os.kill(program.pid, signal.SIGKILL)  # and not its workers
        program.wait()
        deadline = time.monotonic() + 60
        while any(map(is_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, workers))
    assert not is_prepared(root)
    report = prepare_dataset(root, split_ratio="2,1,1", num_workers=1)
    assert report.resumed_shards >= 2
    continued = files(root)
    prepare_dataset(root, split_ratio="2,1,1", num_workers=1, force_overwrite=True)
    assert files(root) == continued
    assert len(workers) == 2


def test_a_shard_that_changed_since_the_killed_run_is_read_again(root):
    break_tar(root, data=lambda data: data[:700])
    with pytest.raises(DatasetFormatError):
        prepare_dataset(root, **ALL_TRAIN)
    write_tar(root / "parts/data-02.tar", txt("new"))
    os.utime(root / "parts/data-03.tar", ns=(1, 1))
    report = prepare_dataset(root, **ALL_TRAIN)
    assert report.resumed_shards == 2
    assert report.samples == 16
    assert not (root / ".nv-meta/prepare.partial").exists()


@pytest.mark.parametrize("kind", ["sqlite", "json"])
@pytest.mark.parametrize("damage", [(b"8", b"9"), (b"\n", b""), (b"a", b"\xff")])
def test_damaged_rows_of_a_killed_run_are_written_again(root, kind, damage):
    whole = prepare_dataset(root, **ALL_TRAIN)
    expected = files(root)
    tar = (root / "parts/data-02.tar").read_bytes()
    break_tar(root, data=lambda data: data[:700])
    with pytest.raises(DatasetFormatError):
        prepare_dataset(root, **ALL_TRAIN, force_overwrite=True)
    (root / "parts/data-02.tar").write_bytes(tar)
    rows = sorted((root / ".nv-meta/prepare.partial").glob(f"*.{kind}"))
    assert len(rows) == whole.shards - 1
    for path in rows[1:]:
        path.write_bytes(path.read_bytes().replace(*damage))
    report = prepare_dataset(root, **ALL_TRAIN, force_overwrite=True)
    assert report.resumed_shards == 1
    assert report.samples == whole.samples
    assert files(root) == expected


def end_at_two(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.processes
def test_a_dead_worker_ends_the_run_with_an_error():
    with pytest.raises(RuntimeError, match="a worker process died"):
        list(ordered_results(end_at_two, range(10), num_workers=2))


def never_end_at_two(number: int) -> int:
    if number == 2:
        time.sleep(600)
    return number


@pytest.mark.processes
def test_a_worker_that_stands_still_ends_the_run_with_an_error(monkeypatch, caplog):
    monkeypatch.setattr(pool, "_NOTE_SEC", 0.1)
    monkeypatch.setattr(pool, "_STUCK_SEC", 0.3)
    results = ordered_results(never_end_at_two, range(10), num_workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(RuntimeError, match=r"no worker process .* [Ff]irst open task: 2\."):
        next(results)
    assert "still waiting" in caplog.text


# Samples of the same key


def write_equal_keys(root: Path, tar_format=tarfile.GNU_FORMAT) -> None:
    for folder in ("a", "b"):
        (root / folder).mkdir(parents=True)
        with tarfile.open(root / folder / "0.tar", "w", format=tar_format) as tar:
            for name in ("./1.txt", "d/", "d/" + "long" * 40 + ".txt", "__meta__/x.txt", "é.txt"):
                member = tarfile.TarInfo(name)
                member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
                content = b"" if name.endswith("/") else f"{folder} {name}".encode()
                member.size, member.mtime, member.mode = len(content), 1234, 0o640
                tar.addfile(member, io.BytesIO(content))


def contents(path: Path) -> dict[str, tuple[bytes, int, int]]:
    with tarfile.open(path) as tar:
        return {
            member.name: (tar.extractfile(member).read(), member.mtime, member.mode)
            for member in tar
            if member.isfile()
        }


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_that_share_keys_are_written_again_only_on_wish(tmp_path, tar_format):
    write_equal_keys(tmp_path, tar_format)
    (tmp_path / "a/0.tar").chmod(0o640)
    before = {name: contents(tmp_path / name) for name in ("a/0.tar", "b/0.tar")}
    with pytest.raises(DatasetFormatError, match=r"'\./1' is also in .* Let --fix-duplicates"):
        prepare_dataset(tmp_path, **ALL_TRAIN)
    assert {name: contents(tmp_path / name) for name in before} == before
    report = prepare_dataset(tmp_path, **ALL_TRAIN, fix_duplicates=True)
    assert (report.samples, report.shards) == (6, 2)
    for name, old in before.items():
        assert contents(tmp_path / name) == {
            key if key.startswith("__") else f"{name}/{key.removeprefix('./')}": value
            for key, value in old.items()
        }
    assert sample_indices(tmp_path, ["b/0.tar/é"]) == {"b/0.tar/é": (1, 2)}
    assert {name: contents(tmp_path / f"{name}.orig") for name in before} == before
    assert stat.S_IMODE((tmp_path / "a/0.tar").stat().st_mode) == 0o640
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_renaming_that_was_killed_is_continued(tmp_path):
    write_equal_keys(tmp_path)
    rename_samples(Shard("b/0.tar", tmp_path / "b/0.tar"))
    names = contents(tmp_path / "b/0.tar")
    for _ in range(2):  # the second time there is nothing to do
        prepare_dataset(tmp_path, **ALL_TRAIN, fix_duplicates=True, force_overwrite=True)
        assert contents(tmp_path / "b/0.tar") == names
    assert rename_samples(Shard("b/0.tar", tmp_path / "b/0.tar")) == 0


def test_the_original_of_a_renamed_tar_is_never_replaced(tmp_path, monkeypatch):
    write_equal_keys(tmp_path)
    before = (tmp_path / "a/0.tar").read_bytes()
    (tmp_path / "a/0.tar.orig").write_bytes(b"of an earlier year")
    with pytest.raises(DatasetFormatError, match=r"0\.tar\.orig is there already"):
        prepare_dataset(tmp_path, **ALL_TRAIN, fix_duplicates=True)
    assert (tmp_path / "a/0.tar").read_bytes() == before
    (tmp_path / "a/0.tar.orig").unlink()
    os.link(tmp_path / "a/0.tar", tmp_path / "a/0.tar.orig")  # killed between the two steps

    def refuse(*args):
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    prepare_dataset(tmp_path, **ALL_TRAIN, fix_duplicates=True, force_overwrite=True)
    assert (tmp_path / "a/0.tar.orig").read_bytes() == before
    assert contents(tmp_path / "b/0.tar.orig").keys() >= {"./1.txt"}


# Tars by others


def test_a_copy_with_other_samples_never_replaces_a_tar(tmp_path, monkeypatch):
    write_equal_keys(tmp_path)
    before = (tmp_path / "a/0.tar").read_bytes()
    monkeypatch.setattr(indexing, "_copy", lambda path, target, prefix: shutil.copy(path, target))
    with pytest.raises(DatasetFormatError, match="its copy has other samples; it stays as it is"):
        prepare_dataset(tmp_path, **ALL_TRAIN, fix_duplicates=True)
    assert (tmp_path / "a/0.tar").read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))
