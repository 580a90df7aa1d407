"""Samplers for map-style datasets and `torch.utils.data.DataLoader`."""

from energon_lite.samplers.multipack import MultipackBatchSampler
from energon_lite.samplers.packed_rows import PackedCollator, PackedRows
from energon_lite.samplers.split_modality import SplitModalityBatchSampler, SplitModalitySampler
from energon_lite.samplers.token_budget import TokenBudgetBatchSampler

__all__ = [
    "MultipackBatchSampler",
    "PackedCollator",
    "PackedRows",
    "SplitModalityBatchSampler",
    "SplitModalitySampler",
    "TokenBudgetBatchSampler",
]
