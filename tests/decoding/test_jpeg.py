"""JPEGs decoded by libjpeg-turbo have the values that Pillow gives, or are left to Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_lite.core.errors import DecodingError
from energon_lite.decoding import images
from energon_lite.decoding.images import IMAGE_MODES
from energon_lite.decoding.sample_decoder import SampleDecoder

from ..programs import run_program

simplejpeg = pytest.importorskip("simplejpeg", reason="needs pip install energon_lite[jpeg]")


def without_turbo(mode: str, raw: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_turbo", lambda: None)
        return outcome(mode, raw)


def outcome(mode: str, raw: bytes) -> Any:
    """The decoded values, or the error."""
    try:
        decoded = SampleDecoder(image_decode=mode).decode("jpg", raw)
    except DecodingError as error:
        return str(error)
    return decoded


def check_equal(raw: bytes, modes: Any = IMAGE_MODES) -> bool:
    """Compares with Pillow in some modes; returns whether libjpeg-turbo has decoded the image."""
    for mode in modes:
        ours, theirs = outcome(mode, raw), without_turbo(mode, raw)
        assert type(ours) is type(theirs), mode
        if isinstance(ours, str):
            assert ours == theirs
        elif isinstance(ours, Image.Image):
            assert (ours.mode, ours.info) == (theirs.mode, theirs.info)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=mode)
    decoder: Any = images.image_decoder("rgb8")
    return decoder._jpeg_pixels(raw) is not None


def noise(height: int, width: int, seed: int = 0, block: int = 1) -> Image.Image:
    shape = (-(-height // block), -(-width // block), 3)
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


def subsampled(image: Image.Image, sampling: str, quality: int) -> bytes:
    values = np.asarray(image.convert("L" if sampling == "Gray" else "RGB"))
    colors = "GRAY" if sampling == "Gray" else "RGB"
    values = values.reshape(*values.shape[:2], -1)
    encoded: bytes = simplejpeg.encode_jpeg(values, quality, colors, sampling)
    return encoded


SIZES = st.integers(1, 40)


@settings(max_examples=40, deadline=None)
@given(
    height=SIZES, width=SIZES, seed=st.integers(0, 99), block=st.integers(1, 9),
    quality=st.integers(1, 100),
    sampling=st.sampled_from(["444", "422", "420", "440", "411", "Gray"]),
)  # fmt: skip
def test_any_subsampling_and_size_has_the_values_of_pillow(
    height: int, width: int, seed: int, block: int, quality: int, sampling: str
) -> None:
    raw = subsampled(noise(height, width, seed, block), sampling, quality)
    assert check_equal(raw)


OPTIONS: dict[str, dict[str, Any]] = {
    "progressive": {"progressive": True},
    "progressive 4:4:4": {"progressive": True, "subsampling": 0},
    "restart markers": {"restart_marker_blocks": 2},
    "stored as RGB": {"keep_rgb": True},  # an Adobe marker with transform 0
    "EXIF, profile, comment": {
        "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
        "icc_profile": b"profile" * 20, "comment": b"text", "dpi": (300, 300),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_other_encodings_have_the_values_of_pillow(name: str) -> None:
    raw = jpeg(noise(37, 51, block=3), quality=80, **OPTIONS[name])
    assert check_equal(raw)
    assert check_equal(raw + b"junk behind the end" * 5)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(OPTIONS)), at=st.floats(0, 1), bit=st.integers(0, 7),
    is_cut=st.booleans(),
)  # fmt: skip
def test_a_broken_jpeg_is_decoded_or_refused_as_by_pillow(name, at, bit, is_cut):
    raw = bytearray(jpeg(noise(24, 31, block=3), **OPTIONS[name]))
    place = min(int(at * len(raw)), len(raw) - 1)
    if is_cut:
        del raw[place:]
    else:
        raw[place] ^= 1 << bit
    check_equal(bytes(raw), ["torchrgb8"])


def test_what_libjpeg_turbo_refuses_is_left_to_pillow() -> None:
    for image in (noise(9, 9).convert("CMYK"), noise(9, 9).convert("YCbCr")):
        check_equal(jpeg(image))
    raw = jpeg(noise(9, 9))
    at = raw.index(b"\xff\xdb")
    assert not check_equal(raw[:at] + b"\0\0" + raw[at:])  # bytes between two markers
    assert "broken JPEG" in outcome("rgb8", raw[:-9])


def test_orientation_is_not_applied_and_stays_readable_in_pillow_images() -> None:
    raw = jpeg(noise(5, 9), **OPTIONS["EXIF, profile, comment"])
    assert SampleDecoder(image_decode="rgb8").decode("jpg", raw).shape == (5, 9, 3)
    image = SampleDecoder(image_decode="pilrgb").decode("jpg", raw)
    assert image.size == (9, 5)
    assert image.getexif()[0x0112] == 6
    assert image.info["icc_profile"] == b"profile" * 20


def test_without_simplejpeg_pillow_decodes_and_a_hint_is_logged_once() -> None:
    script = (
        "import sys; sys.modules['simplejpeg'] = None\n"
        "from energon_lite import SampleDecoder\n"
        f"raw = {jpeg(noise(5, 7))!r}\n"
        "for mode in ('rgb8', 'torchrgb8', 'pil'):\n"
        "    SampleDecoder(image_decode=mode).decode('jpg', raw)\n"
    )
    done = run_program("-c", script)
    assert done.stderr.count("pip install 'energon_lite[jpeg]'") == 1
