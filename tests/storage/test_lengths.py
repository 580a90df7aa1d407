"""The length index: read as it was written, and refused where it is of other data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.length_files import lengths_path, read_lengths, write_lengths


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_lengths(tmp_path, "train", "tok", np.array([3, 1, 4]), "abc")
    return tmp_path


def test_lengths_are_read_as_they_were_written(root) -> None:
    found = read_lengths(root, "train", "tok", 3, "abc")
    assert found.tolist() == [3, 1, 4]
    assert found.dtype == np.int64
    path = root / ".nv-meta" / "energon_lite" / "lengths" / "tok" / "train.npy"
    assert lengths_path(root, "train", "tok") == path
    assert sorted(p.name for p in path.parent.iterdir()) == ["train.json", "train.npy"]


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_short_index_is_in_memory_and_a_long_one_mapped(root, monkeypatch, most) -> None:
    """An index that is cut short after it was opened kills the process if it is mapped."""
    monkeypatch.setattr("energon_lite.storage.length_files._MAPPED_BYTES", most)
    found = read_lengths(root, "train", "tok", 3, "abc")
    assert isinstance(found, np.memmap) == (most == 0)
    assert found.tolist() == [3, 1, 4]
    if most:
        os.truncate(lengths_path(root, "train", "tok"), 0)
        assert found.tolist() == [3, 1, 4]


def test_parts_and_names_have_indexes_of_their_own(root) -> None:
    write_lengths(root, "val", "tok", [7, 8], "v")
    write_lengths(root, "train.v2", "tok", [1], "w")
    write_lengths(root, "train", "other", np.array([5, 6, 7], dtype=np.uint16), "abc")
    assert read_lengths(root, "val", "tok", 2, "v").tolist() == [7, 8]
    assert read_lengths(root, "train.v2", "tok", 1, "w").tolist() == [1]
    assert read_lengths(root, "train", "other", 3, "abc").tolist() == [5, 6, 7]
    assert read_lengths(root, "train", "tok", 3, "abc").tolist() == [3, 1, 4]


def test_index_is_replaced_as_a_whole(root, monkeypatch) -> None:
    write_lengths(root, "train", "tok", np.array([9, 9, 9]), "abc")
    assert read_lengths(root, "train", "tok", 3, "abc").tolist() == [9, 9, 9]

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("energon_lite.storage.files.write_atomically", fails)
    with pytest.raises(OSError, match="disk full"):
        write_lengths(root, "train", "tok", np.array([1, 2, 3]), "abc")
    with pytest.raises(FileNotFoundError):  # rather than lengths of unknown origin
        read_lengths(root, "train", "tok", 3, "abc")


def test_missing_index_names_itself_and_the_ways_out(root) -> None:
    with pytest.raises(FileNotFoundError, match=r"no length index 'x' .*'train'; write it"):
        read_lengths(root, "train", "x", 3, "abc")
    with pytest.raises(FileNotFoundError, match="'val'"):
        read_lengths(root, "val", "tok", 3, "abc")


def test_index_of_another_size_or_other_data_is_refused(root) -> None:
    with pytest.raises(DatasetFormatError, match=r"is of 3 samples, the split part has 4 now"):
        read_lengths(root, "train", "tok", 4, "abc")
    with pytest.raises(DatasetFormatError, match=r"other data .*'abc' and is 'abd' now"):
        read_lengths(root, "train", "tok", 3, "abd")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train.npy", b""),
        ("train.npy", b"not numpy at all"),
        ("train.json", b"{"),
        ("train.json", b"[1]"),
        ("train.json", b"\xff\xff"),
        ("train.json", json.dumps({"samples": 2, "data": "abc"}).encode()),
        ("train.json", b"{}"),
    ],
)
def test_a_corrupt_index_is_refused_by_name(root, file, content) -> None:
    path = lengths_path(root, "train", "tok")
    path.with_name(file).write_bytes(content)
    with pytest.raises(DatasetFormatError, match=r"train\.npy: .*write it again"):
        read_lengths(root, "train", "tok", 3, "abc")


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((3, 1), dtype=np.int64), np.int64(3)])
def test_array_of_another_kind_is_refused(root, array) -> None:
    np.save(lengths_path(root, "train", "tok"), array)
    with pytest.raises(DatasetFormatError, match="no length index, but"):
        read_lengths(root, "train", "tok", 3, "abc")
    with pytest.raises(ValueError, match=r"give integers, \(N,\)"):
        write_lengths(root, "train", "tok", array, "abc")


def test_index_with_pickled_objects_is_not_opened(root) -> None:
    np.save(lengths_path(root, "train", "tok"), np.array([{}, {}, {}]), allow_pickle=True)
    with pytest.raises(DatasetFormatError, match="no readable length index"):
        read_lengths(root, "train", "tok", 3, "abc")


def test_negative_lengths_are_refused_by_number(root) -> None:
    with pytest.raises(ValueError, match="length of sample 1 is -2"):
        write_lengths(root, "train", "tok", np.array([3, -2, 4]), "abc")
    assert read_lengths(root, "train", "tok", 3, "abc").tolist() == [3, 1, 4]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\\b"])
def test_name_that_leads_elsewhere_is_refused(root, name) -> None:
    with pytest.raises(ValueError, match="no name of a length index"):
        write_lengths(root, "train", name, np.array([3]), "abc")
    with pytest.raises(ValueError, match="no name of a length index"):
        read_lengths(root, "train", name, 1, "abc")
