"""`MergeTransform` without torchvision: the warp itself, transforms of one's own, errors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite.extras.transforms import (
    CustomTransform,
    MergeTransform,
    RandomRotationMapper,
    ResizeMapper,
    TransformMapper,
)
from energon_lite.extras.transforms.warp import warp


def picture(height=12, width=20, channels=3):
    """Smooth, so that ways to interpolate agree; no two rows or columns are the same."""
    y, x = np.mgrid[:height, :width]
    planes = [(7 * x + 3 * y) % 256, (40 + 5 * y) % 256, (200 - 4 * x) % 256][:channels]
    return torch.from_numpy(np.stack(planes).astype(np.uint8))


def pil(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def pixels(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


class Double(CustomTransform):
    def __call__(self, image):
        return 2 * image


class Shift(CustomTransform):
    def __init__(self, x, y):
        super().__init__()
        self.by = x, y

    def apply_transform(self, matrix, dst_size):
        return self.translate(*self.by) @ matrix, dst_size, self.by


class Turn(CustomTransform):
    """Rotates around the centre; the angle is drawn from torch's generator."""

    def apply_transform(self, matrix, dst_size):
        angle = float(torch.rand(1))
        y, x = dst_size / 2
        turn = self.translate(x, y) @ self.rotate(angle) @ self.translate(-x, -y)
        return turn @ matrix, dst_size, angle


def test_functions_follow_each_other():
    assert MergeTransform([Double(), lambda image: image + 1])(5) == 11


@pytest.mark.parametrize("kind", ["tensor", "pil"])
def test_whole_pixels_are_moved_exactly(kind):
    image = picture()
    shifted = MergeTransform([Shift(3, 0), Shift(0, -2)])(image if kind == "tensor" else pil(image))
    shifted = shifted if kind == "tensor" else pixels(shifted)
    assert shifted.dtype == torch.uint8
    assert shifted[:, :-2, 3:].equal(image[:, 2:, :-3])
    assert not shifted[:, -2:].any()
    assert not shifted[:, :, :3].any()


@pytest.mark.parametrize("axis", [0, 1])
def test_flips_are_exact(axis):
    image, matrix = picture(), np.eye(3)
    matrix[axis, axis], matrix[axis, 2] = -1, image.shape[2 - axis]
    size = (image.shape[1], image.shape[2])
    assert warp(image, matrix, size).equal(image.flip(2 - axis))
    assert pixels(warp(pil(image), matrix, size)).equal(image.flip(2 - axis))


def test_nothing_is_shown_behind_the_horizon_of_a_perspective():
    inverse = np.array([[-1, 0, 5], [0, -1, 0], [-0.1, 0, 1.0]])  # the horizon is at x = 10
    image = torch.ones((1, 12, 20))
    drawn = warp(image, np.linalg.inv(inverse), (12, 30), "nearest")
    assert not drawn[..., 10:].any()


@pytest.mark.parametrize("angle", [0.1, 0.5, 2.0])
def test_turns_that_cancel_return_the_image(angle):
    turn = TransformMapper.rotate(angle)
    for image in (picture(), pil(picture())):
        assert np.array_equal(warp(image, turn @ np.linalg.inv(turn), (12, 20)), image)


def test_pictures_and_tensors_look_the_same():
    image = picture(40, 60)
    torch.manual_seed(3)
    tensor = MergeTransform([Turn(), Turn()])(image)
    torch.manual_seed(3)
    drawn = pixels(MergeTransform([Turn(), Turn()])(pil(image)))
    assert tensor.shape == drawn.shape
    inner = (tensor.int() - drawn.int())[:, 12:-12, 16:-16].abs()
    assert inner.float().mean() < 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_leading_dimensions_stay(dtype):
    image = picture().to(dtype).expand(2, 4, -1, -1, -1)
    for transforms in ([Turn()], [ResizeMapper(SimpleNamespace(size=(6, 10), max_size=None))]):
        result = MergeTransform(transforms)(image)
        assert result.dtype == dtype
        assert result.shape[:3] == (2, 4, 3)
    assert MergeTransform([Turn()])(picture()[0]).shape == (12, 20)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "F", "I;16"])
def test_mode_of_a_picture_stays(mode):
    turned = MergeTransform([Turn()])(pil(picture()).convert(mode))
    assert (turned.mode, turned.size) == (mode, (20, 12))


def test_fill_is_shown_beyond_the_edges():
    matrix = TransformMapper.translate(5.5, 0)
    image = picture()
    assert (warp(image, matrix, (12, 20), fill=(9, 8, 7))[:, 0, 0] == torch.tensor([9, 8, 7])).all()
    assert warp(pil(image), matrix, (12, 20), fill=(9, 8, 7)).getpixel((0, 0)) == (9, 8, 7)
    assert warp(pil(image), matrix, (12, 20), fill=9).getpixel((0, 0)) == (9, 9, 9)
    for kind in (image, pil(image)):
        with pytest.raises(ValueError, match=r"fill \(1, 2\)"):
            warp(kind, matrix, (12, 20), fill=(1, 2))


def test_an_image_that_shrinks_is_antialiased_also_when_it_turns():
    """A fine chequerboard becomes grey; without antialiasing it becomes stripes."""
    board = (torch.arange(200)[:, None] + torch.arange(200)) % 2 * 255
    board = board.to(torch.uint8).expand(3, -1, -1).contiguous()
    shrink = ResizeMapper(SimpleNamespace(size=(50, 50), max_size=None))
    for image in (board, pil(board)):
        small = MergeTransform([shrink, Turn()])(image)
        inner = small if torch.is_tensor(small) else pixels(small)
        inner = inner[:, 15:35, 15:35].float()
        assert (inner.mean() - 127.5).abs() < 2
        assert inner.std() < 3


class Nothing(CustomTransform):
    pass


class Flat(CustomTransform):
    def apply_transform(self, matrix, dst_size):
        return self.scale(0, 1) @ matrix, dst_size, ()


def resize(interpolation):
    return ResizeMapper(SimpleNamespace(size=4, max_size=None, interpolation=interpolation))


def turn(fill):
    return RandomRotationMapper(SimpleNamespace(interpolation="nearest", fill=fill))


@pytest.mark.parametrize(
    ("transforms", "image", "error", "words"),
    [
        ([Double(), Nothing()], None, NotImplementedError, "Nothing: implement apply_transform"),
        ([5], None, TypeError, "5 is no function of an image"),
        ([resize("bilinear"), turn(0)], None, ValueError,
         "Resize has interpolation='bilinear' and RandomRot"),
        ([turn(0), turn([1, 2, 3])], None, ValueError,
         r"has fill=0 and RandomRotation has fill=\(1, 2, 3\)"),
        ([resize("lanczos")], None, ValueError,
         "'lanczos' cannot be merged; use one of nearest"),
        *(([Turn()], image, TypeError, "neither a PIL image nor a tensor")
          for image in (5, np.zeros((4, 4, 3)), torch.zeros(4))),
        ([Flat()], picture(), ValueError, "a line or a point"),
    ],
)  # fmt: skip
def test_refusals(transforms, image, error, words):
    with pytest.raises(error, match=words):
        MergeTransform(transforms)(image)


def test_two_warps_may_have_different_interpolations():
    MergeTransform([resize("bilinear"), lambda image: image, turn(0)])
