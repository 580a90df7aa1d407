"""Copies of objects: whatever is put and taken away, a reader gets right bytes or none."""

from __future__ import annotations

import random
import threading
import time
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.remote.copies import GRANULE, Copy, WritableCopy, path_of

SIZE = 20 * GRANULE + 77
BYTES = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()


def granules(first: int, last: int) -> tuple[int, int]:
    return first * GRANULE, min((last + 1) * GRANULE, SIZE)


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20)), max_size=12),
    start=st.integers(0, SIZE),
    length=st.integers(0, SIZE),
)
def test_what_is_there_is_right_and_the_rest_is_missing(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, start: int, length: int
) -> None:
    path = path_of(tmp_path_factory.mktemp("copies"), "s3://a/b", SIZE, ["etag", None])
    writer, known = WritableCopy(path, SIZE), set[int]()
    reader = Copy(path, SIZE)
    for is_put, first, last in steps:
        first, last = min(first, last), max(first, last)
        at, end = granules(first, last)
        if is_put:
            writer.put(at, memoryview(BYTES)[at:end])
            known.update(range(first, last + 1))
        else:
            writer.take_away(at, end)
            known.difference_update(range(first, last + 1))
    stop = min(SIZE, start + length)
    needed = set(range(start // GRANULE, -(-stop // GRANULE)))
    lacking = [range(a // GRANULE, -(-b // GRANULE)) for a, b in writer.missing(start, stop)]
    assert {n for own in lacking for n in own} == needed - known
    assert all(a.stop < b.start for a, b in pairwise(lacking))
    target = bytearray(stop - start)
    assert reader.read_into(memoryview(target), start) == (needed <= known)
    assert not needed <= known or bytes(target) == BYTES[start:stop]


def test_a_reader_never_sees_bytes_that_are_being_taken_away(tmp_path: Path) -> None:
    path = path_of(tmp_path, "s3://a/b", SIZE, [None, None])
    writer, is_over = WritableCopy(path, SIZE), threading.Event()

    def write() -> None:
        rng = random.Random(1)
        while not is_over.is_set():
            at, end = granules(first := rng.randrange(20), min(20, first + rng.randrange(5)))
            writer.put(at, memoryview(BYTES)[at:end])
            writer.take_away(*granules(0, 20)) if rng.random() < 0.05 else None

    thread, reader, num_right = threading.Thread(target=write), Copy(path, SIZE), 0
    end = time.monotonic() + 60
    thread.start()
    try:
        for number in count():
            if num_right == 2000 or time.monotonic() > end:
                break
            start = number * 7919 % (SIZE - GRANULE)
            target = bytearray(GRANULE)
            if reader.read_into(memoryview(target), start):
                assert bytes(target) == BYTES[start : start + GRANULE]
                num_right += 1
    finally:
        is_over.set()
        thread.join()
    assert num_right > 0


def test_a_copy_has_the_name_of_one_object_only(tmp_path: Path) -> None:
    names = {
        path_of(tmp_path, address, size, [etag, None])
        for address in ("s3://a/b", "s3://a/c") for size in (1, 2) for etag in (None, "x", "y")
    }  # fmt: skip
    assert len(names) == 12
    with pytest.raises(FileNotFoundError):
        Copy(names.pop(), 5)
