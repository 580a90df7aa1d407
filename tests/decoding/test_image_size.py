"""The wanted size of images: limits that hold, the same with and without libjpeg-turbo."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_lite import (
    SampleDecoder,
)
from energon_lite.core.errors import DecodingError
from energon_lite.decoding import images
from energon_lite.decoding.image_size import ImageSize, reduction
from energon_lite.decoding.images import IMAGE_MODES

EDGES = st.integers(1, 5000)
LIMITS = st.none() | st.integers(1, 6000)
SIZES = st.builds(ImageSize, LIMITS, LIMITS, st.none() | st.integers(1, 10**7))


def noise(width: int, height: int, seed: int = 0, block: int = 4) -> Image.Image:
    shape = (-(-height // block), -(-width // block), 3)
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, image_format, **options)
    return stream.getvalue()


@given(size=SIZES, width=EDGES, height=EDGES)
@example(size=ImageSize(longest_edge=99), width=100, height=60)
def test_all_limits_hold_in_proportion_and_nothing_grows(size: ImageSize, width: int, height: int):
    target = size.of_image(width, height)
    short, long = sorted(target)
    assert target[0] <= width
    assert target[1] <= height
    assert short >= 1
    assert short <= (size.shortest_edge or short)
    assert long <= (size.longest_edge or long)
    assert short * long <= (size.max_pixels or short * long)
    # The edges are rounded down from the same scale.
    scale = max(target[0] / width, target[1] / height)
    if short > 1:
        assert width * scale - target[0] < 1 + 1e-9
        assert height * scale - target[1] < 1 + 1e-9
    # Nothing is smaller than it must be: with a pixel more, a limit would be exceeded.
    if target != (width, height) and short > 1:
        scale = min((target[0] + 1) / width, (target[1] + 1) / height)
        edges = sorted((width * scale, height * scale))
        limits = (size.shortest_edge, size.longest_edge)
        is_over = any(edge > limit - 1e-9 for edge, limit in zip(edges, limits) if limit)  # noqa: B905
        assert is_over or edges[0] * edges[1] > (size.max_pixels or np.inf) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("wanted", "size"),
    [
        (40, (53, 40)),  # as torchvision's Resize(40)
        ({"shortest_edge": 40}, (53, 40)),
        ({"longest_edge": 40}, (40, 30)),
        ({"max_pixels": 1200}, (40, 30)),
        ({"shortest_edge": 40, "longest_edge": 48}, (48, 36)),
        (75, (100, 75)),
        (1000, (100, 75)),
    ],
)
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_images_have_the_wanted_size_in_every_mode(wanted, size, image_format):
    raw = encoded(noise(100, 75), image_format)
    for name, mode in IMAGE_MODES.items():
        image = SampleDecoder(image_decode=name, image_size=wanted).decode("jpg", raw)
        if mode.kind == "pil":
            assert (image.mode, image.size) == (mode.colors, size), name
            continue
        shape = image.shape[-2:] if mode.kind == "torch" else image.shape[:2]
        assert tuple(shape) == size[::-1], name
        values = np.asarray(image)
        assert values.dtype == (np.float32 if mode.is_float else np.uint8)
        assert 0 <= values.min() <= values.max() <= (1 if mode.is_float else 255)
        is_whole = image.is_contiguous() if mode.kind == "torch" else image.flags.c_contiguous
        assert is_whole, name


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 90), height=st.integers(1, 90), edge=st.integers(1, 40),
    subsampling=st.integers(0, 2), is_grey=st.booleans(), mode=st.sampled_from(list(IMAGE_MODES)),
)  # fmt: skip
def test_jpegs_have_the_same_values_without_libjpeg_turbo(
    width: int, height: int, edge: int, subsampling: int, is_grey: bool, mode: str
) -> None:
    pytest.importorskip("simplejpeg", reason="needs pip install energon_lite[jpeg]")
    image = noise(width, height, seed=width, block=3).convert("L" if is_grey else "RGB")
    raw = encoded(image, "JPEG", subsampling=subsampling)
    decoder = SampleDecoder(image_decode=mode, image_size=edge)
    ours = np.asarray(decoder.decode("jpg", raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_turbo", lambda: None)
        np.testing.assert_array_equal(ours, np.asarray(decoder.decode("jpg", raw)))


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("edges", [(100, 75), (61, 203), (33, 1)])
def test_values_are_those_of_a_bicubic_antialiased_resize(image_format, edges):
    raw = encoded(noise(*edges), image_format, quality=90)
    width, height = ImageSize.of(23).of_image(*edges)
    decoded = SampleDecoder(image_decode="rgb8", image_size=23).decode("x.png", raw)
    opened: Any = Image.open(io.BytesIO(raw))
    factor = reduction(edges, (width, height)) if image_format == "JPEG" else 1
    if factor > 1:
        opened.draft(None, (edges[0] // factor, edges[1] // factor))
    box = (0, 0, edges[0] / factor, edges[1] / factor)
    expected = opened.resize((width, height), Image.Resampling.BICUBIC, box)
    difference = np.abs(decoded.astype(int) - np.asarray(expected))
    assert difference.max() <= 5  # both round after each axis, of noise with full contrast
    assert difference.mean() < 0.5


def test_what_is_transparent_leaves_no_edges_in_a_smaller_image() -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((250, 240, 230, 255), (13, 0, 64, 64))
    raw = encoded(image, "PNG")
    ours = SampleDecoder(image_decode="rgba8", image_size=10).decode("png", raw)
    np.testing.assert_array_equal(ours, image.resize((10, 10), Image.Resampling.BICUBIC))
    visible = ours[ours[..., 3] > 20]
    assert np.abs(visible[:, :3].astype(int) - (250, 240, 230)).max() <= 6
    planes = SampleDecoder(image_decode="torchrgba8", image_size=10).decode("png", raw)
    np.testing.assert_array_equal(planes.permute(1, 2, 0), ours)


def test_reducing_while_decoding_is_close_to_a_resize_of_the_whole_image() -> None:
    image = noise(640, 480, block=24)
    raw = encoded(image, "JPEG", quality=95)
    for edge in (200, 100, 50):
        ours = SampleDecoder(image_decode="rgb8", image_size=edge).decode("jpg", raw)
        size = ours.shape[1::-1]
        whole = np.asarray(Image.open(io.BytesIO(raw)).resize(size, Image.Resampling.BICUBIC))
        assert np.abs(ours.astype(int) - whole).mean() < 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (0, "shortest_edge=0 must be a whole number of pixels above 0"),
        (-1, "shortest_edge=-1"),
        (True, "shortest_edge=True"),
        (22.5, "shortest_edge=22.5"),
        ("448", "shortest_edge='448'"),
        ((224, 224), r"shortest_edge=\(224, 224\)"),
        ({}, "must have one of shortest_edge, longest_edge, max_pixels"),
        ({"shortest": 448}, "'shortest' is not one of .*Did you mean 'shortest_edge'"),
        ({"longest_edge": None}, "longest_edge=None"),
        ({"max_pixels": 0.5}, "max_pixels=0.5"),
    ],
)
def test_a_size_that_is_none_is_refused(wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleDecoder(image_size=wanted)


def test_a_size_of_images_that_are_not_decoded_is_refused() -> None:
    with pytest.raises(ValueError, match="no effect with image_decode='bytes'"):
        SampleDecoder(image_decode="bytes", image_size=4)


def test_a_decoder_with_a_size_is_comparable_picklable_and_made_of_its_settings() -> None:
    decoder = SampleDecoder(image_size={"longest_edge": 9})
    copy = pickle.loads(pickle.dumps(decoder))
    assert copy == decoder
    assert hash(copy) == hash(decoder)
    assert decoder != SampleDecoder(image_size={"shortest_edge": 9})
    assert SampleDecoder(image_size=9) == SampleDecoder(image_size={"shortest_edge": 9})
    of_numpy = SampleDecoder(image_size={"longest_edge": np.int64(9)})
    assert json.dumps(of_numpy.config()) == json.dumps(decoder.config())
    config = json.loads(json.dumps(decoder.config()))
    assert config["image_size"] == {"longest_edge": 9}
    assert SampleDecoder(**config) == decoder
    assert "image_size" not in SampleDecoder().config()  # so that older states are restored
    assert copy.decode("png", encoded(noise(20, 10), "PNG")).shape == (3, 4, 9)


def test_limits_of_bytes_count_the_reduced_image_only() -> None:
    raw = encoded(noise(400, 400), "JPEG")
    decoder = SampleDecoder(image_decode="rgb8", max_bytes=50_000, image_size=100)
    assert decoder.decode("jpg", raw).shape == (100, 100, 3)
    with pytest.raises(DecodingError, match="400 x 400 pixels"):
        SampleDecoder(image_decode="rgb8", max_bytes=50_000).decode("jpg", raw)
