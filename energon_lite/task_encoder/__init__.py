"""What the user's hooks do to samples and batches."""

from energon_lite.core.samples import Batch
from energon_lite.core.stacking import (
    batch_list,
    batch_pad_stack,
    batch_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)
from energon_lite.core.user_function import stateless
from energon_lite.task_encoder.augment import AugmentTaskEncoder
from energon_lite.task_encoder.base import DefaultTaskEncoder, TaskEncoder
from energon_lite.task_encoder.cooking import Cooker, basic_sample_keys, cooker

__all__ = [
    "AugmentTaskEncoder",
    "Batch",
    "Cooker",
    "DefaultTaskEncoder",
    "TaskEncoder",
    "basic_sample_keys",
    "batch_list",
    "batch_pad_stack",
    "batch_stack",
    "concat_pad",
    "cooker",
    "generic_batch",
    "generic_concat",
    "homogeneous_concat_mix",
    "stateless",
]
