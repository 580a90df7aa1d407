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

KINDS = [b"0", b"\0", b"L", b"K", b"x", b"g", b"5", b"2", b"7", b"S", b"Z"]


def header(name: bytes, size: bytes, kind: bytes = b"0", **more: bytes) -> bytes:
    """A header with a right checksum, whatever it holds."""
    raw = bytearray(512)
    raw[: len(name)] = name
    raw[124 : 124 + len(size)] = size
    raw[156:157] = kind
    raw[257:265] = more.get("magic", b"ustar\00000")
    raw[148:156] = b" " * 8
    raw[148:156] = more.get("checksum", b"%06o\0 " % sum(raw))
    return bytes(raw)


def octal(size: int) -> bytes:
    return b"%011o\0" % size


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def named(content: bytes, kind: bytes) -> bytes:
    """A member after an extension header."""
    return (
        header(b"ext", octal(len(content)), kind) + padded(content) + header(b"a.txt", octal(3))
        + padded(b"abc")
    )  # fmt: skip


BAD = {
    "negative octal": header(b"a.txt", b"-0000000512\0"),
    "plus": header(b"a.txt", b"+0000000003\0"),
    "underscore": header(b"a.txt", b"000_0000003\0"),
    "prefixed": header(b"a.txt", b"0o000000003\0"),
    "decimal": header(b"a.txt", b"00000000009\0"),
    "digits apart": header(b"a.txt", b"0000 000003\0"),
    "negative base-256": header(b"a.txt", (-512).to_bytes(12, "big", signed=True)),
    "base-256 of 2**63": header(b"a.txt", b"\x80" + (1 << 63).to_bytes(11, "big")),
    "base-256 of 2**90": header(b"a.txt", b"\xbf" + b"\xff" * 11),
    "beyond the file": header(b"a.txt", b"77777777777\0"),
    "base-256 beyond the file": header(b"a.txt", b"\x80" + (1 << 62).to_bytes(11, "big")),
    "checksum": header(b"a.txt", octal(3), checksum=b"000001\0 "),
    "checksum with a sign": header(b"a.txt", octal(3), checksum=b"-00001\0 "),
    **{
        f"{kind} header of {text}": header(b"ext", size, kind.encode()) + bytes(1024)
        for kind in "LKxg"
        for text, size in [
            ("-512 bytes", b"-0000001000\0"),
            ("-512 bytes, base-256", (-512).to_bytes(12, "big", signed=True)),
            ("more than the file", b"77777777777\0"),
            ("2 MiB", octal(2 << 20)),
        ]
    },
    "PAX size=abc": named(b"12 size=abc\n", b"x"),
    "PAX size=-512": named(b"13 size=-512\n", b"x"),
    "PAX size of 2**63": named(b"28 size=%d\n" % 2**63, b"x"),
    "PAX size of digits of another script": named("14 size=٣\n".encode(), b"x"),
    "PAX size of 5,000 digits": named(b"5011 size=" + b"1" * 5000 + b"\n", b"x"),
    "PAX record of no length": named(b" path=x.txt\n", b"x"),
    "PAX record of 5,000 digits": named(b"1" * 5000 + b" path=x.txt\n", b"x"),
    "PAX record too long": named(b"99 path=x.txt\n", b"x"),
    "PAX record too short": named(b"9 path=x.txt\n", b"x"),
    "PAX record without a value": named(b"9 pathx.\n", b"x"),
    "zero byte in a name": named(b"a\0b.txt\0", b"L"),
    "zero byte in a PAX name": named(b"16 path=a\0b.txt\n", b"x"),
    "endless chain": header(b"ext", octal(0), b"g") * 3000,
}


@pytest.mark.parametrize("case", BAD)
def test_header_that_cannot_be_right_is_an_error_with_file_and_byte(
    tmp_path: Path, case: str
) -> None:
    (tmp_path / "a.tar").write_bytes(header(b"0.txt", octal(0)) + BAD[case] + bytes(1 << 20))
    with pytest.raises(DatasetFormatError) as caught:
        prepare_dataset(tmp_path, split_ratio="1,0,0", num_workers=0)
    message = str(caught.value)
    assert str(tmp_path / "a.tar") in message
    assert "byte 512" in message or "cut off" in message
    assert "write the tar again" in message
    buffer = np.frombuffer(padded(BAD[case]), dtype=np.uint8)
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
