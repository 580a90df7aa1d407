"""Dataset files are opened only where they are regular, and never written through a link."""

import os
from pathlib import Path

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import (
    can_read,
    is_there,
    new_file,
    open_bytes,
    read_file,
    write_atomically,
)
from energon_lite.storage.local_paths import local_text


def test_a_named_pipe_a_folder_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a folder")):
        with pytest.raises(DatasetFormatError, match=f"{path} is {kind}, not a regular file"):
            open_bytes(path)
    with pytest.raises(DatasetFormatError, match="link is a device"):
        read_file(tmp_path / "link")


def test_names_that_no_file_can_have_are_not_there(tmp_path: Path, monkeypatch) -> None:
    assert not is_there(tmp_path / ("x" * 5000))
    assert not is_there(tmp_path / "a\0b")
    (tmp_path / "empty").touch()
    assert not can_read(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    Path("ab:").mkdir()
    assert local_text("ab:/") == "ab:/"
    with pytest.raises(ValueError, match="is remote"):
        local_text("dss:/bucket/x")


def test_a_file_longer_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    assert read_file(tmp_path / "x", 4) == b"1234"
    with pytest.raises(DatasetFormatError, match="x: 4 bytes, where at most 3 can be right"):
        read_file(tmp_path / "x", 3)


def test_writing_replaces_a_link_and_leaves_its_target_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    for name in ("x", "x.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    (tmp_path / "like").touch(0o440)
    write_atomically(tmp_path / "x", b"new", like=tmp_path / "like")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "target").read_text() == "kept"


def test_a_file_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(TypeError), new_file(tmp_path / "x") as file:
        file.writelines([b"half", "text"])  # type: ignore[list-item]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"
