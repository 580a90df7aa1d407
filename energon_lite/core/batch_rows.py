"""Memory of batches: tensors that will be stacked are made in it, so that stacking copies nothing.

What makes tensors, such as a decoder of pictures, makes them in the rows of a block if its last
ones were stacked as they were. So it is seen, not declared, which pipelines stack what they decode.
In all others each tensor has separate memory, and none that is buffered keeps others alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import numpy.typing as npt
import torch

# More are not stacked together.
_MAX_ROWS = 4096
# Smaller batches are copied as quickly.
LARGE_BYTES = 1 << 18
# From here on numpy asks for huge pages, in which writing to new memory takes a third of the time.
_HUGE_BYTES = 4 << 20
# Returns an array of a shape and type. That of a worker process has memory that is sent as it is.
new_block: Callable[[tuple[int, ...], Any], npt.NDArray[Any]] = np.empty


class BatchRows(threading.local):
    """Memory for the tensors of one maker, in each thread.

    Example:
        >>> rows = BatchRows()
        >>> for _ in range(2):
        ...     pictures = [rows.tensor((3, 8, 8), np.uint8) for _ in range(4)]
        ...     batch = stack(pictures)
        >>> batch.shape, batch.data_ptr() == pictures[0].data_ptr()
        (torch.Size([4, 3, 8, 8]), True)
    """

    def __init__(self) -> None:
        self._made: deque[int] = deque(maxlen=_MAX_ROWS)  # addresses since the last stacking
        self._tensors: deque[ref[torch.Tensor]] = deque(maxlen=_MAX_ROWS)  # the same
        self._are_kept = False  # by a hook; it will keep others, too
        self._block: Any = None
        self._maker = new_block  # of the block
        self._num_rows = 0  # of the next block; 0 for none

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Returns memory for the next tensor; its values are not set."""
        place = len(self._made)
        if place == 0 and self._num_rows > 1:
            self._block, self._maker = new_block((self._num_rows, *shape), dtype), new_block
        block = self._block
        # A fork of a worker process has another maker: its parent writes to the block, too.
        is_left = block is None or self._maker is not new_block
        if is_left or place == len(block) or block[place].shape != shape:
            self._block, self._num_rows = None, 0
            row = np.empty(shape, dtype)
        else:
            row = block[place]
        if self._made:
            _last.makers.pop(self._made[-1], None)
        self._made.append(row.__array_interface__["data"][0])
        _last.makers[self._made[-1]] = self
        return row

    def tensor(self, shape: tuple[int, ...], dtype: type[np.generic]) -> torch.Tensor:
        """Returns the next tensor; its values are not set."""
        made = torch.from_numpy(self.empty(shape, dtype))
        self._tensors.append(ref(made))
        return made

    def note_samples(self, are_kept: bool) -> None:
        """Notes whether more than samples refers to the tensors of a block, or to their memory.

        Args:
            are_kept: whether more than the list for a batch refers to the samples.
        """
        if self._block is None:
            return
        tensors = [tensor for found in self._tensors if (tensor := found()) is not None]
        tensor = None
        self._are_kept |= are_kept or max(map(getrefcount, tensors), default=0) > IN_LIST + 1
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            self._are_kept |= _num_uses(storage._cdata) > 2  # of the tensor, and here

    def stacked(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the block of tensors of one shape, if they are what was made in its rows."""
        block, made = self._block, [*self._made]
        # Who keeps a sample or a picture is not to see what becomes of the batch.
        is_all = not self._are_kept and made == [tensor.data_ptr() for tensor in tensors]
        self._block, self._num_rows = None, len(made) if is_all else 0
        _last.makers.pop(made[-1], None)
        self._made.clear()
        self._tensors.clear()
        if block is None or not is_all or self._maker is not new_block:
            return None
        batch = torch.from_numpy(block[: len(made)])
        return batch if all(_is_row(tensor, batch) for tensor in tensors) else None


def _is_row(tensor: torch.Tensor, batch: torch.Tensor) -> bool:
    """Returns whether a tensor at the address of a row has all its values, and no gradient."""
    is_whole = tensor.shape == batch.shape[1:] and tensor.is_contiguous()
    return is_whole and tensor.dtype == batch.dtype and not tensor.requires_grad


class _Last(threading.local):
    """The makers in one thread, by the addresses of their last tensors."""

    def __init__(self) -> None:
        self.makers = WeakValueDictionary[int, BatchRows]()


_last = _Last()
# What `getrefcount` returns for an object that is only in a list.
(IN_LIST,) = map(getrefcount, [object()])
# Where torch does not count, every storage counts as used by others, too: batches are then copies.
_num_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 3)


def note_samples(samples: Sequence[Any]) -> None:
    """Notes who refers to samples and their tensors, before a function may stack these.

    Args:
        samples: a list that alone should refer to them.
    """
    if _last.makers:
        are_kept = max(map(getrefcount, samples), default=0) > IN_LIST
        for maker in [*_last.makers.values()]:
            maker.note_samples(are_kept)


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors of one shape, without a copy where they are the rows of a block."""
    last = tensors[-1]
    if _last.makers and type(last) is torch.Tensor and last.layout == torch.strided:
        rows = _last.makers.get(last.data_ptr())
        if rows is not None and (batch := rows.stacked(tensors)) is not None:
            return batch
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
