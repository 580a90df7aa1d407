"""`MergeTransform` against the transforms of torchvision, applied one after the other."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite.extras.transforms import MergeTransform

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    from torchvision import transforms as v1
    from torchvision.transforms import v2

LINEAR, NEAREST = v1.InterpolationMode.BILINEAR, v1.InterpolationMode.NEAREST
CUBIC = v1.InterpolationMode.BICUBIC


def picture(kind, height=96, width=128):
    y, x = np.mgrid[:height, :width] / 24
    planes = [np.sin(x + k) * np.cos(y * (1 + k / 3)) for k in range(3)]
    image = ((np.stack(planes) + 1) * 127).astype(np.uint8)
    if kind == "pil":
        return Image.fromarray(image.transpose(1, 2, 0).copy())
    tensor = torch.from_numpy(image)
    return tensor if kind == "uint8" else tensor / 255


def pixels(image):
    """Shape (C, H, W), values 0..255."""
    if isinstance(image, Image.Image):
        return np.asarray(image).transpose(2, 0, 1).astype(float)
    return image.double().numpy() * (1 if image.dtype == torch.uint8 else 255)


def compare(transforms, image, seed):
    """Largest and mean difference from torchvision, also of the random numbers left over."""
    torch.manual_seed(seed)
    merged = MergeTransform(transforms)(image)
    left = torch.rand(3)
    torch.manual_seed(seed)
    wanted = image
    for transform in transforms:
        wanted = transform(wanted)
    assert torch.rand(3).equal(left)
    assert type(merged) is type(wanted)
    merged, wanted = pixels(merged), pixels(wanted)
    assert merged.shape == wanted.shape
    difference = np.abs(merged - wanted)
    return difference.max(), difference.mean(), difference


kinds = pytest.mark.parametrize("kind", ["pil", "uint8", "float"])
both = pytest.mark.parametrize("T", [v1, v2], ids=["v1", "v2"])

EXACT = {
    "resize down": lambda T: [T.Resize((40, 50))],
    "resize up": lambda T: [T.Resize((140, 250))],
    "resize the short side": lambda T: [T.Resize(48)],
    "resize up to a longest side": lambda T: [T.Resize(90, max_size=100)],
    "resize bicubic": lambda T: [T.Resize((40, 50), CUBIC)],
    "crop": lambda T: [T.RandomCrop((40, 50))],
    "crop with padding": lambda T: [T.RandomCrop((90, 120), padding=9, fill=77)],
    "crop with four paddings": lambda T: [T.RandomCrop(60, padding=[1, 2, 30, 40])],
    "crop padded if needed": lambda T: [T.RandomCrop((150, 100), pad_if_needed=True)],
    "centre": lambda T: [T.CenterCrop((41, 51))],
    "centre larger": lambda T: [T.CenterCrop((121, 151))],
    "centre in one axis larger": lambda T: [T.CenterCrop((121, 51))],
    "resized crop": lambda T: [T.RandomResizedCrop(32)],
    "flips": lambda T: [T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    "resized crop and flip": lambda T: [T.RandomResizedCrop((32, 40)), T.RandomHorizontalFlip()],
    "resize and centre": lambda T: [T.Resize(48), T.CenterCrop(48)],
    "perspective that is not applied": lambda T: [T.RandomPerspective(p=0)],
}


@kinds
@both
@pytest.mark.parametrize("name", EXACT)
def test_what_needs_one_interpolation_is_the_same(name, T, kind):
    for seed in range(6):
        largest, mean, _ = compare(EXACT[name](T), picture(kind), seed)
        # Cuts between the pixels of a resized image are where one interpolation replaces two.
        assert largest <= 1.01 if "and" not in name else mean < 1


ONE_WARP = {
    "rotation": lambda T: [T.RandomRotation(40, LINEAR)],
    "rotation of nearest pixels": lambda T: [T.RandomRotation(40)],
    "rotation that expands": lambda T: [T.RandomRotation(40, LINEAR, expand=True)],
    "rotation around a point": lambda T: [T.RandomRotation(40, LINEAR, center=(10, 20))],
    "rotation with fill": lambda T: [T.RandomRotation(40, LINEAR, fill=[10, 200, 30])],
    "perspective": lambda T: [T.RandomPerspective(p=1)],
}


@kinds
@both
@pytest.mark.parametrize("name", ONE_WARP)
def test_one_warp_is_that_of_torchvision(name, T, kind):
    """Up to one row of pixels at the edge of the image, where tensors blend with what is beyond."""
    for seed in range(6):
        _, mean, difference = compare(ONE_WARP[name](T), picture(kind), seed)
        assert mean < 2
        assert np.quantile(difference, 0.95) <= 1.5


MERGED = {
    "resize, rotate, flip": lambda T: [
        T.Resize((72, 100)), T.RandomRotation(25, LINEAR), T.RandomHorizontalFlip()],
    "rotate, resize": lambda T: [T.RandomRotation(25, LINEAR), T.Resize((72, 100))],
    "perspective, rotate": lambda T: [T.RandomPerspective(0.2, p=1), T.RandomRotation(9, LINEAR)],
    "crop, rotate, centre": lambda T: [
        T.RandomCrop(80), T.RandomRotation(9, LINEAR), T.CenterCrop(60)],
    "all": lambda T: [
        T.Resize(90), T.RandomCrop(84), T.RandomHorizontalFlip(), T.RandomRotation(9, LINEAR),
        T.RandomPerspective(0.1, p=1), T.CenterCrop(60)],
}  # fmt: skip


@kinds
@both
@pytest.mark.parametrize("name", MERGED)
def test_merged_transforms_show_the_same_picture(name, T, kind):
    """Inside: at the edges a warp still sees what transforms one by one have cut off."""
    for seed in range(6):
        difference = compare(MERGED[name](T), picture(kind), seed)[2]
        height, width = difference.shape[1:]
        inner = difference[:, height // 4 : -height // 4, width // 4 : -width // 4]
        assert inner.mean() < 1.5


def test_one_warp_keeps_more_detail_than_two():
    """Two turns that cancel return the image; one after the other they blur it."""
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    turns = [v1.RandomRotation((30, 30), LINEAR), v1.RandomRotation((-30, -30), LINEAR)]
    blurred = turns[1](turns[0](noise))
    inner = (slice(None), slice(20, 44), slice(20, 44))
    assert (MergeTransform(turns)(noise) - noise)[inner].abs().max() < 1e-3
    assert (blurred - noise)[inner].abs().mean() > 0.05


def test_other_transforms_are_applied_between():
    steps = [v2.Resize(40), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.CenterCrop(32)]
    result = MergeTransform(steps)(picture("pil"))
    assert result.shape == (3, 32, 32)
    assert result.dtype == torch.float32


def test_a_subclass_of_a_transform_is_applied_by_itself():
    class Twice(v1.Resize):
        def forward(self, image):
            return super().forward(super().forward(image))

    merged = MergeTransform([Twice(40)])
    assert isinstance(merged.transforms[0], Twice)
    assert merged(picture("pil")).size == (53, 40)


def test_settings_that_cannot_be_merged_are_refused():
    with pytest.raises(ValueError, match="padding_mode='reflect' cannot be merged"):
        MergeTransform([v1.RandomCrop(8, padding=2, padding_mode="reflect")])
    with pytest.raises(ValueError, match="Resize has interpolation='bilinear' and RandomRotation"):
        MergeTransform([v1.Resize(8), v1.RandomRotation(8)])
    with pytest.raises(ValueError, match="larger than input image size"):
        MergeTransform([v1.RandomCrop(800)])(picture("pil"))


def test_masks_keep_their_values():
    mask = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) % 5)
    merged = MergeTransform([v1.RandomRotation(90), v1.Resize((30, 30), NEAREST)])(mask)
    assert set(np.unique(merged)) <= set(range(5))
