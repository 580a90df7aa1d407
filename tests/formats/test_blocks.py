"""Samples that are read in blocks are those of the tars, whatever order and limit."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.formats.shards import Block, ShardReader

from ..conftest import examples, write_tar
from ..helpers import prepared

SHARDS = [f"shard-{number}.tar" for number in range(3)]
COUNTS = [9, 1, 14]
SIZES = [0, 1, 511, 512, 5_000, 20_000, 60_000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with pictures of very different sizes, some without a caption."""
    root = tmp_path_factory.mktemp("blocks")
    rng = random.Random(0)
    total = 0
    for shard, count in zip(SHARDS, COUNTS, strict=True):
        members = []
        for key in range(total, total + count):
            members.append((f"{key:03d}.jpg", rng.randbytes(rng.choice(SIZES))))
            if key % 3:
                members.append((f"{key:03d}.txt", f"caption {key}".encode()))
        write_tar(root / shard, members)
        total += count
    return prepared(root, "CrudeWebdataset")


def files_of(block: Block) -> list[dict[str, bytes]]:
    return [{name: bytes(block.data[a:b]) for name, a, b in own} for own in block.members]


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[dict[str, bytes]]:
    """The files of each sample, read with the standard library."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in SHARDS:
        with tarfile.open(folder / shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found.setdefault(member.name[:3], {})[member.name] = file.read()
    return list(found.values())


@examples(100)
@given(
    indices=st.lists(st.integers(0, sum(COUNTS) - 3), min_size=1, max_size=60),
    max_bytes=st.sampled_from([1, 700, 20_000, 100_000, 1 << 22]),
    excluded=st.lists(st.integers(0, sum(COUNTS) - 1), min_size=2, max_size=2, unique=True),
    max_open=st.sampled_from([0, 1, 128]),
)
def test_blocks_have_the_files_of_their_samples_in_the_order_asked_for(
    folder: Path,
    samples: list[dict[str, bytes]],
    indices: list[int],
    max_bytes: int,
    excluded: list[int],
    max_open: int,
) -> None:
    reader = ShardReader(folder, SHARDS, COUNTS, [0, 1, 2], sorted(excluded), max_open)
    counted = [sample for i, sample in enumerate(samples) if i not in excluded]
    read = []
    for block in reader.blocks(np.array(indices), max_bytes):
        files = files_of(block)
        size = sum(len(content) for parts in files for content in parts.values())
        assert size <= max_bytes or len(files) == 1
        assert len(files) == len(block.shards) == len(block.places)
        read += files
    assert read == [counted[index] for index in indices]
    first = reader.read(np.array(indices), max_bytes)
    assert files_of(first) == read[: len(first.members)]
