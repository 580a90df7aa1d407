"""Decodes images by content, into numpy arrays, tensors or Pillow images.

JPEGs are decoded by libjpeg-turbo, if the package simplejpeg is installed. Pillow decodes all other
images, and those JPEGs that libjpeg-turbo refuses. The values are the same either way.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from energon_lite.core.arrays import UInt8Array, keep_freed_memory
from energon_lite.core.errors import did_you_mean
from energon_lite.decoding.image_size import ImageSize, reduction, resized
from energon_lite.decoding.part_formats import MAX_DECODED_BYTES, RefusedPartError, check_size
from energon_lite.decoding.planes import write_planes

logger = logging.getLogger(__name__)

# Parts that are images, as webdataset has them, less those that Pillow only recognises (h5, mpg,
# grib, ...) or hands to another program (eps, ps, wmf, emf): these stay bytes.
_EXTENSIONS = (
    "apng avif avifs blp bmp bw cur dcx dds dib fit fits flc fli ftc ftu gbr gif heic heif hif "
    "icb icns ico iim im j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx msp pbm pcd pcx pgm png pnm "
    "ppm psd pxr ras rgb rgba sgi tga tif tiff vda vst webp xbm xpm"
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
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")


class NoPlugInError(ValueError):
    """Pillow, as it is installed, has no plug-in for the format of an image."""


class ImageMode(NamedTuple):
    """The form that an image is decoded to.

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


def image_decoder(
    mode_name: str, size: ImageSize | None = None, max_bytes: int = MAX_DECODED_BYTES
) -> Callable[[bytes], Any]:
    """Returns the function that decodes the bytes of an image to one of `IMAGE_MODES`.

    Args:
        mode_name: the mode.
        size: limits to which images are made smaller.
        max_bytes: largest image that is decoded.

    Raises:
        ValueError: There is no such mode; names the closest one.
    """
    mode = IMAGE_MODES.get(mode_name)
    if mode is None:
        hint = did_you_mean(mode_name, (*IMAGE_MODES, UNDECODED))
        raise ValueError(f"image_decode: Unknown imagespec: {mode_name!r}.{hint}")
    return _ImageDecoder(mode, size, max_bytes)


