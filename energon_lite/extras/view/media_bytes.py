"""Turns pictures, audio and video of a sample into bytes that a browser shows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from energon_lite.core.arrays import UInt8Array
from energon_lite.decoding.images import image_format
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.media.av_decoder import AVDecoder

# Formats that browsers draw, and that hold no scripts.
_SHOWN = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp"}
_LARGE_PIXELS = 1 << 18  # pictures of more are compressed as a JPEG
_PLAYED = (
    (b"fLaC", "audio/flac"), (b"ID3", "audio/mpeg"), (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"), (b"\xff\xf2", "audio/mpeg"), (b"OggS", "audio/ogg"),
    (b"RIFF", "audio/wav"), (b"\x1aE\xdf\xa3", "video/webm"), (b"FLV", "video/x-flv"),
)  # fmt: skip


def picture_bytes(value: Any, longest_edge: int | None = None) -> tuple[bytes, str]:
    """Returns a picture as the bytes of a file, and its media type.

    Args:
        value: a picture as in `FieldView`. Floats are taken as 0..1; where some lie outside, as in
            normalised pictures, the least value becomes black and the largest white.
        longest_edge: pixels of its longest edge at most; None for all.

    Raises:
        DecodingError: The bytes are no picture, or one that is too large.
        ValueError: It cannot be drawn.
    """
    if isinstance(value, bytes):
        shown = _SHOWN.get(image_format(value) or "")
        if shown is not None and longest_edge is None:
            return value, shown
        limit = None if longest_edge is None else {"longest_edge": longest_edge}
        image = SampleDecoder(image_decode="pilrgb", image_size=limit).decode("jpg", value)
    else:
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        image = Image.fromarray(_pixels(value, longest_edge)) if is_array else value.copy()
        if longest_edge is not None:
            image.thumbnail((longest_edge, longest_edge))
    file, is_large = io.BytesIO(), image.width * image.height > _LARGE_PIXELS
    if is_large or longest_edge is not None:
        image.convert("RGB").save(file, "JPEG", quality=85)
        return file.getvalue(), "image/jpeg"
    plain = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    plain.save(file, "PNG", compress_level=1)
    return file.getvalue(), "image/png"


def _pixels(value: Any, longest_edge: int | None) -> UInt8Array:
    """Returns an array (H, W) or (H, W, C) of a tensor (C, H, W), or of an array as it is."""
    if isinstance(value, torch.Tensor):
        value = value.detach().movedim(0, -1)
    if longest_edge is not None:  # a large one takes long to convert
        step = max(1, max(value.shape) // (4 * longest_edge))
        value = value[::step, ::step]
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).cpu().numpy()
    if value.dtype != np.uint8:
        value = np.nan_to_num(value.astype(np.float32))
        low, high = float(value.min()), float(value.max())
        if low < -0.01 or high > 1.01:
            value = (value - low) / ((high - low) or 1)
        value = (np.clip(value, 0, 1) * 255).round().astype(np.uint8)
    pixels: UInt8Array = value[..., 0] if value.shape[2:] == (1,) else value
    return np.ascontiguousarray(pixels)


def av_bytes(value: Any) -> tuple[bytes, str]:
    """Returns audio or video as it is stored, and its media type.

    Raises:
        ValueError: It is no content in memory; a path that it names is not read.
    """
    if isinstance(value, AVDecoder) and isinstance(value.stream, io.BytesIO):
        value = value.stream.getvalue()
    if not isinstance(value, bytes):
        raise ValueError(f"a {type(value).__name__} has no bytes to play")
    return value, av_type(value)


def av_type(raw: bytes) -> str:
    """Returns the media type of audio or video by its first bytes."""
    if raw[8:12] == b"AVI ":
        return "video/x-msvideo"
    return next((kind for magic, kind in _PLAYED if raw.startswith(magic)), "video/mp4")
