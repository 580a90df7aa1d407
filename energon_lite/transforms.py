"""Image transforms under Energon's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class CustomTransform:
    """Base class of a transform of one's own, for `MergeTransform`: implement `__call__`.

    Energon's is a method `apply_transform(matrix, dst_size)`, which changes the matrix of a warp;
    that is not in this version.
    """

    def __call__(self, image: Any) -> Any:
        """Returns the transformed image.

        Raises:
            NotImplementedError: The subclass has no `__call__`.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__}: apply_transform(matrix, dst_size) is not in this version. "
            "Implement __call__(image), which returns the transformed image."
        )


class MergeTransform:
    """Applies transforms of images, such as those of torchvision, one after the other.

    Energon's merges them into one warp. The kind of result is the same, with the same random
    numbers drawn, but each transform interpolates for itself: pixels differ a little, and where
    many transforms follow each other, this takes longer.

    Args:
        transforms: functions of a PIL image or tensor.

    Raises:
        TypeError: One of them cannot be called.
        NotImplementedError: One of them has only an `apply_transform`.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)
        for transform in self.transforms:
            if not callable(transform):
                raise TypeError(f"MergeTransform: {transform!r} is no function of an image")
            if getattr(type(transform), "__call__", None) is CustomTransform.__call__:  # noqa: B004
                transform(None)  # explains itself

    def __call__(self, image: Any) -> Any:
        """Returns the image after all transforms."""
        for transform in self.transforms:
            image = transform(image)
        return image
