"""What is asked for ahead of a stream: exactly what follows, only where storage is slow."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.formats import shards
from energon_lite.formats.shards import ShardReader
from energon_lite.sources import reading
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.blend import BlendDataset
from energon_lite.storage import local
from energon_lite.storage.local import CACHED_ONLY

from ..conftest import write_tar
from ..helpers import prepared, text_set, train

pytestmark = pytest.mark.skipif(not CACHED_ONLY, reason="the system takes no advice")


def keys_of(folder: Path, **settings: Any) -> list[str]:
    """Returns the keys of one pass over a dataset."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)
    dataset = train(folder, batch_size=1, repeat=False, **settings)(config)
    return [key for batch in get_savable_loader(dataset) for key in batch.__key__]


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Storage that is always slow; what the kernel was asked for: file, first byte, size."""
    found = []

    def posix_fadvise(descriptor: int, start: int, size: int, kind: int) -> None:
        assert kind == os.POSIX_FADV_WILLNEED
        found.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, start, size))

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    monkeypatch.setattr(ShardReader, "is_slow", property(lambda reader: True))
    return found


def test_neighbours_are_asked_for_at_once_in_pieces_that_the_kernel_does_not_cut(
    tmp_path: Path, advice: list[tuple[str, int, int]]
) -> None:
    folder = text_set(tmp_path / "set", 900, 2)
    reader = ShardReader(folder, ["shard-000.tar", "shard-001.tar"], [450, 450], [0, 1])
    reader.advise(np.array([460, 3, 1, 2, 300]))
    offsets = reader.offsets(0)
    assert advice == [
        ("shard-000.tar", offsets[1], offsets[4] - offsets[1]),
        ("shard-000.tar", offsets[300], offsets[301] - offsets[300]),
        ("shard-001.tar", reader.offsets(1)[10], 1024),
    ]
    advice.clear()
    reader.advise(np.arange(450))
    assert len(advice) > 1
    assert max(size for _, _, size in advice) == local._ADVICE_BYTES
    assert sum(size for _, _, size in advice) == offsets[-1] - offsets[0]


def test_a_run_with_slow_storage_yields_the_same_samples(
    tmp_path: Path, advice: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = text_set(tmp_path / "set", 300, 3)
    settings = {"shuffle_buffer_size": 50, "max_samples_per_sequence": 20}
    found = keys_of(folder, **settings)
    assert len(found) == 300
    assert advice
    monkeypatch.setattr(ShardReader, "is_slow", property(lambda reader: False))
    advice.clear()
    assert keys_of(folder, **settings) == found
    assert advice == []


def test_a_blend_on_slow_storage_stands_where_it_stands_on_quick_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for ahead may be less than what was looked up to be read."""
    sources = []
    for name in "ab":
        members = [(f"{i:04d}.{part}", b"x") for i in range(900) for part in ("txt", "json")]
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "a.tar", members)
        folder = prepared(tmp_path / name, "TextSample", {"text": "txt"})
        factory = load_factory(folder, split_part="train", training=True)
        sources.append(factory.build(shuffle_buffer_size=10, repeat=False))
    blend = BlendDataset((sources[0], 2.0), (sources[1], 1.0))

    def places() -> list[Any]:
        run = StreamRun(blend, Stream(0, 1))
        return [(run.key, run.snapshot().to_json()) for _ in run]

    expected = places()
    monkeypatch.setattr(reading, "_AHEAD_BYTES", 200 << 10)  # as if they were pictures
    monkeypatch.setattr(ShardReader, "is_slow", property(lambda reader: True))
    assert places() == expected
    assert len(expected) == 1800


@pytest.mark.parametrize("answer", ["cached", errno.EAGAIN, errno.EOPNOTSUPP, "part"])
def test_storage_is_slow_while_samples_are_not_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    folder = text_set(tmp_path / "set", 100, 1)
    reader = ShardReader(folder, ["shard-000.tar"], [100], [0])
    preadv = os.preadv

    def answering(descriptor: int, buffers: Any, start: int, flags: int = 0) -> int:
        if flags == 0 or answer == "cached":
            return preadv(descriptor, buffers, start)
        if answer == "part":
            return preadv(descriptor, [buffers[0][:100]], start)
        raise OSError(answer, os.strerror(answer))

    expected = reader.read(np.arange(3)).data.tobytes()
    assert not reader.is_slow
    monkeypatch.setattr(os, "preadv", answering)
    assert reader.read(np.arange(3)).data.tobytes() == expected
    assert reader.is_slow == (answer != "cached")
    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(shards.SLOW_BLOCKS):
        assert reader.is_slow == (answer != "cached")
        reader.read(np.arange(3))
    assert not reader.is_slow
