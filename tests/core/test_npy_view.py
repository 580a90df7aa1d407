from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.core.arrays import npy_view

from ..conftest import examples


def written(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@examples(200)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from(["<i4", "<i8", ">i2", "|u1", "|i1", "<f2", "<f8", "|b1", "<c8", "<U3"]),
    is_fortran=st.booleans(),
    tail=st.binary(max_size=5),
)
@example(shape=[3], dtype="<i4", is_fortran=False, tail=b"")
def test_an_array_is_the_one_that_numpy_reads(shape, dtype, is_fortran, tail):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2
    array = np.asarray(numbers.astype(dtype), order="F" if is_fortran else "C")
    raw = written(array)
    found, wanted = npy_view(raw + tail), np.load(io.BytesIO(raw))
    assert found.dtype == wanted.dtype
    assert found.flags.f_contiguous == wanted.flags.f_contiguous
    np.testing.assert_array_equal(found, wanted)


ROW = written(np.arange(5, dtype=np.int32))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(5,)", b"(6,)"),
        (b"(5,)", b"(-,)"),
        (b"'<i4'", b"'<i3'"),
        (b"'<i4'", b"'<b4'"),
        (b"'<i4'", b"'<q4'"),
        (b"\x93NUMPY\x01", b"\x93NUMPY\x09"),
    ],
)
def test_a_header_that_numpy_refuses_is_refused(old: bytes, new: bytes) -> None:
    raw = ROW.replace(old, new)
    assert raw != ROW
    with pytest.raises((ValueError, TypeError)):
        np.load(io.BytesIO(raw))
    with pytest.raises((ValueError, TypeError)):
        npy_view(raw)
