"""Memory of batches: in a worker process, tensors are stacked where they are sent from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Smaller batches are copied as quickly.
LARGE_BYTES = 1 << 18
# From here on numpy asks for huge pages, in which writing to new memory takes a third of the time.
_HUGE_BYTES = 4 << 20
# Returns an array of a shape and type. That of a worker process has memory that is sent as it is.
new_block: Callable[[tuple[int, ...], Any], npt.NDArray[Any]] = np.empty
# Counts the memories that blocks were in: one that is sent again and again moves to the last one.
num_memories = 0


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors of one shape."""
    last = tensors[-1]
    size = last.numel() * last.element_size()
    is_small = len(tensors) * size < (_HUGE_BYTES if new_block is np.empty else LARGE_BYTES)
    if is_small or not all(_may_be_copied(tensor, last.dtype) for tensor in tensors):
        return torch.stack(tuple(tensors))
    block = new_block((len(tensors), size), np.uint8)
    batch = torch.from_numpy(block).view(last.dtype).view(len(tensors), *last.shape)
    return torch.stack(tuple(tensors), out=batch)


def _may_be_copied(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a tensor may be copied into memory of another one of a type."""
    is_dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_dense and tensor.is_cpu and tensor.dtype == dtype and not tensor.requires_grad
