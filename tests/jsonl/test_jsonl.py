"""Finding the lines of JSONL files, their index, and reading lines by number."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.extras.jsonl import jsonl
from energon_lite.extras.jsonl.jsonl import (
    LineReader,
    line_index_path,
    read_line_index,
    scan_lines,
    write_line_index,
)

from ..helpers import is_mapped

# The example of Energon's format, and its index.
EXAMPLE = b'\n{"id": 0, "q": "What is 1+2?"}\n\n{"id": 1, "q": "two"}\n  {"id": 2, "q": "three"}\n'
INDEX = bytes.fromhex("0000000000000000 2100000000000000 3700000000000000 5100000000000000")


def written(path: Path, content: bytes = EXAMPLE) -> Path:
    path.write_bytes(content)
    return path


def texts(reader: LineReader, *indices: int) -> list[str]:
    """The lines as they are stored, without white space around them."""
    block = reader.read(np.array(indices, dtype=np.int64))
    assert block.places == list(indices)
    found = []
    for place, members in zip(block.places, block.members, strict=True):
        ((name, first, last),) = members
        assert name == f"{place}.json"
        found.append(block.data[first:last].tobytes().decode().strip())
    return found


def test_the_index_of_energons_example_has_energons_bytes(tmp_path) -> None:
    path = written(tmp_path / "a.jsonl")
    lines = scan_lines(path)
    write_line_index(path, lines.offsets)
    assert line_index_path(path) == tmp_path / "a.jsonl.idx"
    assert line_index_path(path).read_bytes() == INDEX
    assert (lines.num_broken, lines.broken) == (0, [])
    assert read_line_index(path, len(EXAMPLE)).tolist() == [0, 33, 55, 81]


LINE = st.sampled_from([
    b"", b" ", b"\t\r", b"{}", b'{"a": "\xc3\xa9"}', b"  {} ", b"{}\r", b"{} \r", b"{", b"}", b"x",
    b"[1]", b'{"a": ' + b"1" * 40 + b"}",
])  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(LINE, max_size=12), st.booleans(), st.integers(1, 30))
def test_lines_are_found_as_by_python_in_pieces_of_any_size(tmp_path_factory, parts, ends, size):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    content = b"\n".join(parts) + b"\n" * ends
    path.write_bytes(content)
    expected, broken, at = [], [], 0
    for number, line in enumerate(content.split(b"\n")):
        text = line.strip()
        if text:
            expected.append(at)
            if not (text.startswith(b"{") and text.endswith(b"}")):
                broken.append((len(expected) - 1, number + 1))
        at += len(line) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_READ_BYTES", size)
        if not expected:
            with pytest.raises(EmptyDatasetError, match="no line that is not blank"):
                scan_lines(path)
            return
        lines = scan_lines(path)
    assert lines.offsets.tolist() == [0, *expected[1:], len(content)]
    assert (lines.num_broken, lines.broken) == (len(broken), broken)


def test_a_mark_of_the_byte_order_belongs_to_the_first_line(tmp_path) -> None:
    lines = scan_lines(written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n{}'))
    assert (lines.offsets.tolist(), lines.num_broken) == ([0, 12, 14], 0)


def test_a_line_longer_than_a_gibibyte_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jsonl, "_READ_BYTES", 16)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 100)
    path = written(tmp_path / "a.jsonl", b"{}\n" + b"x" * 500)
    with pytest.raises(DatasetFormatError, match=r"a\.jsonl: line 2 is longer than 100 bytes"):
        scan_lines(path)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_lines_are_read_by_number_in_any_order(tmp_path, is_indexed) -> None:
    path = written(tmp_path / "a.jsonl")
    if is_indexed:
        write_line_index(path, scan_lines(path).offsets)
    reader = LineReader(path)
    assert (reader.num_samples, reader.size_bytes, reader.root) == (3, 81, path)
    values = [json.loads(text) for text in texts(reader, 2, 0, 1, 2)]
    assert [value["id"] for value in values] == [2, 0, 1, 2]
    again = pickle.loads(pickle.dumps(reader))
    assert texts(again, 1) == texts(reader, 1)


def test_no_more_indexes_are_mapped_than_the_kernel_allows(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("energon_lite.storage.local.MAPPED_BYTES", 8)
    path = written(tmp_path / "a.jsonl")
    write_line_index(path, scan_lines(path).offsets)
    kept = read_line_index(path, 81)
    monkeypatch.setattr("energon_lite.storage.local.MOST_MAPS", 1)
    copied = read_line_index(path, 81)
    assert not is_mapped(copied)
    assert copied.tolist() == kept.tolist()


DAMAGE: dict[str, tuple[bytes, str]] = {
    "cut": (INDEX[:-3], "29 bytes are no index of lines"),
    "empty": (b"", "0 bytes are no index of lines"),
    "of the end only": (INDEX[-8:], "8 bytes are no index of lines"),
    "of a shorter file": (
        INDEX[:-8],
        "of a file of 55 bytes, and a.jsonl has 81: it was",
    ),
    "of a longer file": (INDEX * 30, "960 bytes are no index of lines"),
    "falling": (INDEX[:8] + INDEX[16:24] + INDEX[8:16] + INDEX[24:], "sample 1 would lie at bytes"),
    "later": (
        INDEX[8:],
        "sample 0 would lie at bytes 33 to 55, where the first sample begins",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_wrong_index_is_refused_with_the_command_that_writes_it_again(tmp_path, case) -> None:
    path = written(tmp_path / "a.jsonl")
    content, message = DAMAGE[case]
    line_index_path(path).write_bytes(content)
    with pytest.raises(DatasetFormatError, match=message) as caught:
        LineReader(path)
    assert f"run `energon-lite prepare {path}`" in str(caught.value)


def test_a_pipe_and_a_missing_file_are_refused(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DatasetFormatError, match="is a named pipe, not a regular file"):
        LineReader(tmp_path / "pipe.jsonl")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl does not exist; check the path"):
        LineReader(tmp_path / "none.jsonl")


def test_a_file_that_is_cut_after_it_was_opened_loses_only_the_samples_behind(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("energon_lite.storage.patience.BRIEF_SEC", 0.1)
    path = written(tmp_path / "a.jsonl")
    reader = LineReader(path, max_open=0)
    path.write_bytes(EXAMPLE[:60])
    block = reader.read(np.array([0, 1, 2], dtype=np.int64))
    assert [isinstance(members, Exception) for members in block.members] == [False, False, True]
    assert "line 3 (blank lines not counted) should end at byte 81, but the file ends before" in (
        str(block.members[2])
    )


def test_a_worker_that_finds_other_lines_refuses_them(tmp_path) -> None:
    path = written(tmp_path / "a.jsonl")
    data = pickle.dumps(LineReader(path))
    path.write_bytes(EXAMPLE.replace(b"\n\n{", b"\n {}\n{")[:81])
    with pytest.raises(DatasetFormatError, match="has 4 samples now, and had 3 when the run began"):
        pickle.loads(data).read(np.arange(3))
