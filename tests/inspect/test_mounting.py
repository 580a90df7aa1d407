"""`energon-lite mount`: the view without FUSE, and, where it is there, with it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from energon_lite import prepare_dataset
from energon_lite.extras.cli import app
from energon_lite.extras.inspect.file_view import SAME_KEY, DatasetFiles
from energon_lite.extras.inspect.mounting import MountedFiles, mount_dataset

from ..conftest import write_tar

KEYS = ["s1", "s0", "deep/er/x1", "deep/x0", "deep-1"]


def content(key, part):
    return f"{part} of {key}".encode() * (3000 if part == "txt" else 1)


@pytest.fixture
def root(tmp_path):
    """Two shards; the keys are not in their order, and some lie in folders."""
    root = tmp_path / "data"
    for i, keys in enumerate([KEYS[:3], KEYS[3:]]):
        parts = [(f"{k}.{p}", content(k, p)) for k in keys for p in ("txt", "seg.json")]
        write_tar(root / "parts" / f"{i}.tar", parts)
    prepare_dataset(root, split_ratio="1,0,0", sample_type="CrudeWebdataset")
    return root


def edit_index(root, *statements):
    index = root / ".nv-meta" / "index.sqlite"
    with sqlite3.connect(index) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return root


NOT_UNIQUE = (
    "CREATE TABLE old AS SELECT * FROM samples", "DROP TABLE samples",
    "ALTER TABLE old RENAME TO samples",
)  # fmt: skip


def walk(files, folder=""):
    """All files below a folder, by path, with their content."""
    found = {}
    for name in files.names(folder):
        path = f"{folder}/{name}".lstrip("/")
        place = files.find(path)
        if place is None:
            assert files.is_folder(path), path
            found |= walk(files, path)
        else:
            found[path] = files.read(place, place.size, 0)
    return found


def expected(separator="."):
    return {f"{k}{separator}{p}": content(k, p) for k in KEYS for p in ("txt", "seg.json")}


@pytest.mark.parametrize("limit", [2, 3, 5000])
@pytest.mark.parametrize("folders", [False, True])
def test_every_part_of_every_sample_is_a_file(root, folders, limit, monkeypatch):
    monkeypatch.setattr("energon_lite.extras.inspect.file_view._KEYS_PER_QUERY", limit)
    files = DatasetFiles(root, sample_folders=folders)
    assert walk(files) == expected("/" if folders else ".")
    names = files.names("")
    assert names[0].startswith("deep-1")
    assert names[-1] == ("s1" if folders else "s1.txt")
    assert names.count("deep") == 1


def test_what_is_not_there_is_not_found(root):
    flat, folders = DatasetFiles(root), DatasetFiles(root, sample_folders=True)
    for path in ("s0", "s0/txt", "s0.jpg", "s0.txt/x", "deep/x0", ".txt", "x", "dee", "\udc80.txt"):
        assert flat.find(path) is None
        assert not flat.is_folder(path)
    for path in ("s0.txt", "s0", "s0/jpg", "deep", "deep/er", "s0/txt/x"):
        assert folders.find(path) is None
    assert folders.is_folder("s0")
    assert flat.is_folder("deep/er")
    with pytest.raises(FileNotFoundError):
        flat.names("s0")


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        ((("a.txt", b"1"), ("a/b.txt", b"2")), {"a.txt": b"1", "a/b.txt": b"2"}),
        ((("./0.txt", b"1"), ("./b/1.txt", b"2")), {"0.txt": b"1", "b/1.txt": b"2"}),
    ],
    ids=["a sample and a folder of one name", "names that begin with a dot and a slash"],
)
def test_odd_names_are_shown(tmp_path, members, shown):
    write_tar(tmp_path / "a.tar", list(members))
    prepare_dataset(tmp_path, split_ratio="1,0,0", sample_type="CrudeWebdataset")
    assert walk(DatasetFiles(tmp_path)) == shown
    in_folders = {name.replace(".", "/"): content for name, content in shown.items()}
    assert walk(DatasetFiles(tmp_path, sample_folders=True)) == in_folders


@pytest.mark.parametrize("limit", [2, 3, 5000])
@pytest.mark.parametrize("folders", [False, True])
def test_a_key_in_two_shards_gets_a_warning_that_names_them(root, folders, limit, monkeypatch):
    monkeypatch.setattr("energon_lite.extras.inspect.file_view._KEYS_PER_QUERY", limit)
    edit_index(
        root, *NOT_UNIQUE, "UPDATE samples SET sample_key = 's0' WHERE sample_key = 'deep-1'"
    )
    files = DatasetFiles(root, sample_folders=folders)
    found = walk(files)
    separator = "/" if folders else "."
    warning = found.pop(f"s0{separator}{SAME_KEY}").decode()
    assert re.search("'s0' is the key of several samples.*\nparts/0.tar\nparts/1.tar\n", warning)
    assert found == {k: v for k, v in expected(separator).items() if not k.startswith("deep-1")}


def test_an_old_index_without_parts_needs_the_slow_way(root):
    edit_index(root, "DROP TABLE sample_parts")
    for settings in ({}, {"sample_folders": True}, {"allow_slow": True}):
        with pytest.raises(ValueError, match=r"prepare .* --tar-index-only`, or use --allow-slow"):
            DatasetFiles(root, **settings)
    assert walk(DatasetFiles(root, sample_folders=True, allow_slow=True)) == expected("/")


def test_files_are_read_from_any_byte(root):
    files = DatasetFiles(root)
    place = files.find("s0.txt")
    whole = content("s0", "txt")
    assert place.size == len(whole)
    for offset, size in ((0, 10), (5000, 4096), (len(whole) - 3, 100), (len(whole), 5), (10**9, 5)):
        assert files.read(place, size, offset) == whole[offset : offset + size]


def test_what_does_not_fit_the_index_is_an_input_output_error(root):
    edit_index(root, "UPDATE samples SET tar_file_id = 7 WHERE sample_key = 's0'")
    mounted = MountedFiles(DatasetFiles(root))
    with pytest.raises(OSError, match="names a shard 7 of 2") as error:
        mounted.getattr("/s0.txt")
    assert error.value.errno == errno.EIO
    (root / "parts/0.tar").write_bytes(b"")
    with pytest.raises(OSError, match=r"a file should have .* it is truncated") as error:
        mounted.read("/s1.txt", 10, 0, 0)
    assert error.value.errno == errno.EIO


def mount(*arguments):
    return CliRunner().invoke(app, ["mount", *map(str, arguments)])


def test_what_is_missing_is_named_and_the_exit_code_is_1(root, tmp_path, monkeypatch):
    def texts(*arguments):
        result = mount(*arguments)
        assert result.exit_code == 1
        return result.stderr

    assert "does not exist; create an empty folder" in texts(root, tmp_path / "nowhere")
    assert "is a file; name an empty folder" in texts(root, root / "parts/0.tar")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mfusepy", None)
        assert "pip install 'energon_lite[mount]'" in texts(root, tmp_path)
    (root / ".nv-meta/index.sqlite").unlink()
    assert "index.sqlite is missing; run `energon-lite prepare" in texts(root, tmp_path)
    missing = texts(tmp_path / "no data", tmp_path)
    assert "no data is not a prepared dataset: it does not exist" in missing


# ------------------------------------------------------------------------------------ with FUSE


def missing():
    """What a real mount lacks here, or nothing."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy or libfuse is missing: {error}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing, or belongs to others"
    if os.geteuid() and not (shutil.which("fusermount3") or shutil.which("fusermount")):
        return "neither root nor fusermount3 is there"
    return None


