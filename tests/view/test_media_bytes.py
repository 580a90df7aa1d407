"""Pictures of any kind become files that a browser draws; recordings stay as they are."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite import AVDecoder
from energon_lite.core.errors import DecodingError
from energon_lite.extras.view.media_bytes import av_bytes, picture_bytes

from ..conftest import jpeg


def opened(value, longest_edge=None):
    raw, kind = picture_bytes(value, longest_edge)
    image = Image.open(io.BytesIO(raw))
    assert kind == f"image/{image.format.lower()}"
    return image


def test_a_file_that_browsers_draw_stays_as_it_is():
    assert picture_bytes(jpeg(7)) == (jpeg(7), "image/jpeg")
    tiff = io.BytesIO()
    Image.new("CMYK", (5, 4)).save(tiff, "TIFF")
    assert opened(tiff.getvalue()).format == "PNG"


def test_tensors_and_arrays_have_their_pixels():
    picture = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8)
    assert np.array_equal(np.asarray(opened(picture)), picture.movedim(0, -1).numpy())
    assert np.array_equal(np.asarray(opened(picture / 255)), picture.movedim(0, -1).numpy())
    assert np.array_equal(np.asarray(opened(picture[:1])), picture[0].numpy())
    assert opened(torch.zeros(4, 2, 2).half()).mode == "RGBA"
    assert opened(np.zeros((4, 5), np.uint8)).mode == "L"
    assert opened(Image.new("1", (5, 4))).mode == "RGB"


def test_normalised_pictures_reach_from_black_to_white():
    for value in (torch.tensor([-2.0, 0.25, 2.5]), torch.tensor([0.0, 127.5, 255.0])):
        pixels = np.asarray(opened(value.reshape(1, 1, 3)))
        assert pixels.tolist() in ([[0, 127, 255]], [[0, 128, 255]])
    odd = torch.tensor([float("nan"), float("inf"), 0.5]).reshape(1, 1, 3)
    assert np.asarray(opened(odd)).shape == (1, 3)


def test_thumbnails_have_a_longest_edge():
    assert opened(jpeg(1, (3000, 2000)), 60).size == (60, 40)
    assert opened(jpeg(1, (300, 100)), 60).size == (60, 20)
    assert opened(torch.zeros(3, 300, 100), 60).size == (20, 60)
    assert opened(torch.zeros(4, 10, 10), 60).size == (10, 10)


def test_large_tensors_are_compressed():
    assert opened(torch.zeros(3, 600, 600)).format == "JPEG"


def test_what_is_no_picture_is_an_error():
    with pytest.raises(DecodingError):
        picture_bytes(b"\xff\xd8\xff broken", 60)


def test_recordings_are_as_stored_and_no_path_is_read(tmp_path):
    pytest.importorskip("av")
    assert av_bytes(b"fLaC....") == (b"fLaC....", "audio/flac")
    assert av_bytes(AVDecoder(io.BytesIO(b"....ftypisom")))[1] == "video/mp4"
    (tmp_path / "x.mp4").write_bytes(b"secret")
    for value in (AVDecoder(str(tmp_path / "x.mp4")), None):
        with pytest.raises(ValueError, match="no bytes to play"):
            av_bytes(value)
