"""Decodes the formats of parts, each with a limit: what is small in a shard may fill the memory.

What a header declares is compared before anything is allocated; what no header declares is decoded
piece by piece.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np

from energon_lite.core.arrays import npy_view
from energon_lite.core.errors import DecodingError

# A picture of 102 megapixels, the most that a camera takes in one shot, has 1.2 GB as float32 RGB,
# the default mode. Bombs begin above: a PNG of 13,300 squared would have 2.1 GB, and thrice as much
# on the way.
MAX_DECODED_BYTES = 3 << 29

AV_EXTENSIONS = frozenset({"mp4", "avi", "mov", "webm", "mkv", "flac", "mp3", "wav", "flv", "m4a"})
AV_MODES = ("AVDecoder", "torch", "pyav")

# About the depth at which Python's readers stop.
_MAX_DEPTH = 500
# An empty list takes as much, and a slot in the list around it.
_VALUE_BYTES = 64
# Short enough that archives of many small members take linear time.
_GZIP_CHUNK = 1 << 14
_NOT_HEADS = bytes(set(range(256)) - set(range(0x80, 0xA0)) - set(range(0xDC, 0xE0)))


class RefusedPartError(DecodingError):
    """A part is whole, but has a range that is unknown, or is too large decoded.

    Its size is limited by `SampleDecoder(max_bytes=...)`, and by Pillow.
    """


def check_size(num_bytes: int, max_bytes: int, what: str) -> None:
    """Compares a size that is declared.

    Raises:
        RefusedPartError: It is above the limit.
    """
    if num_bytes > max_bytes:
        raise RefusedPartError(
            f"would take {num_bytes:,} bytes or more when decoded ({what}), where "
            f"SampleDecoder(max_bytes=...) allows {max_bytes:,}; raise it if the data are right"
        )


def gunzip(raw: bytes, max_bytes: int) -> bytes:
    """Unpacks gzip data, of several members, too: into memory that grows in its place."""
    if int.from_bytes(raw[-4:], "little") > max_bytes:  # as the last member declares, or is corrupt
        for _ in _gzip_pieces(raw, max_bytes):
            pass  # raises before anything is kept
    buffer = io.BytesIO()
    buffer.writelines(_gzip_pieces(raw, max_bytes))
    return buffer.getvalue()  # without a copy


def _gzip_pieces(raw: bytes, max_bytes: int) -> Iterator[bytes]:
    size, has_member = 0, False
    unzip = None
    for start in range(0, len(raw), _GZIP_CHUNK):
        chunk = raw[start : start + _GZIP_CHUNK]
        while chunk:
            if unzip is None:
                chunk = chunk.lstrip(b"\0") if has_member else chunk  # padding
                if not chunk:
                    break
                unzip, has_member = zlib.decompressobj(wbits=31), True
            piece = unzip.decompress(chunk, max_bytes - size + 1)
            size += len(piece)
            check_size(size, max_bytes, "unpacked")
            yield piece
            chunk = unzip.unused_data
            unzip = None if unzip.eof else unzip
    if unzip is not None:
        raise EOFError("it ends before its end marker")


def npy(raw: bytes) -> Any:
    """Decodes an array."""
    return npy_view(raw).copy("K")


def npz(raw: bytes, max_bytes: int) -> dict[str, Any]:
    """Decodes an archive of arrays."""
    found: dict[str, Any] = {}
    with ZipFile(io.BytesIO(raw)) as archive:
        members = archive.infolist()
        check_size(sum(m.file_size for m in members), max_bytes, f"{len(members)} arrays")
        for member in members:
            if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # others ignore sizes
                raise ValueError(f"{member.filename!r:.80} is compressed as numpy never does it")
            with archive.open(member) as file:
                body = file.read(member.file_size)  # read() unpacks all, and cuts it off then
            is_array = body.startswith(np.lib.format.MAGIC_PREFIX)
            found[member.filename.removesuffix(".npy")] = npy(body) if is_array else body
    return found


def json_value(raw: bytes, max_bytes: int) -> Any:
    """Decodes JSON, whose decoder limits the depth by itself."""
    if len(raw) * _VALUE_BYTES > max_bytes:
        num_values = sum(map(raw.count, (b",", b"[", b"{")))
        check_size(num_values * _VALUE_BYTES // 2 + len(raw), max_bytes, f"{num_values:,} values")
    return json.loads(raw)


def msgpack(raw: bytes, max_bytes: int) -> Any:
    """Decodes msgpack, whose decoder limits the depth by itself."""
    if len(raw) * _VALUE_BYTES > max_bytes:
        num_heads = len(raw.translate(None, _NOT_HEADS))
        check_size(num_heads * _VALUE_BYTES, max_bytes, f"up to {num_heads:,} lists and maps")
    return optional_module("msgpack").unpackb(raw)


def cbor(raw: bytes, max_bytes: int) -> Any:
    """Decodes CBOR; the package cbor crashes the process where it is nested deeply."""
    module = optional_module("cbor")
    _check_cbor(raw, max_bytes)
    return module.loads(raw)


def _check_cbor(raw: bytes, max_bytes: int) -> None:
    left: list[float] = [1]  # values to come at each level
    at = num_values = 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        kind, low = divmod(raw[at], 32)
        at += 1
        number = low
        if 24 <= low <= 27:
            number = int.from_bytes(raw[at : at + (1 << low - 24)], "big")
            at += 1 << low - 24
        left[-1] -= 1
        num_values += 1
        if kind == 7 and low == 31:  # the end of a list of unknown length
            left.pop()
        elif kind in (2, 3) and low != 31:
            at += number
        elif 2 <= kind <= 6:
            count = math.inf if low == 31 else number * {5: 2}.get(kind, 1) if kind != 6 else 1
            left.append(count)
        if len(left) > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
        if at > len(raw) or (left and math.isfinite(left[-1]) and left[-1] > len(raw) - at):
            raise ValueError("it ends before what it declares")
        check_size(num_values * _VALUE_BYTES, max_bytes, f"{num_values:,} values or more")


def tenbin(raw: bytes) -> Any:
    """Decodes tenbin arrays, which are as large as they are in the part."""
    # webdataset takes as long to import as all of this package, and tenbin is rare.
    from webdataset import tenbin as format_

    at = 0
    while at < len(raw):  # webdataset goes back, and round for ever, by negative lengths
        (size,) = struct.unpack_from("@q", raw, at + 8)
        if not 0 <= size <= len(raw) - at - 16:
            raise ValueError(f"a chunk at byte {at} declares {size} bytes")
        at += 16 + format_.roundup(size)
    return format_.decode_buffer(raw)


def optional_module(name: str) -> Any:
    """Imports a package that only some data need.

    Raises:
        ImportError: It is not installed; the text names the command that does it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"A part with {name} data cannot be decoded without the package {name}: "
            f"pip install {name}"
        ) from error


# Containers of audio and video; of the type `ftyp`, images of HEIF and AVIF have other brands.
_AV_MAGIC = re.compile(
    rb"....ftyp(isom|iso\d|mp4\d|avc1|dash|qt  |M4[ABPV] |MSNV|3gp\d|f4v )"
    rb"|\x1aE\xdf\xa3|RIFF....(WAVE|AVI )|fLaC|FLV\x01|ID3|\xff[\xfb\xf3\xf2]",
    re.DOTALL,
)


def is_av(raw: bytes) -> bool:
    """Returns whether the first bytes are those of audio or video."""
    return _AV_MAGIC.match(raw) is not None
