"""`megatron.energon.transforms`."""

from __future__ import annotations

import pytest

from energon_lite.transforms import CustomTransform, MergeTransform


class Double(CustomTransform):
    def __call__(self, image):
        return 2 * image


class Warp(CustomTransform):
    def apply_transform(self, matrix, dst_size):
        return matrix, dst_size, ()


def test_transforms_follow_each_other():
    assert MergeTransform([Double(), lambda image: image + 1])(5) == 11


def test_transforms_that_cannot_be_merged_are_refused_at_construction():
    with pytest.raises(NotImplementedError, match="Warp: apply_transform"):
        MergeTransform([Double(), Warp()])
    with pytest.raises(TypeError, match="5 is no function of an image"):
        MergeTransform([5])
