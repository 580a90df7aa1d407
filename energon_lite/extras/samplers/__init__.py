"""Samplers for map-style datasets and `torch.utils.data.DataLoader`."""

from energon_lite.extras.samplers.multipack import MultipackBatchSampler
from energon_lite.extras.samplers.packed_rows import PackedCollator, PackedRows
from energon_lite.extras.samplers.split_modality import (
    SplitModalityBatchSampler,
    SplitModalitySampler,
)
from energon_lite.extras.samplers.token_budget import TokenBudgetBatchSampler

__all__ = [
    "MultipackBatchSampler",
    "PackedCollator",
    "PackedRows",
    "SplitModalityBatchSampler",
    "SplitModalitySampler",
    "TokenBudgetBatchSampler",
]
