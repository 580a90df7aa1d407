"""Helpers that put several samples, or several batches, together."""

from energon_lite.core.stacking import (
    batch_list,
    batch_pad_stack,
    batch_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)

__all__ = [
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "concat_pad",
    "generic_batch",
    "generic_concat",
    "homogeneous_concat_mix",
]
