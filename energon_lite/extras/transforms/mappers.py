"""Transforms of torchvision as matrices: `*Mapper` classes, one for each that can be merged.

torchvision itself is never imported: the random numbers come from the `get_params` of the
transforms that the user made, so they are those that torchvision draws from torch's generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.extras.transforms.warp import INTERPOLATIONS, Matrix, size_of, warp

Size = npt.NDArray[np.int64]
Applied = tuple[Matrix, Size, Any]


class TransformMapper:
    """The effect of a transform on the matrix and the size of a warp.

    Args:
        transform: the transform of torchvision, of `torchvision.transforms` or its `v2`.

    Attributes:
        source_type: name of the class in torchvision.
    """

    source_type: ClassVar[str] = ""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __call__(self, sample: Any) -> Any:
        """Returns the image after this transform alone."""
        return apply_mappers([self], sample)

    @staticmethod
    def translate(x: float, y: float) -> Matrix:
        """Returns the matrix that moves by (x, y) pixels."""
        return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], dtype=np.float64)

    @staticmethod
    def rotate(angle: float) -> Matrix:
        """Returns the matrix that rotates counter-clockwise around (0, 0). `[Unit: radian]`."""
        cos, sin = math.cos(angle), math.sin(angle)
        return np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]], dtype=np.float64)

    @staticmethod
    def scale(x: float, y: float) -> Matrix:
        """Returns the matrix that stretches by the factors x and y."""
        return np.diag([x, y, 1.0])

    @staticmethod
    def shear(x: float, y: float) -> Matrix:
        """Returns the matrix that shears by the factors x and y."""
        return np.array([[1, x, 0], [y, 1, 0], [0, 0, 1]], dtype=np.float64)

    @staticmethod
    def hflip() -> Matrix:
        """Returns the matrix that mirrors at the left edge."""
        return np.diag([-1.0, 1, 1])

    @staticmethod
    def vflip() -> Matrix:
        """Returns the matrix that mirrors at the upper edge."""
        return np.diag([1.0, -1, 1])

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform to a warp.

        Args:
            matrix: shape (3, 3); maps positions (x, y, 1) in the image to positions in the result
                so far.
            dst_size: height and width of the result so far.

        Returns:
            The matrix and the size after the transform, and its parameters, for people.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no apply_transform")

    def fill(self) -> float | tuple[float, ...] | None:
        """Returns what the transform shows beyond the edges; None where it does not matter."""
        fill = getattr(self.transform, "fill", None)
        if fill is None or isinstance(fill, int | float):
            return fill
        if isinstance(fill, Sequence) and not isinstance(fill, str):
            return tuple(fill)
        raise ValueError(
            f"{self.source_type}: fill={fill!r} is neither a number nor a list of them"
        )

    def interpolation(self) -> Any:
        """Returns the interpolation of the transform; None where it does not matter."""
        return getattr(self.transform, "interpolation", None)


class CustomTransform(TransformMapper):
    """Base class of a transform of one's own, for `MergeTransform`.

    Implement `apply_transform(matrix, dst_size)`, and the transform is merged with its neighbours.
    Or implement `__call__(image)`, and it is applied by itself.
    """


class ResizeMapper(TransformMapper):
    """`Resize`."""

    source_type = "Resize"

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform."""
        new = self._new_size(*map(int, dst_size))
        factor = self.scale(new[1] / dst_size[1], new[0] / dst_size[0])
        return factor @ matrix, np.array(new), (self.source_type, new)

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        size, longest = self.transform.size, self.transform.max_size
        sides = [size] if isinstance(size, int) else list(size or ())
        if len(sides) == 2:
            return int(sides[0]), int(sides[1])
        short, long = sorted((height, width))
        if sides:
            new_short, new_long = int(sides[0]), int(sides[0] * long / short)
        if not sides or (longest is not None and new_long > longest):
            new_short, new_long = int(longest * short / long), int(longest)
        return (new_short, new_long) if height <= width else (new_long, new_short)


