"""Parts that are small in a shard and would be gigabytes when decoded."""

from __future__ import annotations

import functools
import gzip
import io
import json
import struct
import sys
import tracemalloc
import types
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from energon_lite import (
    SampleDecoder,
)
from energon_lite.core.errors import DecodingError
from energon_lite.decoding.part_formats import MAX_DECODED_BYTES, cbor

from ..conftest import examples

# Pillow warns of pictures above 89 megapixels.
pytestmark = pytest.mark.filterwarnings("ignore")
MEBIBYTE = 1 << 20


@functools.cache
def zeros_gz(size: int) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    block = bytes(MEBIBYTE)
    packed = [packer.compress(block) for _ in range(size // MEBIBYTE)]
    return b"".join([*packed, packer.flush()])


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (117 - len(text)) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npz(size: int, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.npy", npy_header(f"({size // 4},)") + bytes(size))
    return buffer.getvalue()


def lying_npz(size: int) -> bytes:
    """An archive whose directory says that a member is short."""
    raw = bytearray(npz(size))
    at = raw.rindex(b"PK\x01\x02")
    raw[at + 24 : at + 28] = struct.pack("<I", 200)
    return bytes(raw)


def png(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


def tenbin_that_goes_round() -> bytes:
    sizes = (0, 0, 0, -64)
    return b"".join(b"~TenBin~" + struct.pack("@q", size) for size in sizes)


SMALL = SampleDecoder(max_bytes=MEBIBYTE)
BOMBS = {
    "zeros in gz": ("txt.gz", zeros_gz(64 * MEBIBYTE)),
    "members of gz": ("txt.gz", gzip.compress(bytes(1 << 14)) * 100),
    "gz in gz": ("gz", gzip.compress(zeros_gz(64 * MEBIBYTE)) + zeros_gz(64 * MEBIBYTE)),
    "npz": ("npz", npz(8 * MEBIBYTE)),
    "npz that lies": ("npz", lying_npz(8 * MEBIBYTE)),
    "npz of bz2": ("npz", npz(8 * MEBIBYTE, zipfile.ZIP_BZIP2)),
    "small npz of bz2": ("npz", npz(1000, zipfile.ZIP_BZIP2)),
    "npy of a terabyte": ("npy", npy_header("(250000000000,)")),
    "npy of many dimensions": ("npy", npy_header("(1000000, 1000000, 1000000, 1000000)")),
    "npy nested": ("npy", npy_header("(" * 2000)),
    "png": ("png", png(13_300, 13_300)),
    "png beyond pillow": ("png", png(60_000, 60_000)),
    "png in jpg": ("jpg", png(1_000, 1_000)),
    "gif": ("gif", b"GIF89a\xff\xff\xff\xff\0\0\0" + b",\0\0\0\0\xff\xff\xff\xff\0\2\0\0;"),
    "bmp": ("bmp", b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 30000, 30000, 1, 24, 0,
                                       0, 0, 0, 0, 0)),
    "lists in json": ("json", b"[" * 100_000),
    "deep json": ("json", b"[" * 50_000 + b"]" * 50_000),
    "many values in json": ("json.gz", gzip.compress(b"[" + b"[]," * 300_000 + b"0]")),
    "digits in json": ("json", b"9" * 5000),
    "digits in cls": ("cls", b"9" * 5000),
    "stored text": ("txt", b"x" * (2 * MEBIBYTE)),
    "tenbin that goes round": ("ten", tenbin_that_goes_round()),
    "tenbin of a terabyte": ("ten", b"~TenBin~" + struct.pack("@q", 1 << 40)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_part_that_would_be_too_large_is_a_broken_part_and_allocates_nothing(name: str) -> None:
    part, raw = BOMBS[name]
    SMALL.decode("txt", b"")
    tracemalloc.start()
    try:
        with pytest.raises(DecodingError, match=r"^part '"):
            SMALL.decode(part, raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MEBIBYTE + 10 * len(raw)


def test_the_error_names_the_size_the_setting_and_the_remedy() -> None:
    with pytest.raises(DecodingError) as caught:
        SampleDecoder().decode("png", png(12_000, 12_000))
    assert "would take 1,728,000,000 bytes" in str(caught.value)
    assert "12,000 x 12,000 pixels" in str(caught.value)
    assert "SampleDecoder(max_bytes=...) allows 1,610,612,736" in str(caught.value)

    with pytest.raises(DecodingError, match=r"would take .* \(unpacked\).*max_bytes"):
        SMALL.decode("txt.gz", zeros_gz(8 * MEBIBYTE))


def test_a_picture_of_a_hundred_megapixels_is_within_the_default() -> None:
    with pytest.raises(DecodingError, match="broken PNG"):  # only because it is cut off
        SampleDecoder().decode("png", png(11_648, 8_736))


def test_what_is_as_large_as_the_limit_is_decoded() -> None:
    decoder = SampleDecoder(max_bytes=6_000)
    text = b"x" * 6_000
    assert decoder.decode("txt", text) == decoder.decode("txt.gz", gzip.compress(text))
    picture = io.BytesIO()
    Image.new("RGB", (50, 10)).save(picture, "PNG")
    assert decoder.decode("png", picture.getvalue()).shape == (3, 10, 50)
    with pytest.raises(DecodingError, match="would take 6,120 bytes"):
        decoder.decode("png", png(51, 10))


def test_parts_that_stay_bytes_have_no_limit() -> None:
    decoder = SampleDecoder(max_bytes=10, image_decode="bytes", av_decode="bytes")
    assert decoder.decode("jpg", bytes(100)) == bytes(100)
    assert decoder.decode("mp4", bytes(100)) == bytes(100)


def test_json_of_many_replies_is_decoded() -> None:
    deep = '{"replies": [' * 150 + "]}" * 150
    assert SampleDecoder().decode("json", deep.encode()) == json.loads(deep)
    text = json.dumps({"a": '"[{\\' * 1000}).encode()
    assert SampleDecoder().decode("json", text) == json.loads(text)


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(0, 20), st.integers(0, 3))
def test_gzip_is_unpacked_as_python_unpacks_it(members: list[bytes], cut: int, zeros: int) -> None:
    raw = b"".join(map(gzip.compress, members)) + bytes(zeros)
    raw = raw[: len(raw) - cut]
    try:
        expected = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error):
        with pytest.raises(DecodingError):
            SampleDecoder().decode("bin.gz", raw)
    else:
        if expected or raw.strip(b"\0"):
            assert SampleDecoder().decode("bin.gz", raw) == expected


@examples(200)
@given(
    st.sampled_from(["json", "npy", "npz", "ten", "gz", "txt", "cls", "png", "jpg", "tif", "gif"]),
    st.binary(max_size=60), st.integers(0, 400), st.binary(min_size=1, max_size=4),
)  # fmt: skip
def test_corrupt_parts_are_a_decoding_error_or_a_value(
    part: str, head: bytes, at: int, change: bytes
) -> None:
    whole = {"npz": npz(64), "npy": npy_header("(2,)") + bytes(8), "png": png(3, 3),
             "gz": gzip.compress(b"x" * 50), "json": b'{"a": [1.5, "x"]}', "ten": BOMBS["gif"][1],
             "gif": BOMBS["gif"][1]}.get(part, b"")  # fmt: skip
    for raw in (head, whole[:at] + change + whole[at + len(change) :]):
        try:
            SMALL.decode(part, raw)
        except DecodingError as error:
            assert "part '" in str(error)  # noqa: PT017


CBOR = [
    b"\x81" * 100_000, b"\xa1\x01" * 100_000, b"\xc1" * 100_000, b"\x9f" * 100_000,
    b"\x9b\0\0\0\1\0\0\0\0", b"\x5b\0\0\0\1\0\0\0\0", b"\x82\x01", b"", b"\x9f\x01",
    b"\xbb" + b"\xff" * 8, b"\x9f" + b"\x80" * 100_000 + b"\xff",
    b"\x81" * 1000 + b"\1", b"\x42\1",
]  # fmt: skip


@pytest.fixture
def cbor_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package cbor, which is not installed: only what comes before it is tested."""
    module: Any = types.ModuleType("cbor")
    module.loads = lambda raw: len(raw)
    monkeypatch.setitem(sys.modules, "cbor", module)
    return


@pytest.mark.usefixtures("cbor_module")
def test_cbor_that_would_crash_its_package_is_refused_before() -> None:
    for raw in CBOR:
        with pytest.raises(DecodingError, match="part 'cbor'"):
            SMALL.decode("cbor", raw)
    # {"a": [1, -2, 3.5, h'0102', _ "x" "y"], 24: tag(true)}
    honest = bytes.fromhex("a2 6161 85 01 21 f94300 420102 7f 6178 6179 ff 1818 c1 f5")
    assert cbor(honest, MEBIBYTE) == len(honest)


def test_the_limit_is_a_setting_of_the_content_unless_it_is_the_default() -> None:
    assert "max_bytes" not in SampleDecoder().config()
    assert SampleDecoder(max_bytes=MAX_DECODED_BYTES).config() == SampleDecoder().config()
    assert SMALL.config()["max_bytes"] == MEBIBYTE
    for wrong in (0, -1, True, 1.5, "1"):
        with pytest.raises((TypeError, ValueError), match="max_bytes="):
            SampleDecoder(max_bytes=wrong)  # type: ignore[arg-type]
