"""Names of the array types, arrays in npy data, and what malloc keeps for the next arrays."""

import functools
import io
import re
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_KEPT_BYTES = 31 << 20
_LONGEST_HEADER = 1 << 16  # numpy refuses longer ones
# The header of a row of plain numbers: numpy takes 25 µs to read the literal in a header.
_ROW_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|][biuf][1248])', 'fortran_order': False, "
    rb"'shape': \((0|[1-9]\d{0,15}),\), \} *\n",
    re.DOTALL,
)


def argsort(numbers: Int64Array) -> Int64Array:
    """Sorts numbers from 0 on, equal ones in their order: below 65,536 much quicker than numpy."""
    is_small = len(numbers) and numbers.max() < 1 << 16
    # numpy sorts 16 bits by radix.
    return np.argsort(numbers.astype(np.uint16) if is_small else numbers, kind="stable")


def npy_view(raw: bytes | memoryview) -> npt.NDArray[Any]:
    """Returns the array in npy data, without a copy; no object array, which would be unpickled."""
    row = _ROW_HEADER.match(raw)
    if row and int.from_bytes(row[1], "little") + 10 == row.end():
        with suppress(TypeError):  # numpy has the words for a number of a size that there is not
            return np.ndarray(int(row[3]), row[2].decode(), raw, row.end())
    formats = np.lib.format
    header = io.BytesIO(raw[:_LONGEST_HEADER])
    major, _ = formats.read_magic(header)
    read = formats.read_array_header_1_0 if major == 1 else formats.read_array_header_2_0
    shape, is_fortran, dtype = read(header)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    # Refuses a shape that the bytes do not fill; allocates nothing.
    return np.ndarray(shape, dtype, raw, header.tell(), order="F" if is_fortran else "C")


@functools.cache
def keep_freed_memory() -> None:
    """Has malloc keep up to 62 MB that is freed, since each 4 KiB of new memory cost a page fault.

    glibc keeps twice as much as the largest piece that was freed before, of at most 32 MiB.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)