needs_fuse = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def mountpoint(tmp_path):
    folder = tmp_path / "mount"
    folder.mkdir()
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=False)


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def started(*arguments):
    command = [sys.executable, "-m", "energon_lite", "mount", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )


def tree(folder: Path):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@needs_fuse
@pytest.mark.processes
@pytest.mark.parametrize("folders", [False, True])
def test_a_real_mount_shows_the_files_until_it_is_unmounted(root, mountpoint, folders):
    process = started(root, mountpoint, *["-s"] * folders)
    wait_for(lambda: mountpoint.is_mount() or process.poll() is not None)
    try:
        assert tree(mountpoint) == expected("/" if folders else ".")
        with pytest.raises(OSError, match="ead-only"):
            (mountpoint / "new").write_text("")
        again = started(root, mountpoint / ("s0/txt" if folders else "s0.txt"))
        assert "is a file" in again.communicate(timeout=120)[0]
        assert again.returncode == 1
    finally:
        subprocess.run(["umount", mountpoint], check=True)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    with pytest.raises(FileNotFoundError):
        mount_dataset(DatasetFiles(root), mountpoint / "nowhere")
    assert f"Mounting {root} at {mountpoint}...\nMount is ready to go." in output


@needs_fuse
@pytest.mark.processes
def test_a_detached_mount_outlives_the_command(root, mountpoint):
    process = started(root, mountpoint, "-d")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    wait_for(mountpoint.is_mount)
    assert tree(mountpoint) == expected()
    subprocess.run(["umount", mountpoint], check=True)
