"""Samplers for map-style datasets and `torch.utils.data.DataLoader`."""

from energon_lite.samplers.multipack import MultipackBatchSampler

__all__ = ["MultipackBatchSampler"]