class RandomResizedCropMapper(TransformMapper):
    """`RandomResizedCrop`."""

    source_type = "RandomResizedCrop"

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform, with a box at random."""
        own = self.transform
        box = own.get_params(_blank(dst_size), list(own.scale), list(own.ratio))
        top, left, height, width = box
        new = np.array([int(side) for side in own.size])
        moved = self.translate(-left, -top) @ matrix
        return self.scale(new[1] / width, new[0] / height) @ moved, new, (self.source_type, box)


class RandomCropMapper(TransformMapper):
    """`RandomCrop`, with its padding by a constant."""

    source_type = "RandomCrop"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        if self._pads() and transform.padding_mode != "constant":
            raise ValueError(
                f"RandomCrop: padding_mode={transform.padding_mode!r} cannot be merged; use "
                "'constant', or apply the transform before MergeTransform"
            )

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform, with a box at random."""
        own = self.transform
        wanted = np.array([int(side) for side in own.size])
        padding = own.padding if own.padding is not None else 0
        sides = [padding] if isinstance(padding, int) else list(padding)
        left, top, right, bottom = sides * (4 // len(sides))
        if ".v2" in type(own).__module__ and len(sides) == 4:  # which has another order
            top, right = right, top
        padded = dst_size + np.array([top + bottom, left + right])
        if own.pad_if_needed:
            missing = np.maximum(wanted - padded, 0)
            top, left = top + int(missing[0]), left + int(missing[1])
            padded = padded + 2 * missing
        i, j, height, width = own.get_params(_blank(padded), tuple(wanted.tolist()))
        moved = self.translate(left - j, top - i) @ matrix
        parameters = (self.source_type, (i - top, j - left, height, width))
        return moved, np.array([height, width]), parameters

    def fill(self) -> float | tuple[float, ...] | None:
        """Returns the color of the padding; None without padding."""
        return super().fill() if self._pads() else None

    def _pads(self) -> bool:
        return bool(self.transform.padding) or bool(self.transform.pad_if_needed)


class CenterCropMapper(TransformMapper):
    """`CenterCrop`; an image that is too small gets black edges."""

    source_type = "CenterCrop"

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform."""
        size = self.transform.size
        sides = [size] if isinstance(size, int) else list(size)
        new = [int(side) for side in sides * (2 // len(sides))]
        top, left = map(_offset_of_centre, map(int, dst_size), new)
        moved = self.translate(-left, -top) @ matrix
        return moved, np.array(new), (self.source_type, (top, left, *new))


class RandomHorizontalFlipMapper(TransformMapper):
    """`RandomHorizontalFlip`."""

    source_type = "RandomHorizontalFlip"

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform, or nothing, at random."""
        is_flipped = _by_chance(self.transform.p)
        if is_flipped:
            matrix = self.translate(dst_size[1], 0) @ self.hflip() @ matrix
        return matrix, dst_size, (self.source_type, is_flipped)


class RandomVerticalFlipMapper(TransformMapper):
    """`RandomVerticalFlip`."""

    source_type = "RandomVerticalFlip"

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform, or nothing, at random."""
        is_flipped = _by_chance(self.transform.p)
        if is_flipped:
            matrix = self.translate(0, dst_size[0]) @ self.vflip() @ matrix
        return matrix, dst_size, (self.source_type, is_flipped)


class RandomRotationMapper(TransformMapper):
    """`RandomRotation`."""

    source_type = "RandomRotation"

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform, with an angle at random."""
        own = self.transform
        angle = own.get_params(own.degrees)
        height, width = map(int, dst_size)
        x, y = (width / 2, height / 2) if own.center is None else own.center
        turn = self.translate(x, y) @ self.rotate(math.radians(angle)) @ self.translate(-x, -y)
        if own.expand:
            corners = turn @ [[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]]
            corners = np.round(corners, 4)  # no row of pixels for an error of rounding
            new_width, new_height, _ = np.ceil(corners.max(axis=1)) - np.floor(corners.min(axis=1))
            turn = self.translate((new_width - width) / 2, (new_height - height) / 2) @ turn
            dst_size = np.array([int(new_height), int(new_width)])
        return turn @ matrix, dst_size, (self.source_type, angle)


class RandomPerspectiveMapper(TransformMapper):
    """`RandomPerspective`."""

    source_type = "RandomPerspective"

    @staticmethod
    def compute_homography(
        startpoints: Sequence[Sequence[int]], endpoints: Sequence[Sequence[int]]
    ) -> Matrix:
        """Returns the matrix that maps four points to four others."""
        rows, wanted = [], []
        for (x, y), (u, v) in zip(startpoints, endpoints, strict=True):
            rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
            wanted += [u, v]
        solved = np.linalg.lstsq(np.array(rows, np.float64), np.array(wanted, np.float64))[0]
        return np.append(solved, 1.0).reshape(3, 3)

    def apply_transform(self, matrix: Matrix, dst_size: Size) -> Applied:
        """Adds the transform with corners at random, or nothing, at random."""
        own = self.transform
        if not _by_chance(own.p):
            return matrix, dst_size, (self.source_type, None)
        height, width = map(int, dst_size)
        points = own.get_params(width, height, own.distortion_scale)
        return self.compute_homography(*points) @ matrix, dst_size, (self.source_type, *points)


MAPPERS = {
    mapper.source_type: mapper for mapper in TransformMapper.__subclasses__() if mapper.source_type
}


def _blank(size: Size) -> torch.Tensor:
    """Returns an image without content, for functions of torchvision that ask for its size."""
    return torch.empty((1, *map(int, size)), device="meta")


def _by_chance(p: float) -> bool:
    return bool(torch.rand(1) < p)


def _offset_of_centre(side: int, new: int) -> int:
    """Returns where a crop begins, as torchvision rounds it: also of what it pads."""
    return -((new - side) // 2) if new > side else round((side - new) / 2)


def common_value(mappers: Sequence[TransformMapper], name: str) -> Any:
    """Returns the `fill` or `interpolation` that all transforms have; None if it is in none.

    Raises:
        ValueError: Two transforms have different values.
    """
    found: dict[Any, str] = {}
    for mapper in mappers:
        value = getattr(mapper, name)()
        value = getattr(value, "value", value)  # the text of an InterpolationMode
        if value is not None:
            found.setdefault(value, mapper.source_type or type(mapper).__name__)
    if len(found) > 1:
        (first, owner), (second, other), *_ = found.items()
        raise ValueError(
            f"MergeTransform: {owner} has {name}={first!r} and {other} has {name}={second!r}, but "
            f"one warp has one {name}; give both the same"
        )
    common = next(iter(found), None)
    if name == "interpolation" and common not in (None, *INTERPOLATIONS):
        raise ValueError(
            f"MergeTransform: interpolation={common!r} cannot be merged; use one of "
            f"{', '.join(INTERPOLATIONS)}"
        )
    return common


def apply_mappers(mappers: Sequence[TransformMapper], image: Any) -> Any:
    """Returns an image after transforms that are merged into one warp."""
    size = np.array(size_of(image))
    matrix = np.eye(3)
    for mapper in mappers:
        matrix, size, _ = mapper.apply_transform(matrix, size)
    interpolation = common_value(mappers, "interpolation") or "bilinear"
    fill = common_value(mappers, "fill") or 0
    return warp(image, matrix, (int(size[0]), int(size[1])), interpolation, fill)
