"""Samples of large files, which are read file by file, equal those that are read in long ranges."""

from __future__ import annotations

import io
import os
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.formats import shards
from energon_lite.formats.large_files import FileContents
from energon_lite.formats.shards import ShardReader
from energon_lite.storage import local

from ..conftest import examples, write_tar
from ..helpers import prepared

SIZES = [0, 1, 512, 30_000, 70_000, 70_001, 200_000]
# The parts of a sample: their names and sizes.
PARTS = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)
SAMPLES = st.lists(st.one_of(st.just([70_000]), st.just([70_000]), PARTS), min_size=1, max_size=14)


def write(path: Path, samples: list[list[int]], *, first: int, has_times: bool) -> None:
    kind = tarfile.PAX_FORMAT if has_times else tarfile.USTAR_FORMAT
    with tarfile.open(path, "w", format=kind) as tar:
        for key, sizes in enumerate(samples, first):
            for part, size in zip(("jpg", "json", "txt"), sizes, strict=False):
                info = tarfile.TarInfo(f"{key:04d}.{part}")
                info.size, info.mtime = size, 1_700_000_000.25 if has_times else 0
                tar.addfile(info, io.BytesIO(random.Random(key).randbytes(size)))


def described(reader: ShardReader, indices: Any, max_bytes: int) -> list[Any]:
    """Returns the files of samples, or the texts of their errors, with shard and place."""
    found = []
    for block in reader.blocks(np.array(indices), max_bytes):
        for members, *where in zip(block.members, block.shards, block.places, strict=True):
            is_error = isinstance(members, Exception)
            files = members if is_error else [(n, bytes(block.data[a:b])) for n, a, b in members]
            found.append((str(files) if is_error else files, *where))
    return found


def in_ranges(folder: Path, counts: list[int], indices: Any, max_bytes: int) -> list[Any]:
    names = [f"{i}.tar" for i in range(len(counts))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "read_files", lambda *_: None)
        patch.setattr("energon_lite.storage.patience.BRIEF_SEC", 0.0)
        patch.setattr("energon_lite.storage.patience._MOMENT_SEC", 0.0)
        return described(ShardReader(folder, names, counts, range(9)), indices, max_bytes)


