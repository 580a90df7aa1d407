"""Pixels written plane by plane: the same values by compiled code and by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.decoding import planes

from ..programs import run_program


@pytest.fixture(autouse=True, scope="module")
def _early() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes, "_NUM_BEFORE_COMPILING", 0)
        yield


@given(
    height=st.integers(1, 40), width=st.integers(1, 40), num_channels=st.sampled_from([0, 1, 3, 4]),
    is_float=st.booleans(), is_read_only=st.booleans(), is_turned=st.booleans(),
)  # fmt: skip
def test_planes_are_the_transposed_pixels(
    height: int, width: int, num_channels: int, is_float: bool, is_read_only: bool, is_turned: bool
) -> None:
    shape = (height, width, num_channels)[: 3 if num_channels else 2]
    pixels = np.random.default_rng(height).integers(0, 256, shape, dtype=np.uint8)
    if is_turned:
        pixels = pixels.swapaxes(0, 1)
    pixels.flags.writeable = not is_read_only
    expected = np.moveaxis(pixels, 2, 0) if num_channels else pixels
    found = np.empty(expected.shape, np.float32 if is_float else np.uint8)
    planes.write_planes(pixels, found)
    if is_float:
        expected = expected.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shift", [0, 1, 16])
@pytest.mark.parametrize("shape", [(512, 512), (300, 320), (301, 321), (293, 300)])
def test_planes_of_large_pictures_are_the_transposed_pixels(shape: tuple[int, int], shift: int):
    size = 3 * shape[0] * shape[1]
    pixels = np.random.default_rng(shift).integers(0, 256, (*shape, 3), dtype=np.uint8)
    memory = np.full(size + 64, 7, np.uint8)
    found = memory[shift : shift + size].reshape(3, *shape)
    planes.write_planes(pixels, found)
    np.testing.assert_array_equal(found, np.moveaxis(pixels, 2, 0))
    assert set(memory[:shift].tolist() + memory[shift + size :].tolist()) == {7}


def test_every_byte_divided_by_255_is_that_of_numpy() -> None:
    pixels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 256, 3)
    found = np.empty((3, 1, 256), np.float32)
    planes.write_planes(pixels, found)
    np.testing.assert_array_equal(found[1, 0], np.arange(256, dtype=np.float32) / np.float32(255))


THREADS = """
import sys, threading
import numpy as np
from energon_lite.decoding import planes
planes._NUM_BEFORE_COMPILING = 0
sys.setswitchinterval(1e-5)
start, found = threading.Barrier(8), []
def write():
    pixels, array = np.full((8, 8, 3), 7, np.uint8), np.empty((3, 8, 8), np.uint8)
    start.wait()
    planes.write_planes(pixels, array)
    found.append(bool((array == 7).all()) and "numba" in sys.modules)
threads = [threading.Thread(target=write) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found)
"""


def test_threads_that_need_the_compiler_at_once_wait_for_each_other() -> None:
    done = run_program("-c", THREADS)
    assert done.stdout == f"{[True] * 8}\n"
    assert done.stderr == ""
