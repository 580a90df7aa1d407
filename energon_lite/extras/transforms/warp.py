"""Draws a PIL image or a tensor through one matrix, antialiased where the image shrinks.

Positions are (x, y, 1), in pixels, where the corner of the first pixel is (0, 0, 1) and its centre
(0.5, 0.5, 1). A matrix of shape (3, 3) maps positions in the image to positions in the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn import functional as F

Matrix = npt.NDArray[np.float64]

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "nearest-exact": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
INTERPOLATIONS = tuple(_RESAMPLING)
_TINY = 1e-6  # of a pixel; what rounding makes of whole numbers


def size_of(image: Any) -> tuple[int, int]:
    """Returns height and width of a PIL image, or of a tensor of shape (..., H, W).

    Raises:
        TypeError: The image is neither.
    """
    if isinstance(image, Image.Image):
        return image.height, image.width
    if isinstance(image, torch.Tensor) and image.ndim >= 2:
        return int(image.shape[-2]), int(image.shape[-1])
    shape = f" of shape {tuple(image.shape)}" if hasattr(image, "shape") else ""
    raise TypeError(
        f"{type(image).__name__}{shape} is neither a PIL image nor a tensor of shape (..., H, W); "
        "convert it first"
    )


def warp(
    image: Any,
    matrix: Matrix,
    size: tuple[int, int],
    interpolation: str = "bilinear",
    fill: float | tuple[float, ...] = 0,
) -> Any:
    """Draws an image through a matrix.

    A matrix that only cuts, scales and flips needs no warp: the box of the image that it shows is
    resized. Otherwise an image that shrinks is first made smaller with antialiasing, then warped.

    Args:
        image: PIL image, or tensor of shape (..., C, H, W).
        matrix: positions in the image -> positions in the result.
        size: height and width of the result.
        interpolation: one of `INTERPOLATIONS`.
        fill: what is shown beyond the edges of the image: a number, or one for each channel.

    Returns:
        An image of the same kind, mode or dtype.

    Raises:
        ValueError: The matrix cannot be inverted, or `fill` does not fit the channels.
    """
    old_size = size_of(image)
    inverse = _inverse(matrix)
    box = _shown_box(inverse, old_size, size)
    if box is not None:
        shown = _box_resized(image, box, size, interpolation)
        if shown is not None:
            return _flipped(shown, bool(inverse[0, 0] < 0), bool(inverse[1, 1] < 0))
    if "nearest" not in interpolation:
        small = _size_on_screen(matrix, inverse, old_size, size)
        if small != old_size:
            whole = np.array([0, 0, old_size[1], old_size[0]], dtype=np.float64)
            image = _box_resized(image, whole, small, interpolation)
            shrinking: Matrix = np.diag([small[1] / old_size[1], small[0] / old_size[0], 1.0])
            inverse = shrinking @ inverse
    is_picture = isinstance(image, Image.Image)
    num_channels = len(image.getbands()) if is_picture else [1, *image.shape[:-2]][-1]
    values = fill if isinstance(fill, tuple) else (fill,)
    values = values * num_channels if len(values) == 1 else values
    if len(values) != num_channels:
        raise ValueError(f"fill {fill} has {len(values)} values for {num_channels} channels")
    draw = _warp_picture if is_picture else _warp_tensor
    return draw(image, inverse, size, interpolation, values)


def _inverse(matrix: Matrix) -> Matrix:
    try:
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        raise ValueError(
            f"the transforms make a line or a point of the image: matrix {matrix.tolist()}"
        ) from None
    normed: Matrix = inverse / inverse[2, 2]
    return normed


def _shown_box(inverse: Matrix, old_size: tuple[int, int], size: tuple[int, int]) -> Matrix | None:
    """Returns (left, top, right, bottom) of what the result shows of the image.

    None where the result shows more than the image, or where the matrix does more than cut, scale
    and flip.
    """
    if np.abs([inverse[0, 1], inverse[1, 0], *inverse[2, :2]]).max() > _TINY / max(*size, 1):
        return None
    first = inverse[:2, 2]
    last = first + np.diag(inverse)[:2] * [size[1], size[0]]
    box = np.concatenate([np.minimum(first, last), np.maximum(first, last)])
    whole = np.round(box)
    box = np.where(np.abs(box - whole) < _TINY, whole, box)
    is_inside = box[0] >= 0 and box[1] >= 0 and box[2] <= old_size[1] and box[3] <= old_size[0]
    return box if is_inside else None


def _size_on_screen(
    matrix: Matrix, inverse: Matrix, old_size: tuple[int, int], size: tuple[int, int]
) -> tuple[int, int]:
    """Returns the size that the image has in the centre of the result, if that is smaller."""
    x, y, scale = matrix @ (centre := inverse @ [size[1] / 2, size[0] / 2, 1]) / centre[2]
    slope = (matrix[:2, :2] - np.outer([x, y], matrix[2, :2]) / scale) / scale
    factors = np.minimum(np.linalg.norm(slope, axis=0), 1)
    return (
        max(1, round(old_size[0] * float(factors[1]))),
        max(1, round(old_size[1] * float(factors[0]))),
    )


def _box_resized(image: Any, box: Matrix, size: tuple[int, int], interpolation: str) -> Any:
    """Cuts a box out of an image, and resizes it; None for a tensor and a box between pixels."""
    is_whole = bool((box == np.round(box)).all())
    left, top, right, bottom = (int(number) for number in box)
    is_same_size = is_whole and (bottom - top, right - left) == size
    if isinstance(image, Image.Image):
        if is_whole:  # the pixels beside the box have no influence, as if it was cut out before
            image = image.crop((left, top, right, bottom))
        resampling = _RESAMPLING[interpolation]
        area = None if is_whole else tuple(box.tolist())
        return image if is_same_size else image.resize((size[1], size[0]), resampling, area)
    if not is_whole:
        return None
    image = image[..., top:bottom, left:right]
    if is_same_size:
        return image
    is_smooth = "nearest" not in interpolation
    pixels = F.interpolate(
        _as_float(image).reshape(1, -1, *image.shape[-2:]),
        size,
        mode=interpolation,
        align_corners=False if is_smooth else None,
        antialias=is_smooth,
    )
    return _as_dtype(pixels.reshape(*image.shape[:-2], *size), image.dtype)


def _flipped(image: Any, is_mirrored: bool, is_upside_down: bool) -> Any:
    if isinstance(image, Image.Image):
        if is_mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if is_upside_down else image
    axes = [-1] * is_mirrored + [-2] * is_upside_down
    return image.flip(axes) if axes else image


def _warp_picture(
    image: Image.Image,
    inverse: Matrix,
    size: tuple[int, int],
    interpolation: str,
    fill: tuple[float, ...],
) -> Image.Image:
    color = fill if image.mode == "F" else tuple(map(int, fill))
    is_affine = np.abs(inverse[2, :2]).max() < 1e-12
    return image.transform(
        (size[1], size[0]),
        Image.Transform.AFFINE if is_affine else Image.Transform.PERSPECTIVE,
        inverse.ravel()[: 6 if is_affine else 8].tolist(),
        _RESAMPLING[interpolation],
        fillcolor=color if len(color) > 1 else color[0],
    )


def _warp_tensor(
    image: torch.Tensor,
    inverse: Matrix,
    size: tuple[int, int],
    interpolation: str,
    fill: tuple[float, ...],
) -> torch.Tensor:
    height, width = size_of(image)
    x, y = np.meshgrid(np.arange(size[1]) + 0.5, np.arange(size[0]) + 0.5)
    places = np.stack([x, y, np.ones_like(x)], axis=-1) @ inverse.T
    depth = places[..., 2:]
    # Behind the horizon of a perspective there is no image.
    places = np.where(depth > 0, places[..., :2] / np.where(depth > 0, depth, 1), -2 * width)
    grid = torch.from_numpy(places * [2 / width, 2 / height] - 1)
    beyond = _as_float(torch.as_tensor(fill, device=image.device)).reshape(-1, 1, 1)
    beyond = beyond if image.ndim > 2 else beyond[0]
    # Beyond the edges, grid_sample sees zeros: `fill`, after it is subtracted and added again.
    pixels = _as_float(image) - beyond
    drawn = F.grid_sample(
        pixels.reshape(1, -1, height, width),
        grid.to(pixels)[None],
        mode=interpolation.removesuffix("-exact"),
        padding_mode="zeros",
        align_corners=False,
    )
    return _as_dtype(drawn.reshape(*image.shape[:-2], *size) + beyond, image.dtype)


def _as_float(image: torch.Tensor) -> torch.Tensor:
    return image if image.dtype in (torch.float32, torch.float64) else image.to(torch.float32)


def _as_dtype(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point and dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        pixels = pixels.round().clamp(limits.min, limits.max)
    return pixels.to(dtype)
