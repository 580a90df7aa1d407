"""Samples of many datasets that are read at once are those that each reader reads."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.formats.many_readers import read_at_once
from energon_lite.formats.shards import ShardReader
from energon_lite.storage.local import CACHED_ONLY, LocalFile

from ..conftest import examples, write_tar
from ..helpers import prepared

COUNTS = [7, 1, 12]
SHARDS = [f"shard-{number}.tar" for number in range(3)]
# Of four datasets: whether a sample has two files, or its shard is cut short.
DATASETS = ["plain", "plain", "two files", "cut"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for kind in DATASETS:
        root, number = tmp_path_factory.mktemp("many"), 0
        for shard, count in zip(SHARDS, COUNTS, strict=True):
            members = []
            for _ in range(count):
                members.append((f"{number:03d}.txt", b"%03d" % number * (number * 97 % 900)))
                if kind == "two files" and number == 9:
                    members.append((f"{number:03d}.json", b"{}"))
                number += 1
            write_tar(root / shard, members)
        prepared(root, "CrudeWebdataset")
        if kind == "cut":
            tar = root / SHARDS[2]
            tar.write_bytes(tar.read_bytes()[:-20_000])
        found.append(root)
    return found


@examples(100)
@given(
    wanted=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.integers(0, sum(COUNTS) - 1), min_size=1, max_size=25),
        ),
        min_size=1,
        max_size=6,
    ),
    max_open=st.sampled_from([0, 1, 128]),
    seed=st.integers(0, 99),
)
def test_blocks_are_those_of_the_readers_without_what_takes_care(folders, wanted, max_open, seed):
    readers = [ShardReader(folder, SHARDS, COUNTS, [0, 1, 2], (), max_open) for folder in folders]
    turns = np.random.default_rng(seed).permutation(sum(len(indices) for _, indices in wanted))
    ends = np.cumsum([len(indices) for _, indices in wanted])
    requests = [
        (readers[number], np.array(indices), own)
        for (number, indices), own in zip(wanted, np.split(turns, ends[:-1]), strict=True)
    ]
    block, is_read, _ = read_at_once(requests)
    assert len(is_read) == len(requests)
    expected = []
    for (reader, indices, own_turns), (number, _), is_in in zip(
        requests, wanted, is_read, strict=True
    ):
        has_two = DATASETS[number] == "two files" and 9 in indices
        own = reader.read(indices)
        is_cut = any(isinstance(members, Exception) for members in own.members)
        assert DATASETS[number] == "cut" or not is_cut
        assert is_in == (not has_two and not is_cut)
        if is_in:
            columns = (own_turns.tolist(), own.members, own.shards, own.places)
            for turn, members, shard, place in zip(*columns, strict=True):
                files = [(name, bytes(own.data[a:b])) for name, a, b in members]
                expected.append((turn, (files, shard, place)))
    found = [
        ([(name, bytes(block.data[a:b])) for name, a, b in members], shard, place)
        for members, shard, place in zip(block.members, block.shards, block.places, strict=True)
    ]
    assert found == [sample for _, sample in sorted(expected)]


@pytest.mark.skipif(not CACHED_ONLY, reason="this system cannot say what is in the page cache")
@examples(30)
@given(
    wanted=st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(0, sum(COUNTS) - 1), min_size=1, max_size=25)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_ranges_that_the_kernel_is_asked_for_are_those_that_are_read(folders, wanted):
    readers = [ShardReader(folder, SHARDS, COUNTS, [0, 1, 2]) for folder in folders[:2]]
    for reader in readers:
        reader.read(np.arange(reader.num_samples))  # opens the shards
    asked: list[tuple[int, int, int]] = []
    read: list[tuple[int, int, int]] = []

    def ask(file: LocalFile, start: int, stop: int) -> None:
        asked.append((file.descriptor, start, stop))

    def refuse(file: LocalFile, target: memoryview, start: int) -> int:
        read.append((file.descriptor, start, start + len(target)))
        return 0

    requests = [(readers[number], np.array(indices)) for number, indices in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFile, "advise", ask)
        patch.setattr(LocalFile, "read_at_hand", refuse)
        patch.setattr(LocalFile, "read_into", refuse)
        for reader, indices in requests:
            reader.advise(indices)
        ahead = asked.copy()
        asked.clear()
        turns = iter(np.arange(99))
        with suppress(Exception):  # nothing was read
            read_at_once(
                [(reader, own, np.array([next(turns) for _ in own])) for reader, own in requests]
            )
    assert len(ahead) > 0
    assert asked == (ahead if len(ahead) > 1 else [])
    assert [place for place in read if place in ahead][: len(ahead)] == ahead  # the page cache