def image_format(raw: bytes) -> str | None:
    """Returns Pillow's name of the format that the first bytes show; None if they show none."""
    for magic, name in _MAGIC:
        if raw.startswith(magic):
            return name
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "WEBP"
    if raw[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    if raw[4:8] == b"ftyp" and raw[8:12] in _HEIF:
        return "HEIF"
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
def _turbo() -> types.ModuleType | None:
    """Imports simplejpeg on first use; None if it is not installed, which is logged."""
    try:
        import simplejpeg
    except ImportError:
        worker = get_worker_info()
        if worker is None or worker.id == 0:
            logger.warning(
                "JPEGs are decoded by Pillow. libjpeg-turbo needs half the time for the same "
                "result: pip install 'energon_lite[jpeg]'"
            )
        return None
    return simplejpeg  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def _all_formats() -> tuple[str, ...]:
    pillow = _pillow()
    pillow.init()
    return tuple(name for name in pillow.ID if name not in _FOREIGN_FORMATS)


def _formats(name: str | None) -> tuple[str, ...]:
    """Returns the formats to try; one that is named saves Pillow the search through all."""
    if name is None:
        return _all_formats()
    if name in ("AVIF", "HEIF") and name not in _all_formats() and name not in _pillow().OPEN:
        raise NoPlugInError(
            "Pillow has no plug-in for it here. AVIF: pip install 'pillow>=11.3'; HEIF: pip "
            "install pillow-heif, and call pillow_heif.register_heif_opener()"
        )
    return (name,)


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
            opened = pillow.open(file, formats=_formats(name))
        except pillow.DecompressionBombError as error:
            raise ValueError(
                f"{error}; if the data are right, raise PIL.Image.MAX_IMAGE_PIXELS"
            ) from None
    return (*opened.size, str(opened.format), str(opened.mode))


@dataclass(frozen=True, eq=False)
class _ImageDecoder:
    mode: ImageMode
    size: ImageSize | None
    max_bytes: int

    def __call__(self, raw: bytes) -> Any:
        pixels = self._jpeg_pixels(raw)
        if pixels is None or self.mode.kind == "pil":
            with _open_image(raw) as opened:
                image = self._load(opened) if pixels is None else _image(pixels, opened.info)
            if self.mode.kind == "pil":
                return image
            pixels = np.asarray(image)
        if self.mode.kind == "torch":
            return self._tensor(pixels)
        if self.mode.is_float:
            return np.divide(pixels, np.float32(255), dtype=np.float32, order="C")
        return np.require(pixels, requirements=["C", "W"])

    def _tensor(self, pixels: UInt8Array) -> torch.Tensor:
        shape = (*pixels.shape[2:], *pixels.shape[:2])
        keep_freed_memory()
        planes = np.empty(shape, np.float32 if self.mode.is_float else np.uint8)
        write_planes(pixels, planes)
        return torch.from_numpy(planes)

    def _jpeg_pixels(self, raw: bytes) -> UInt8Array | None:
        """Decodes a JPEG with libjpeg-turbo; None if Pillow has to do it, or to refuse it."""
        if image_format(raw) != "JPEG" or (turbo := _turbo()) is None:
            return None
        pillow = _pillow()
        try:
            height, width, stored, _ = turbo.decode_jpeg_header(raw)
            if stored in ("CMYK", "YCCK") or width * height > (pillow.MAX_IMAGE_PIXELS or math.inf):
                return None
            target = self._target((width, height))
            factor = reduction((width, height), target)
            reduced = (-(-width // factor), -(-height // factor))
            self._check_pixels(reduced)
            colors = self.mode.colors
            if colors == "L":
                colors = "GRAY" if stored == "Gray" else "RGB"
            pixels = turbo.decode_jpeg(
                raw, colors, min_width=reduced[0], min_height=reduced[1], min_factor=factor
            )
        except RefusedPartError:
            raise
        except ValueError:  # Pillow tolerates more, such as bytes between two markers
            return None
        if colors == "GRAY":
            pixels = pixels[..., 0]
        elif self.mode.colors == "L":
            # The stored luminance differs: colours outside of RGB are cut off before.
            pixels = np.array(pillow.fromarray(pixels).convert("L"))
        return resized(pixels, (width, height), target, factor)

    def _load(self, image: Any) -> Any:
        """Returns an opened image in the colours and the size that are wanted."""
        stored = image.size
        target = self._target(stored)
        factor = reduction(stored, target)
        if factor > 1:  # Pillow reduces JPEGs only
            image.draft(None, (stored[0] // factor, stored[1] // factor))
        reduced = image.size
        self._check_pixels(reduced)
        image.load()
        if image.size != reduced:  # an icon's
            stored = image.size
            self._check_pixels(stored)
            target = self._target(stored)
        if image.size == stored:
            factor = 1
        info = image.info
        if self.mode.kind == "pil" or image.mode != self.mode.colors:
            image = _unify(image).convert(self.mode.colors)
        if target == stored:
            return image
        if image.mode == "RGBA" and image.getextrema()[3][0] < 255:
            # Pillow weighs colours by their alpha: what is transparent leaves no dark edges.
            return image.resize(target, _pillow().Resampling.BICUBIC)
        return _image(resized(np.array(image), stored, target, factor), info)

    def _target(self, stored: tuple[int, int]) -> tuple[int, int]:
        return stored if self.size is None else self.size.of_image(*stored)

    def _check_pixels(self, size: tuple[int, int]) -> None:
        # Pillow takes 4 bytes for a pixel, whatever comes of it.
        pixel_bytes = max(4, len(self.mode.colors) * (4 if self.mode.is_float else 1))
        what = f"{size[0]:,} x {size[1]:,} pixels"
        check_size(size[0] * size[1] * pixel_bytes, self.max_bytes, what)


def _open_image(raw: bytes) -> Any:
    pillow = _pillow()
    try:
        return pillow.open(io.BytesIO(raw), formats=_formats(image_format(raw)))
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        text = "if the data are right, raise PIL.Image.MAX_IMAGE_PIXELS"
        raise RefusedPartError(f"is refused by Pillow ({error}); {text}") from None


def _image(pixels: UInt8Array, info: dict[str, Any]) -> Any:
    """Makes a Pillow image, with the EXIF and the colour profile of its file."""
    image = _pillow().fromarray(pixels)
    image.info = info
    return image


def _unify(image: Any) -> Any:
    """Makes images of the modes that Pillow converts badly into ones that it converts well."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _pillow().fromarray(_eight_bits(image))
    if image.mode == "LAB":
        return image.convert("RGB")  # the only conversion that Pillow has
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA")  # straight to RGB: the same colours, and a warning
    return image


def _eight_bits(image: Any) -> UInt8Array:
    """Returns grey values of 16 bits or floats as bytes, where Pillow would cut them off at 255."""
    values, is_float = np.asarray(image), image.mode == "F"
    low, high = values.min(), values.max()
    if is_float and 0 <= low <= high <= 255:  # from 0 to 1, or as Pillow converts to floats
        return (values * 255 + 0.5 if high <= 1 else values).astype(np.uint8)
    # TIFFs of 32 bits declare no range; a picture that is dark for 16 bits may have 8.
    is_known = image.mode != "I" or image.format in ("PNG", "PPM")
    if is_float or not (is_known or (low == high == 0) or (low >= 0 and 256 <= high < 1 << 16)):
        text = f"has grey values from {low:g} to {high:g} of 32 bits, whose white is unknown"
        raise RefusedPartError(f"{text}; store it with 8 or 16 bits, or as floats from 0 to 1")
    # The upper byte is what Pillow takes of 16-bit colours.
    return (values >> 8).astype(np.uint8)
