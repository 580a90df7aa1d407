"""The size that images are decoded to: limits of edges and pixels, which keep the proportions."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from numbers import Integral
from typing import Any, NamedTuple

import torch

from energon_lite.core.arrays import UInt8Array
from energon_lite.core.errors import did_you_mean


class ImageSize(NamedTuple):
    """The largest size of images; a larger one is made smaller, a smaller one stays as it is.

    Attributes:
        shortest_edge: Pixels of the shortest edge at most.
        longest_edge: Pixels of the longest edge at most.
        max_pixels: Pixels of the image at most.
    """

    shortest_edge: int | None = None
    longest_edge: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, wanted: ImageSize | Mapping[str, int] | int) -> ImageSize:
        """Returns the limits that the user names: a number is that of the shortest edge.

        Raises:
            ValueError: There is no such limit, or none at all, or one is no number above 0.
        """
        if isinstance(wanted, ImageSize):
            return wanted
        limits: dict[str, Any] = (
            dict(wanted) if isinstance(wanted, Mapping) else {"shortest_edge": wanted}
        )
        for name, limit in limits.items():
            if name not in cls._fields:
                hint = did_you_mean(name, cls._fields)
                raise ValueError(
                    f"image_size: {name!r} is not one of {', '.join(cls._fields)}.{hint}"
                )
            if isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1:
                raise ValueError(
                    f"image_size: {name}={limit!r} must be a whole number of pixels above 0"
                )
        if not limits:
            raise ValueError(f"image_size={wanted!r} must have one of {', '.join(cls._fields)}")
        return cls(**{name: int(limit) for name, limit in limits.items()})

    def config(self) -> dict[str, int]:
        """Returns the limits that are set."""
        return {name: limit for name, limit in self._asdict().items() if limit is not None}

    def of_image(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image within all limits, rounded down, 1 at least.

        Example:
            >>> ImageSize(shortest_edge=448).of_image(4000, 3000)
            (597, 448)
        """
        sizes = [(width, height)]
        for edge, limit in (
            (min(width, height), self.shortest_edge),
            (max(width, height), self.longest_edge),
        ):
            if limit is not None and limit < edge:
                sizes.append((max(1, width * limit // edge), max(1, height * limit // edge)))
        limit = self.max_pixels
        if limit is not None and limit < width * height:
            # One edge has 1 pixel where an image is very long: the other one gets the rest.
            narrow = max(1, isqrt(limit * width // height)), max(1, isqrt(limit * height // width))
            sizes.append((min(narrow[0], limit), min(narrow[1], limit)))
        return min(sizes, key=lambda size: size[0] * size[1])


def reduction(size: tuple[int, int], target: tuple[int, int]) -> int:
    """Returns 8, 4, 2 or 1: by how much a JPEG may be made smaller while it is decoded.

    Args:
        size: of the image.
        target: what it becomes; the reduced image is not smaller.
    """
    for factor in (8, 4, 2):
        if all(t <= -(-s // factor) and factor <= s for s, t in zip(size, target, strict=True)):
            return factor
    return 1


def resized(
    pixels: UInt8Array, size: tuple[int, int], target: tuple[int, int], factor: int
) -> UInt8Array:
    """Returns an image of another size: bicubic and antialiased.

    Args:
        pixels: shape (H, W) or (H, W, C); may be written to.
        size: width and height of the image as it is stored.
        target: width and height of the result.
        factor: by which it was reduced already. The edges of a reduced image may be up to a pixel
            beyond those of the stored one, and this part is not seen.
    """
    if target[0] * factor == size[0] and target[1] * factor == size[1]:
        return pixels
    image = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None])
    # As `interpolate(antialias=True)`, which takes the scales of the two edges from their pixels.
    scaled = torch.ops.aten._upsample_bicubic2d_aa(
        image.permute(2, 0, 1)[None],
        (target[1], target[0]),
        False,
        target[1] * factor / size[1],
        target[0] * factor / size[0],
    )
    values: UInt8Array = scaled[0].permute(1, 2, 0).numpy()
    return values if pixels.ndim == 3 else values[..., 0]
