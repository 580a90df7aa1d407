"""The length index: read as it was written, and refused where it is of other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.formats.length_files import (
    lengths_path,
    read_facts,
    read_lengths,
    sums_of,
    write_lengths,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_lengths(tmp_path, "train", "tok", np.array([3, 1, 4]), "abc")
    return tmp_path


def test_lengths_are_read_as_they_were_written(root) -> None:
    found = read_lengths(root, "train", "tok", 3, "abc")
    assert found.tolist() == [3, 1, 4]
    path = root / ".nv-meta" / "energon_lite" / "lengths" / "tok" / "train.npy"
    assert lengths_path(root, "train", "tok") == path
    assert sorted(p.name for p in path.parent.iterdir()) == ["train.json", "train.npy"]


@pytest.mark.parametrize(
    ("largest", "kind"),
    [(0, "u2"), (65_535, "u2"), (65_536, "u4"), (2**32 - 1, "u4"), (2**32, "i8"), (2**40, "i8")],
)
def test_lengths_are_kept_in_the_smallest_type(tmp_path, largest, kind) -> None:
    write_lengths(tmp_path, "train", "tok", np.array([1, largest, 0]), "abc")
    found = read_lengths(tmp_path, "train", "tok", 3, "abc")
    assert found.tolist() == [1, largest, 0]
    assert found.dtype == np.dtype(f"<{kind}")


def test_hash_and_mean_are_those_of_an_index_of_an_older_version(root, monkeypatch) -> None:
    facts = read_facts(root, "train", "tok")
    older = {name: value for name, value in facts.items() if name != "sums"}
    lengths_path(root, "train", "tok").with_suffix(".json").write_text(json.dumps(older))
    np.save(lengths_path(root, "train", "tok"), np.array([3, 1, 4], np.int64))
    lengths = read_lengths(root, "train", "tok", 3, "abc")
    assert lengths.dtype == np.int64
    expected = sums_of(older, "tokens", lengths)
    assert expected[1] == pytest.approx(8 / 3)
    # Of a new one no length is read.
    assert sums_of(facts, "tokens", None) == expected  # type: ignore[arg-type]
    assert [facts["sums"]["tokens"][name] for name in ("min", "max")] == [1, 4]
    for broken in (3, {"tokens": 3}, {"tokens": {"mean": 3}}):
        assert sums_of({"sums": broken}, "tokens", lengths) == expected


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


FACTS = [
    b"{", b"[1]", b"[]", b"{}", b"", b"\xff\xff", b"[" * 100_000, b'{"samples": 2, "data": "abc"}',
    b'{"resources": 3}', b'{"resources": [["x"]]}',
    b'{"samples": [1], "data": {}, "resources": ["tokens"]}',
    b'{"samples": 1e999, "resources": ["../../x"]}',
]  # fmt: skip
HEADERS = [
    *(
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d,)}" % number
        for number in (1 << 70, -3, 999_999_999_999)
    ),
    b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}",
    b"-" * 9000, b"(" * 9000, b"\0\0", b"{}",
]  # fmt: skip
ARRAYS = [
    b"", b"not numpy at all",
    *(b"\x93NUMPY\x01\x00" + len(h).to_bytes(2, "little") + h + bytes(24) for h in HEADERS),
]  # fmt: skip


KINDS = [np.zeros(3), np.zeros((3, 1), dtype=np.int64), np.int64(3)]
AGAIN = r"train\.npy: .*write it again with"
REFUSED: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    *((None, ("train", name, 1, "abc"), ValueError, "no name of a length index")
      for name in ("", ".", "..", "a/b", "../x", "a\\b")),
    (None, ("val", "x", 3, "abc"), FileNotFoundError, r"no length index 'x' .*'val'; write it"),
    (None, ("train", "tok", 4, "abc"), DatasetFormatError,
     r"is of 3 samples, the split part has 4 now"),
    (None, ("train", "tok", 3, "abd"), DatasetFormatError,
     r"other data .*'abc' and is 'abd' now"),
    *((content, (), DatasetFormatError, AGAIN) for content in ARRAYS),
    *((array, (), DatasetFormatError, "no length index, but") for array in KINDS),
    *((np.array([value] * 3), (), DatasetFormatError, "those of no sample")
      for value in (-1, 1 << 62)),
]  # fmt: skip


@pytest.mark.parametrize("content", FACTS)
def test_corrupt_facts_are_no_index(root, content) -> None:
    lengths_path(root, "train", "tok").with_suffix(".json").write_bytes(content)
    with pytest.raises(DatasetFormatError, match=AGAIN):
        read_lengths(root, "train", "tok", 3, "abc")
    assert (read_facts(root, "train", "tok") or {}).get("data") != "abc"


@pytest.mark.parametrize(("content", "asked", "error", "words"), REFUSED)
def test_wrong_lengths_and_names_are_refused(root, content, asked, error, words) -> None:
    path = lengths_path(root, "train", "tok")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(error, match=words):
        read_lengths(root, *(asked or ("train", "tok", 3, "abc")))
