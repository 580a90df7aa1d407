"""Samples that are decoded together equal those that are made one by one, by source."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.formats import many_readers
from energon_lite.sources import reading
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.reading import ReadCursor
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.stages.batching import BatchLists
from energon_lite.stages.blend import BlendDataset
from energon_lite.storage.local import CACHED_ONLY, LocalFile

from ..conftest import write_tar
from ..helpers import prepared, text_set, through_json, train

TEXTS = st.sampled_from(
    [b"", b"abc", b"abc", "zwölf".encode(), b"\xff\xfe", b"x" * 3000, b"y" * 40_000]
)
# Of one source: the folder in the names of its samples, another part beside the text, and texts.
SOURCES = st.tuples(
    st.sampled_from(["", "", "", "a/", "a.b/"]),
    st.sampled_from([(), (), (), ("jpg",), ("seg.txt",)]),
    st.lists(TEXTS, min_size=1, max_size=30),
)


def source_of(path: Path, *, repeat: bool = True) -> Any:
    factory = load_factory(path, split_part="train", training=True)
    return factory.build(shuffle_buffer_size=10, repeat=repeat)


def lists_of(run: StreamRun[Any], num: int) -> list[Any]:
    """Returns samples, keys, states and draws of the next lists of a stream."""
    found: list[Any] = []
    for samples in islice(run, num):
        draws = [(row[0], row[1]) for row in run.context.take_costs() if row[1]]
        found.append((samples, run.key, run.snapshot().to_json(), draws))
    return found


def run_of(blend: Any, size: int) -> StreamRun[Any]:
    return StreamRun(BatchLists(blend, size), Stream(1, 3), max_skip_rate=1)


def alone(blend: Any, num: int, size: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadCursor, "_is_for_all", lambda self, source: False)
        patch.setattr(SampleLoader, "together", lambda self, block: None)
        run = run_of(blend, size)
        return [*lists_of(run, num), run.context.take_records()]


@given(
    sources=st.lists(SOURCES, min_size=1, max_size=5),
    part=st.sampled_from(["txt", "bin"]),  # one that no decoder changes
    size=st.integers(1, 50),
    repeat=st.booleans(),
    first=st.integers(0, 12),
)
@example([("", (), [b"abc"])], "bin", 1, True, 0)  # bytes where text is declared
@settings(max_examples=15, deadline=None)
def test_equal_to_sources_that_are_read_alone_and_after_a_resume(
    sources: list[Any], part: str, size: int, repeat: bool, first: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for number, (lead, others, texts) in enumerate(sources):
            root = Path(folder) / f"set{number}"
            root.mkdir()
            members = [
                (f"{lead}{number}{i:03d}.{name}", text)
                for i, text in enumerate([b"whole", *texts])
                for name in (*others, part)
            ]
            write_tar(root / "a.tar", members)
            source = source_of(prepared(root, "TextSample", {"text": part}), repeat=repeat)
            parts.append((source, 1.0 + number))
        blend = BlendDataset(*parts)
        expected = alone(blend, 25, size)
        run = run_of(blend, size)
        start = lists_of(run, first)
        resumed = run_of(blend, size)
        resumed.restore(Snapshot.from_json(through_json(run.snapshot().to_json())))
        assert [*start, *lists_of(run, 25 - first), run.context.take_records()] == expected
        # Draws of sources that have ended are passed over earlier or later: states may differ.
        rest = expected[min(first, len(expected) - 1) : -1]
        assert [row[:2] for row in lists_of(resumed, 25 - first)] == [row[:2] for row in rest]


@pytest.mark.parametrize(
    ("names", "is_bad"),
    [
        pytest.param("a", lambda place: place % 2 == 1, id="made one by one"),
        # Reads of 32, 128, 512 samples and so on. Those of the third are decoded together.
        pytest.param("ab", lambda place: not 160 <= place < 672, id="decoded together"),
    ],
)
def test_failures_between_samples_that_can_be_read_are_not_in_a_row(
    tmp_path, names, is_bad
) -> None:
    texts = {name: [b"text"] * 400 for name in names}

    def write() -> None:
        for name, values in texts.items():
            members = [(f"{i:04}.txt", text) for i, text in enumerate(values)]
            write_tar(tmp_path / name / "a.tar", members)

    def both() -> Any:
        factories = [load_factory(tmp_path / name, split_part="train") for name in names]
        return BlendDataset(*[(factory.build(), 1.0) for factory in factories])

    write()
    for name in names:
        prepared(tmp_path / name, "TextSample", {"text": "txt"})
    keys = [run.key for run in [StreamRun(both(), Stream(0, 1))] for _ in run]
    bad = [key for place, key in enumerate(keys) if is_bad(place)]
    for name, _, index, _ in bad:
        texts[name[0]][index] = b"\xff\xfe.."
    write()
    left = [key for key in keys if key not in bad]
    for dataset in (both(), BatchLists(both(), 16)):
        run = StreamRun(dataset, Stream(0, 1), max_skip_rate=1)
        found = [run.key for _ in run]
        assert [key for own in found for key in (own[2:] if own[0] == "batch" else [own])] == left
        assert [record.restore_key for record in run.context.take_records()] == bad


def test_a_source_that_is_drawn_late_has_its_subflavors(tmp_path) -> None:
    sources = [source_of(text_set(tmp_path / name, 40)) for name in "ab"]
    blend = BlendDataset((sources[0], 150.0), (sources[1], 1.0))
    expected = alone(blend, 40, 8)
    names = [key[0] for row in expected[:-1] for key in row[1][2:]]
    assert 32 <= names.index("b/train") < 160  # the first two reads
    assert [row[:2] for row in lists_of(run_of(blend, 8), 40)] == [row[:2] for row in expected[:-1]]


def test_a_sample_that_cannot_be_read_uses_its_draw_up(tmp_path) -> None:
    sources = [source_of(text_set(tmp_path / name, 40), repeat=False) for name in "ab"]
    blend = BlendDataset((sources[0], 2.0), (sources[1], 1.0))
    whole = [run.key for run in [StreamRun(blend, Stream(0, 1))] for _ in run]
    os.truncate(tmp_path / "a" / "shard-000.tar", 5 * 1024)
    run = StreamRun(blend, Stream(0, 1), max_skip_rate=1)
    left = [run.key for _ in run]
    lost = [record.restore_key for record in run.context.take_records()]
    assert sorted(left + lost) == sorted(whole)
    assert left == [key for key in whole if key not in lost]
    assert len(lost) > 10


@pytest.mark.parametrize("storage", ["cached", "slow", "broken"])
def test_draws_are_read_together_unless_reading_fails(tmp_path, monkeypatch, storage) -> None:
    blend = BlendDataset(*((source_of(text_set(tmp_path / n, 40)), 1.0) for n in "abcdefgh"))
    expected = alone(blend, 30, 16)
    read_into, read_runs = LocalFile.read_into, many_readers.read_runs
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(LocalFile, "advise", lambda *place: asked.append(place))

    def at_hand(file: LocalFile, target: memoryview, start: int) -> bool:
        # Whatever is in the page cache, and whether this file system knows.
        return storage == "cached" and read_into(file, target, start) == len(target)

    def nothing(runs: Any, file_of: Any) -> Any:
        errors = {run: OSError() for run in range(len(runs.owners))}
        return read_runs(runs, file_of)._replace(errors=errors)

    monkeypatch.setattr(LocalFile, "read_at_hand", at_hand)
    if storage == "broken":
        monkeypatch.setattr(many_readers, "read_runs", nothing)
    run = run_of(blend, 16)
    assert lists_of(run, 30) == expected[:-1]
    cursor: Any = run._cursor
    assert (len(cursor.inner._parts) > 0) == (storage == "broken")
    assert (len(asked) > 0) == (storage != "cached")


@pytest.mark.skipif(not CACHED_ONLY, reason="this system cannot say what is in the page cache")
@pytest.mark.parametrize("shares", [(1.0, 1.0), (5.0, 1.0, 0.2)])
def test_slow_storage_is_asked_for_samples_before_they_are_read(
    tmp_path, monkeypatch, shares
) -> None:
    at_hand = LocalFile.read_at_hand
    asked: set[tuple[int, int]] = set()  # blocks of 512 bytes
    reads: list[bool] = []  # whether what was read had been asked for

    def blocks(file: LocalFile, start: int, stop: int) -> set[tuple[int, int]]:
        return {(file.descriptor, at) for at in range(start // 512, -(-stop // 512))}

    def fill(file: LocalFile, target: memoryview, start: int) -> bool:
        reads.append(blocks(file, start, start + len(target)) <= asked)
        return reads[-1] and at_hand(file, target, start)

    monkeypatch.setattr(LocalFile, "advise", lambda *place: asked.update(blocks(*place)))
    monkeypatch.setattr(LocalFile, "read_at_hand", fill)
    monkeypatch.setattr(reading, "_MOST_OF_ONE", 128)
    monkeypatch.setattr(reading, "_MOST_OF_EACH", 64)
    monkeypatch.setattr(reading, "_MOST_AHEAD", 300)
    sources = [source_of(text_set(tmp_path / str(i), 5000)) for i in range(len(shares))]
    blend = BlendDataset(*zip(sources, shares, strict=True))
    expected = alone(blend, 40, 16)
    asked.clear()
    reads.clear()
    assert lists_of(run_of(blend, 16), 40) == expected[:-1]
    assert len(reads) > 100
    assert sum(reads[reads.index(True) :]) > 0.8 * len(reads[reads.index(True) :])


@pytest.mark.parametrize("num", [128, 256, 32_768])
def test_an_epoch_of_one_shard_has_each_sample_once(tmp_path: Path, num: int) -> None:
    source = source_of(text_set(tmp_path / "texts", num, num_shards=1), repeat=False)
    for num_streams in (1, 8):
        cursors = [source.cursor(Stream(index, num_streams)) for index in range(num_streams)]
        keys = [sample.__key__ for cursor in cursors for sample in cursor]
        assert len(keys) == num
        assert len(set(keys)) == num


@pytest.mark.parametrize("num_streams", [1, 32])
def test_streams_of_a_process_share_what_is_read_ahead(tmp_path: Path, num_streams: int) -> None:
    folder = text_set(tmp_path / "texts", 2000, num_shards=1)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
    batches = iter(get_savable_loader(train(folder, batch_size=16)(config)))
    tracemalloc.start()
    try:
        for _ in islice(batches, 900):
            pass
        assert tracemalloc.get_traced_memory()[0] < 6 << 20
    finally:
        tracemalloc.stop()
