"""Tar headers with any content: reading ends, and says what is wrong and where."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.formats.tar import MAX_EXTENSION_BYTES, TarError, block_members, iter_tar

from ..conftest import examples
from .hostile_sets import BAD_HEADERS, header, named, octal, padded

KINDS = [b"0", b"\0", b"L", b"K", b"x", b"g", b"5", b"2", b"7", b"S", b"Z"]


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_header_that_cannot_be_right_is_an_error_with_file_and_byte(
    tmp_path: Path, case: str
) -> None:
    (tmp_path / "a.tar").write_bytes(
        header(b"0.txt", octal(0)) + BAD_HEADERS[case] + bytes(3 << 20)
    )
    with pytest.raises(DatasetFormatError) as caught:
        prepare_dataset(tmp_path, split_ratio="1,0,0", num_workers=0)
    message = str(caught.value)
    assert str(tmp_path / "a.tar") in message
    assert "byte 512" in message or "cut off" in message
    assert "write the tar again" in message
    buffer = np.frombuffer(padded(BAD_HEADERS[case]), dtype=np.uint8)
    (found,) = block_members(buffer, np.array([0]), np.array([len(buffer)]), np.array([512]))
    assert isinstance(found, TarError)
    assert "or its index does not fit it" in str(found)


def test_members_of_old_programs_are_read_as_ever(tmp_path: Path) -> None:
    """Numbers padded with blanks, no magic, signed checksums, sizes of GNU's base-256."""
    name = "ü.txt".encode()
    signed = sum(np.frombuffer(header(name, octal(3)), dtype=np.int8).astype(int))
    field = sum(header(name, octal(3))[148:156])
    old = [
        header(b"a.txt", b"         3 \0"),
        header(b"b.txt", octal(3), magic=b"\0" * 8),
        header(name, octal(3), checksum=b"%06o\0 " % (signed - field + 256)),
        header(b"d.txt", b"\x80" + (3).to_bytes(11, "big")),
        header(b"e.txt", b"3\0"),
        header(b"f.txt", octal(3), magic=b"ustar  \0"),
    ]
    data = b"".join(head + padded(b"abc") for head in old)
    (tmp_path / "a.tar").write_bytes(data + bytes(1024))
    found = [(head.name, head.size) for head in iter_tar(tmp_path / "a.tar")]
    names = ["a.txt", "b.txt", "ü.txt", "d.txt", "e.txt", "f.txt"]
    assert found == [(name, 3) for name in names]
    starts = np.arange(6) * 1024
    members = block_members(
        np.frombuffer(data, dtype=np.uint8), starts, starts + 1024, np.zeros(6, dtype=np.int64)
    )
    assert [name for ((name, _, _),) in members[:5]] == names[:5]


def test_names_of_a_mebibyte_are_read(tmp_path: Path) -> None:
    name = "n" * (MAX_EXTENSION_BYTES - 2048) + ".txt"
    for number in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=number) as tar:
            tar.addfile(tarfile.TarInfo("0.txt"))
            tar.addfile(tarfile.TarInfo(name))
        assert [head.name for head in iter_tar(tmp_path / "a.tar")] == ["0.txt", name]


sizes = st.one_of(
    st.integers(0, 3000).map(octal),
    st.binary(min_size=12, max_size=12),
    st.integers(-(2**88), 2**88).map(lambda n: n.to_bytes(12, "big", signed=True)),
    st.text(st.sampled_from("0123457 -+_ox\0"), max_size=12).map(str.encode),
)
records = st.sampled_from([
    b"", b"11 path=a.b\n", b"10 size=3\n", b"12 size=abc\n", b"15 size=99999\n", b"0 a=b\n",
    b"6 a=b\n", b"6 a=b\n10 size=7\n", b"30 mtime=1700000000.1234567\n", b"x.y\0", b"n" * 700,
])  # fmt: skip
blocks = st.lists(
    st.one_of(
        st.tuples(sizes, st.sampled_from(KINDS)).map(lambda x: header(b"k.txt", *x)),
        records.map(padded),
        st.tuples(st.sampled_from("xLgK"), records).map(lambda x: named(x[1], x[0].encode())),
        st.just(bytes(512)),
    ),
    min_size=1,
    max_size=6,
)


@examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks)
def test_reading_ends_and_members_follow_each_other_inside_the_file(
    tmp_path: Path, parts: list[bytes]
) -> None:
    data = b"".join(parts)
    (tmp_path / "a.tar").write_bytes(data)
    end = 0
    try:
        for found in iter_tar(tmp_path / "a.tar"):
            assert found.start == end
            assert found.start + 512 <= found.data <= found.end
            assert found.size >= 0
            if found.is_file:
                assert found.data + found.size <= len(data)
            end = found.end
    except TarError as error:
        assert str(tmp_path / "a.tar") in str(error)  # noqa: PT017
    starts = np.arange(0, len(data), 512)
    stops = np.full(len(starts), len(data))
    buffer = np.frombuffer(data, dtype=np.uint8)
    for members in block_members(buffer, starts, stops, starts * 0):
        if not isinstance(members, TarError):
            edges: list[Any] = [edge for member in members for edge in member[1:]]
            assert edges == sorted(edges)
            assert all(edge <= len(data) for edge in edges)


@examples(100)
@given(st.integers(0, 511), st.integers(1, 255), st.booleans())
@example(148, 16, False)  # a zero in place of a blank
def test_changed_byte_of_a_plain_header_is_noticed_by_the_quick_reader(
    at: int, change: int, is_pax: bool
) -> None:
    file = io.BytesIO()
    form = tarfile.PAX_FORMAT if is_pax else tarfile.USTAR_FORMAT
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        info = tarfile.TarInfo("000057.txt")
        info.size, info.mtime = 5, 1.5 if is_pax else 1
        tar.addfile(info, io.BytesIO(b"hello"))
        end = tar.offset
    data = bytearray(file.getvalue()[:end])
    place = at + (1024 if is_pax else 0)
    data[place] ^= change
    buffer = np.frombuffer(bytes(data), dtype=np.uint8)
    (members,) = block_members(buffer, np.array([0]), np.array([end]), np.array([0]))
    if isinstance(members, TarError):
        assert "no tar header at byte" in str(members)
    else:  # the checksum field itself: blanks and zero bytes may be exchanged
        assert 148 <= at < 156
        assert members[0][0] == "000057.txt"
