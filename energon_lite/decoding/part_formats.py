"""Decodes the formats of parts, each with a limit: what is small in a shard may fill the memory.

What a header declares is compared before anything is allocated; what no header declares is decoded
piece by piece. Images are decoded with Pillow: by content, into numpy arrays, tensors or Pillow
images.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import math
import re
import struct
import types
import warnings
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.core.arrays import npy_view
from energon_lite.core.errors import DecodingError, did_you_mean

# A picture of 102 megapixels, the most that a camera takes in one shot, has 1.2 GB as float32 RGB,
# the default mode. Bombs begin above: a PNG of 13,300 squared would have 2.1 GB, and thrice as much
# on the way.
MAX_DECODED_BYTES = 3 << 29

# Of Python's own readers, about.
_MAX_DEPTH = 500
# An empty list takes as much, and a slot in the list around it.
_VALUE_BYTES = 64
# Short enough that archives of many small members take linear time.
_GZIP_CHUNK = 1 << 14
_NOT_HEADS = bytes(set(range(256)) - set(range(0x80, 0xA0)) - set(range(0xDC, 0xE0)))


class TooLargeError(DecodingError):
    """A part would be larger decoded than `SampleDecoder(max_bytes=...)`, or Pillow, allows."""


def check_size(num_bytes: int, max_bytes: int, what: str) -> None:
    """Compares a size that is declared.

    Raises:
        TooLargeError: It is above the limit.
    """
    if num_bytes > max_bytes:
        raise TooLargeError(
            f"would take {num_bytes:,} bytes or more when decoded ({what}), where "
            f"SampleDecoder(max_bytes=...) allows {max_bytes:,}; raise it if the data are right"
        )


def gunzip(raw: bytes, max_bytes: int) -> bytes:
    """Unpacks gzip data, of several members, too."""
    parts: list[bytes] = []
    size = 0
    unzip = None
    for start in range(0, len(raw), _GZIP_CHUNK):
        chunk = raw[start : start + _GZIP_CHUNK]
        while chunk:
            if unzip is None:
                chunk = chunk.lstrip(b"\0") if parts else chunk  # padding
                if not chunk:
                    break
                unzip = zlib.decompressobj(wbits=31)
            parts.append(unzip.decompress(chunk, max_bytes - size + 1))
            size += len(parts[-1])
            check_size(size, max_bytes, "unpacked")
            chunk = unzip.unused_data
            unzip = None if unzip.eof else unzip
    if unzip is not None:
        raise EOFError("it ends before its end marker")
    return b"".join(parts)


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


# -------------------------------------------------------------------------------------- images

# Parts that are images, as webdataset has them, less those that Pillow only recognises (h5, mpg,
# grib, ...) or hands to another program (eps, ps, wmf, emf): these stay bytes.
_EXTENSIONS = (
    "apng blp bmp bw cur dcx dds dib fit fits flc fli ftc ftu gbr gif icb icns ico iim im j2c j2k "
    "jfif jp2 jpc jpe jpeg jpf jpg jpx msp pbm pcd pcx pgm png pnm ppm psd pxr ras rgb rgba sgi "
    "tga tif tiff vda vst webp xbm xpm"
)
IMAGE_EXTENSIONS = frozenset(_EXTENSIONS.split())

# Never tried, whatever a part contains: Ghostscript would run on data of unknown origin.
_FOREIGN_FORMATS = frozenset({"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG"})

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
)


# Containers of audio and video; of the type `ftyp`, images of HEIF and AVIF have other brands.
_AV_MAGIC = re.compile(
    rb"....ftyp(isom|iso\d|mp4\d|avc1|dash|qt  |M4[ABPV] |MSNV|3gp\d|f4v )"
    rb"|\x1aE\xdf\xa3|RIFF....(WAVE|AVI )|fLaC|FLV\x01|ID3|\xff[\xfb\xf3\xf2]",
    re.DOTALL,
)


def is_av(raw: bytes) -> bool:
    """Returns whether the first bytes are those of audio or video."""
    return _AV_MAGIC.match(raw) is not None


class ImageMode(NamedTuple):
    """What an image is decoded to.

    Attributes:
        kind: `numpy` (H, W, C), `torch` (C, H, W) or `pil`.
        is_float: float32 in [0, 1] instead of uint8.
        colors: Pillow's mode, `L`, `RGB` or `RGBA`. With `L` there is no channel axis: (H, W).
    """

    kind: str
    is_float: bool
    colors: str


IMAGE_MODES = {
    f"{prefix}{colors.lower()}{suffix}": ImageMode(kind, is_float, colors)
    for prefix, suffix, kind, is_float in (
        ("", "8", "numpy", False),
        ("", "", "numpy", True),
        ("torch", "8", "torch", False),
        ("torch", "", "torch", True),
        ("pil", "", "pil", False),
    )
    for colors in ("L", "RGB", "RGBA")
}
IMAGE_MODES |= {"torch": IMAGE_MODES["torchrgb"], "pil": IMAGE_MODES["pilrgb"]}

# The mode in which images are not decoded.
UNDECODED = "bytes"

# A tensor, so that the quotient is float32 independent of torch.set_default_dtype.
_WHITE = torch.tensor(255.0, dtype=torch.float32, device="cpu")


def image_decoder(mode_name: str, max_bytes: int = MAX_DECODED_BYTES) -> Callable[[bytes], Any]:
    """Returns the function that decodes the bytes of an image to one of `IMAGE_MODES`.

    Args:
        mode_name: the mode.
        max_bytes: largest image that is decoded.

    Raises:
        ValueError: There is no such mode; names the closest one.
    """
    mode = IMAGE_MODES.get(mode_name)
    if mode is None:
        hint = did_you_mean(mode_name, (*IMAGE_MODES, UNDECODED))
        raise ValueError(f"image_decode: Unknown imagespec: {mode_name!r}.{hint}")
    return functools.partial(_decode_image, mode=mode, max_bytes=max_bytes)


def image_format(raw: bytes) -> str | None:
    """Returns Pillow's name of the format that the first bytes show; None if they show none."""
    for magic, name in _MAGIC:
        if raw.startswith(magic):
            return name
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "WEBP"
    if raw[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    # Two letters are little evidence: also ask for the reserved zeros of the header.
    if raw[:2] == b"BM" and raw[6:10] == b"\0\0\0\0":
        return "BMP"
    return None


@functools.lru_cache(maxsize=1)
def _pillow() -> types.ModuleType:
    """Imports Pillow on first use; no other place of the package does."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images need Pillow to be decoded: pip install pillow") from error
    return Image


@functools.lru_cache(maxsize=1)
def _all_formats() -> tuple[str, ...]:
    pillow = _pillow()
    pillow.init()
    return tuple(name for name in pillow.ID if name not in _FOREIGN_FORMATS)


def image_header(file: BinaryIO) -> tuple[int, int, str, str]:
    """Returns width, height, format and mode of an image; its pixels are not decoded.

    Raises:
        ValueError: It is no image, or its header is corrupt.
        OSError: As ValueError, or the file cannot be read.
    """
    name = image_format(file.read(16))
    file.seek(0)
    pillow = _pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of images that are large; nothing is allocated
        try:
            opened = pillow.open(file, formats=_all_formats() if name is None else (name,))
        except pillow.DecompressionBombError as error:
            raise ValueError(
                f"{error}; if the data are right, raise PIL.Image.MAX_IMAGE_PIXELS"
            ) from None
    return (*opened.size, str(opened.format), str(opened.mode))


def _decode_image(raw: bytes, mode: ImageMode, max_bytes: int) -> Any:
    # Naming the format saves Pillow the search through all its plug-ins.
    name = image_format(raw)
    formats = _all_formats() if name is None else (name,)
    pillow = _pillow()
    try:
        opened = pillow.open(io.BytesIO(raw), formats=formats)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        text = "if the data are right, raise PIL.Image.MAX_IMAGE_PIXELS"
        raise TooLargeError(f"is refused by Pillow ({error}); {text}") from None
    with opened as image:
        size = image.size
        _check_pixels(size, mode, max_bytes)
        image.load()
        if image.size != size:  # an icon's
            _check_pixels(image.size, mode, max_bytes)
        if mode.kind == "pil":
            return _unify(image).convert(mode.colors)
        if image.mode != mode.colors:
            image = _unify(image).convert(mode.colors)
        return _to_tensor(image, mode) if mode.kind == "torch" else _to_array(image, mode)


def _check_pixels(size: tuple[int, int], mode: ImageMode, max_bytes: int) -> None:
    # Pillow takes 4 bytes for a pixel, whatever comes of it.
    num_bytes = size[0] * size[1] * max(4, len(mode.colors) * (4 if mode.is_float else 1))
    check_size(num_bytes, max_bytes, f"{size[0]:,} x {size[1]:,} pixels")


def _unify(image: Any) -> Any:
    """Makes images of the modes that Pillow converts badly into ones that it converts well."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow would cut 16-bit values off at 255, so that nearly all is white; the upper byte
        # is what it takes of 16-bit colours.
        return _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "LAB":
        return image.convert("RGB")  # the only conversion that Pillow has
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # straight to RGB: the same colours, and a warning
    return image


def _to_tensor(image: Any, mode: ImageMode) -> torch.Tensor:
    # Band by band is quicker than a transposed copy: 0.2 ms against 0.7 ms for 640x586.
    bands = image.split()
    planes = np.empty((len(bands), image.height, image.width), dtype=np.uint8)
    for plane, band in zip(planes, bands, strict=True):
        plane[...] = np.asarray(band)
    tensor = torch.from_numpy(planes[0] if mode.colors == "L" else planes)
    return torch.div(tensor, _WHITE) if mode.is_float else tensor


def _to_array(image: Any, mode: ImageMode) -> npt.NDArray[Any]:
    if mode.is_float:
        scaled: npt.NDArray[np.float32] = np.divide(image, np.float32(255), dtype=np.float32)
        return scaled
    return np.array(image, dtype=np.uint8)  # a copy, because Pillow's own array is read-only