@examples(15)
@given(
    both=st.tuples(SAMPLES, SAMPLES), has_times=st.booleans(),
    max_bytes=st.sampled_from([1, 150_000, 1 << 22]), cut=st.one_of(st.none(), st.floats(0, 1)),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_equal_to_long_ranges_for_any_sizes_orders_and_cuts(both, has_times, max_bytes, cut, seed):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SLOW_BLOCKS", 1)  # tried again at once
        patch.setattr("energon_lite.storage.patience.BRIEF_SEC", 0.0)
        patch.setattr("energon_lite.storage.patience._MOMENT_SEC", 0.0)
        folder = Path(name) / "set"
        folder.mkdir()
        for i, samples in enumerate(both):
            write(folder / f"{i}.tar", samples, first=100 * i, has_times=has_times)
        prepared(folder, "CrudeWebdataset")
        counts = [len(samples) for samples in both]
        indices = random.Random(seed).choices(range(sum(counts)), k=20)
        reader = ShardReader(folder, ["0.tar", "1.tar"], counts, [0, 1])
        if cut is not None:
            if seed % 2:  # else before it is opened
                described(reader, indices[:3], max_bytes)
            os.truncate(folder / "0.tar", int((folder / "0.tar").stat().st_size * cut))
        found = described(reader, indices, max_bytes)
        assert len(found) == len(indices)
        if cut is None or not seed % 2:
            assert found == in_ranges(folder, counts, indices, max_bytes)
        # Cut while it is open: what is left of the shard, or an error that names it.
        whole = [(s, key) for s, own in enumerate(both) for key in range(len(own))]
        for (files, shard, place), index in zip(found, indices, strict=True):
            number, key = whole[index]
            assert (shard, place) == (f"{number}.tar", key)
            if isinstance(files, str):
                assert number == 0
                assert cut is not None
                assert "0.tar" in files
            else:
                rng = random.Random
                contents = [rng(100 * number + key).randbytes(n) for n in both[number][key]]
                assert [content for _, content in files] == contents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty samples of one large file each, and twenty small ones."""
    for i, size in enumerate((60_000, 900)):
        members = [(f"{i}{key:02d}.jpg", bytes([key]) * size) for key in range(20)]
        write_tar(tmp_path / "set" / f"{i}.tar", members)
    return prepared(tmp_path / "set", "CrudeWebdataset")


def opened(folder: Path) -> ShardReader:
    return ShardReader(folder, ["0.tar", "1.tar"], [20, 20], [0, 1])


def kinds(reader: ShardReader, indices: Any, max_bytes: int = 250_000) -> list[bool]:
    """Returns for each block whether its files were read one by one."""
    blocks = reader.blocks(np.array(indices), max_bytes)
    return [isinstance(block.data, FileContents) for block in blocks]


def test_only_large_files_are_read_one_by_one(folder: Path) -> None:
    reader = opened(folder)
    assert kinds(reader, range(20)) == [True] * 5
    assert kinds(reader, range(20, 40)) == [False]
    assert kinds(reader, range(20)) == [True] * 5
    assert kinds(reader, [0, *range(20, 40)]) == [False]


def test_what_is_not_in_the_page_cache_is_read_in_ranges(folder, monkeypatch):
    reader, preadv, tried = opened(folder), os.preadv, []

    def not_cached(descriptor: int, targets: Any, place: int, flags: int = 0) -> int:
        if flags & 8:
            tried.append(place)
            raise BlockingIOError
        return preadv(descriptor, targets, place, flags)

    with monkeypatch.context() as patch:
        patch.setattr(local, "CACHED_ONLY", 8)
        patch.setattr(os, "preadv", not_cached)
        assert kinds(reader, range(20)) == [False] * 5
        assert len(tried) == 10  # files, then a range, of each block
    assert kinds(reader, range(20)) == [True] * 5


def test_after_files_that_are_small_for_their_sample_some_blocks_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [(f"{i:02d}.{part}.jpg", b"x" * 9_000) for i in range(9) for part in "abcdefgh"]
    write_tar(tmp_path / "set" / "0.tar", parts)
    folder = prepared(tmp_path / "set", "CrudeWebdataset")
    reader, tried = ShardReader(folder, ["0.tar"], [9], [0]), []
    monkeypatch.setattr(shards, "read_files", lambda *_: tried.append(1))
    assert kinds(reader, [*range(9)] * 15, 80_000) == [False] * 135
    assert len(tried) == 3


@pytest.mark.parametrize("harm", ["cut", "refused"])
def test_a_shard_that_is_harmed_between_headers_and_contents_is_named(folder, monkeypatch, harm):
    reader, pread = opened(folder), os.pread

    def pread_of_harmed(descriptor: int, size: int, place: int) -> bytes:
        if harm == "refused":
            raise PermissionError("no")
        os.truncate(folder / "0.tar", 200_000)
        return pread(descriptor, size, place)

    assert kinds(reader, range(20)) == [True] * 5
    monkeypatch.setattr("energon_lite.storage.patience.BRIEF_SEC", 0.0)
    monkeypatch.setattr("energon_lite.storage.patience._MOMENT_SEC", 0.0)
    monkeypatch.setattr(os, "pread", pread_of_harmed)
    found = described(reader, range(20), 1 << 22)
    errors = [text for text, *_ in found if isinstance(text, str)]
    if harm == "refused":
        assert not errors
    else:
        assert len(errors) == 20  # another file took its place
        assert all("0.tar" in text for text in errors)


def test_more_shards_than_may_be_open_are_read(tmp_path: Path) -> None:
    for i in range(12):
        write_tar(tmp_path / "set" / f"{i:02d}.tar", [(f"{i}.jpg", bytes([i]) * 60_000)])
    folder = prepared(tmp_path / "set", "CrudeWebdataset")
    names = [f"{i:02d}.tar" for i in range(12)]
    for max_open in (0, 1, 5, 128):
        reader = ShardReader(folder, names, [1] * 12, range(12), max_open=max_open)
        found = described(reader, [*range(12)] * 2, 200_000)
        assert [files[0][1][0] for files, *_ in found] == [*range(12)] * 2
        assert len(reader._open) <= max_open
