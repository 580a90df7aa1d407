"""`MergeTransform`: several transforms of an image, and one warp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from energon_lite.extras.transforms.mappers import (
    MAPPERS,
    CustomTransform,
    TransformMapper,
    apply_mappers,
    common_value,
)


class MergeTransform(torch.nn.Module):
    """Applies transforms of PIL images and tensors, and interpolates only once.

    Resize, RandomResizedCrop, RandomCrop, CenterCrop, RandomHorizontalFlip, RandomVerticalFlip,
    RandomRotation and RandomPerspective of torchvision (of `transforms` and of `transforms.v2`) and
    every `CustomTransform` with an `apply_transform` are merged with their neighbours into one
    matrix. Other transforms are applied between, by themselves.

    The random numbers are those of the transforms themselves, from torch's global generator: in a
    hook that is seeded for each sample (`stateless(restore_seeds=True)`) they are the same after a
    resume. Where the image shrinks, it is antialiased.

    Args:
        transforms: transforms of torchvision, CustomTransforms, or functions of an image.

    Attributes:
        transforms: the mappers, and the functions that are applied by themselves.

    Raises:
        TypeError: One of the transforms cannot be called.
        ValueError: Transforms that would be merged differ in `interpolation` or `fill`.
        NotImplementedError: A CustomTransform has neither `apply_transform` nor `__call__`.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__()
        self.transforms = [_mapper_of(transform) for transform in transforms]
        self._steps: list[tuple[bool, list[Any]]] = [
            (is_merged, list(group)) for is_merged, group in groupby(self.transforms, _is_merged)
        ]
        for is_merged, group in self._steps:
            if is_merged:
                common_value(group, "interpolation")
                common_value(group, "fill")

    def forward(self, x: Any) -> Any:
        """Returns the image after all transforms."""
        for is_merged, group in self._steps:
            if is_merged:
                x = apply_mappers(group, x)
            else:
                for transform in group:
                    x = transform(x)
        return x


def _mapper_of(transform: Any) -> Any:
    if not callable(transform):
        raise TypeError(f"MergeTransform: {transform!r} is no function of an image")
    kind = type(transform)
    if isinstance(transform, TransformMapper):
        if not _is_merged(transform) and kind.__call__ is TransformMapper.__call__:
            raise NotImplementedError(
                f"{kind.__qualname__}: implement apply_transform(matrix, dst_size), or "
                "__call__(image), which returns the transformed image"
            )
        return transform
    # A subclass may do something else, so only torchvision's own classes are merged.
    is_known = kind.__module__.startswith("torchvision.transforms") and kind.__name__ in MAPPERS
    return MAPPERS[kind.__name__](transform) if is_known else transform


def _is_merged(transform: Any) -> bool:
    return (
        isinstance(transform, TransformMapper)
        and type(transform).apply_transform is not CustomTransform.apply_transform
    )
