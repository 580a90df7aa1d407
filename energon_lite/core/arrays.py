"""Names of the array types, and arrays in npy data."""

import io
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_LONGEST_HEADER = 1 << 16  # numpy refuses longer ones


def npy_view(raw: bytes | mmap) -> npt.NDArray[Any]:
    """Returns the array in npy data, without a copy; no object array, which would be unpickled."""
    formats = np.lib.format
    header = io.BytesIO(raw[:_LONGEST_HEADER])
    major, _ = formats.read_magic(header)
    read = formats.read_array_header_1_0 if major == 1 else formats.read_array_header_2_0
    shape, is_fortran, dtype = read(header)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    # Refuses a shape that the bytes do not fill; allocates nothing.
    return np.ndarray(shape, dtype, raw, header.tell(), order="F" if is_fortran else "C")
