"""From pixels to planes: (H, W, 3) to (3, H, W), as bytes or as numbers from 0 to 1."""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.core.arrays import UInt8Array
from energon_lite.core.compile_ahead import CompileAhead
from energon_lite.core.compiled import compile_kernel, kernel
from energon_lite.core.errors import pass_on

logger = logging.getLogger(__name__)

# A process that decodes fewer does not wait for numba, which takes half a second to be imported.
_NUM_BEFORE_COMPILING = 256
_numbers = itertools.count()
_ahead = CompileAhead([__name__], free_sec=0)


def write_planes(pixels: UInt8Array, planes: npt.NDArray[Any]) -> None:
    """Writes an image plane by plane, as bytes, or divided by 255 into an array of float32.

    Compiled code takes a tenth of numpy's time for bytes and a third of it for float32. Until it is
    there, numpy writes.

    Args:
        pixels: shape (H, W) or (H, W, C).
        planes: shape (H, W) or (C, H, W).
    """
    is_float = planes.dtype == np.float32
    is_usual = pixels.shape[2:] == (3,) and pixels.flags.c_contiguous and pixels.flags.writeable
    is_asked_for = is_usual and next(_numbers) >= _NUM_BEFORE_COMPILING
    if is_asked_for and not _ahead.allows_plain(()) and _is_compiled():
        planes = planes.reshape(3, -1)
        split = _split_to_floats if is_float else _split_to_bytes
        split(pixels.reshape(-1), planes)
        return
    values = pixels if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)
    if is_float:
        np.divide(values, np.float32(255), out=planes, dtype=np.float32)
    else:
        planes[...] = values


@functools.cache
def _is_compiled() -> bool:
    try:
        return compile_kernel(_split_to_bytes) and compile_kernel(_split_to_floats)
    except Exception as error:  # which is no fault of the picture
        pass_on(error)
        logger.warning("Pictures become tensors by numpy, since numba fails: %r", error)
        return False


@kernel("(uint8[::1], uint8[:, ::1])", is_early=False)
def _split_to_bytes(pixels: UInt8Array, planes: UInt8Array) -> None:
    for i in range(planes.shape[1]):
        planes[0, i] = pixels[3 * i]
        planes[1, i] = pixels[3 * i + 1]
        planes[2, i] = pixels[3 * i + 2]


@kernel("(uint8[::1], float32[:, ::1])", is_early=False)
def _split_to_floats(pixels: UInt8Array, planes: npt.NDArray[np.float32]) -> None:
    white = np.float32(255)
    for i in range(planes.shape[1]):
        planes[0, i] = np.float32(pixels[3 * i]) / white
        planes[1, i] = np.float32(pixels[3 * i + 1]) / white
        planes[2, i] = np.float32(pixels[3 * i + 2]) / white
