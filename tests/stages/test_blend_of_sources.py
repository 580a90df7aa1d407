"""Blends of many sources: a stream keeps nothing of a source before it draws from it."""

from __future__ import annotations

import gc
import json
import pickle
import tracemalloc
from collections import defaultdict
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import BlendDataset, Schedule, WorkerConfig, get_savable_loader
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction
from energon_lite.extras.migration.blend_positions import back, blends_in, by_name
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.blend import TokenBlendDataset
from energon_lite.stages.concat import ConcatDataset, RepeatDataset
from energon_lite.stages.token_lengths import MeasureDataset
from energon_lite.testing import check_dataset

from ..helpers import metadataset, pairwise, text_set, through_json, train

MANY, NUM = 300, 40
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def blend(folder: Path, number: int = MANY) -> BlendDataset[Any]:
    sources = [
        load_factory(folder, name=f"source{i}", worker_config=CONFIG).build(repeat=True)
        for i in range(number)
    ]
    return BlendDataset(*((source, 1.0 + i % 3) for i, source in enumerate(sources)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("texts"), NUM)


def three_tokens(sample: Any) -> int:
    return 3


def run_of(dataset: Any, snapshot: Snapshot | None = None) -> StreamRun[Any]:
    run = StreamRun(dataset, Stream(1, 4))
    if snapshot is not None:
        run.restore(snapshot)
    return run


def num_opened(run: StreamRun[Any]) -> int:
    cursor: Any = run._cursor
    return int(cursor.order.order_of.cache_info().currsize)


def keys(run: StreamRun[Any], number: int) -> list[Any]:
    return [item.__restore_key__ for item in islice(run, number)]


def test_only_sources_that_were_drawn_from_are_open_also_after_a_restore(folder: Path) -> None:
    dataset = blend(folder)
    run = run_of(dataset)
    assert num_opened(run) == 0
    drawn = {key[0] for key in keys(run, 20)}
    assert 0 < num_opened(run) <= 2 * len(drawn) < MANY
    saved = run.snapshot()
    resumed = run_of(dataset, Snapshot.from_json(through_json(saved.to_json())))
    assert num_opened(resumed) == 0
    assert resumed.snapshot() == saved
    assert num_opened(resumed) == 0
    assert keys(resumed, 500) == keys(run, 500)


RISING = Schedule("linear", ((0, 0.0), (40, 2.0)))


@pytest.mark.parametrize(
    ("until", "weights", "settings"),
    pairwise(
        [None, "first"],
        [(2, 1, 1), (1, 3, 0.2), (RISING, 1, 1), (5,), (1, 1e-6)],
        [{}, {"blend_mode": "random"}, {"repeat": True}],
    ),
)
def test_positions_are_those_of_the_samples_drawn_at_every_place(
    tmp_path: Path, until: str | None, weights: Any, settings: dict[str, Any]
) -> None:
    """Through ends, where one source is left, and after a resume."""
    roots = [text_set(tmp_path / f"s{size}", size, 1) for size in (9, 13, 4)]
    repeat, mode = settings.get("repeat", False), settings.get("blend_mode", "exact")
    sources = [
        load_factory(root, name=root.name, worker_config=CONFIG).build(repeat=repeat)
        for root in roots
    ]
    pairs = zip(sources, weights, strict=False)
    dataset = BlendDataset(*pairs, until=until, blend_mode=mode)
    blends, stream = dict(blends_in(dataset.config())), Stream(0, 1)
    expected = [item.__restore_key__ for item in islice(StreamRun(dataset, stream), 40)]
    run = StreamRun(dataset, stream)
    for number in range(min(30, len(expected)) + 1):
        saved = through_json(run.snapshot().to_json())
        named = by_name(Snapshot.from_json(saved), blends)
        drawn = [key[0] for key in expected[:number]]
        for name, own in zip(named.inner[0].names, named.inner[0].inner, strict=True):
            assert own.count("position") == drawn.count(name)
        if number % 3:
            run = StreamRun(dataset, stream)
        run.restore(Snapshot.from_json(saved))
        assert through_json(run.snapshot().to_json()) == saved
        again = StreamRun(dataset, stream)
        again.restore(back(named))  # as it is after an edit
        assert keys(again, 9) == expected[number : number + 9]
        assert keys(run, 1) == expected[number : number + 1]
    assert not repeat or len(expected) == 40


def test_place_in_many_sources_takes_no_more_than_in_few(folder: Path) -> None:
    sizes = []
    for number in (2, MANY):
        run = run_of(blend(folder, number))
        keys(run, 500)
        saved = run.snapshot()
        sent = pickle.dumps(saved)
        assert pickle.loads(sent) == saved
        sizes.append((len(sent), len(json.dumps(saved.to_json()))))
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) < 300


def test_place_in_other_sources_or_of_another_seed_is_refused(folder: Path) -> None:
    saved = through_json(run_of(blend(folder, 3)).snapshot().to_json())
    (inner,) = saved["inner"]
    for change in ({"order": "00000000"}, {"ahead": [1, 2]}):
        changed = Snapshot.from_json({**saved, "inner": [{**inner, **change}]})
        with pytest.raises(StateError, match="of other sources, or with another seed, than the 3"):
            run_of(blend(folder, 3), changed)
    for ahead in ([1, 2, 0.5], 7, [10**30, 0, 0]):
        changed = Snapshot.from_json({**saved, "inner": [{**inner, "ahead": ahead}]})
        with pytest.raises(StateError, match="not a column of integers"):
            run_of(blend(folder, 3), changed)


def test_opened_source_that_was_not_read_takes_little_memory(folder: Path) -> None:
    """What a stream keeps of each source beside the samples that it has read ahead."""
    dataset = TokenBlendDataset(*((source, 1.0) for source in blend(folder).children))
    streams: Any = [StreamRun(dataset, Stream(index, 2))._cursor.cursors for index in (0, 1)]  # type: ignore[attr-defined]
    for cursors in streams:
        cursors[0]
    tracemalloc.start()
    for child in range(1, MANY):
        for cursors in streams:
            cursors[child]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes / (MANY - 1) / len(streams) < 1600


def test_source_that_was_not_read_takes_little_memory(folder: Path) -> None:
    """What each process keeps of it: a worker process copies that of sources it reads."""
    kept = [blend(folder, 2)]
    tracemalloc.start()
    kept.append(blend(folder))
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes / MANY < 4200


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_sources_keep_half_of_the_open_files_that_a_process_may_have(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_hand: bool
) -> None:
    members = [{"path": str(folder), "weight": 1 + i % 3, "name": f"source{i}"} for i in range(12)]
    path = tmp_path / "blend.yaml"
    path.write_text(json.dumps(metadataset({"blend": members})))

    def make() -> Any:
        return blend(folder, 12) if is_by_hand else train(path, batch_size=3)(CONFIG)

    expected = keys(run_of(make()), 60)
    dataset = make()
    run = run_of(dataset)
    while len(dataset.children) == 1:
        (dataset,) = dataset.children
    readers = [source.reader for source in dataset.children]
    gc.collect()
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (number for number in count() if number not in taken)
    half = next(islice(free, 6, None))
    monkeypatch.setattr("resource.getrlimit", lambda _: (2 * half, -1))
    assert keys(run, 60) == expected
    assert 4 <= sum(len(reader._open) for reader in readers) <= 8
    assert len({len(reader._open) for reader in readers}) > 1
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))  # no limit
    run = run_of(make())
    assert keys(run, 60) == expected


@pytest.mark.parametrize("until", ["first", "all_once"])
def test_items_up_to_an_end_are_those_that_come(folder: Path, tmp_path, until) -> None:
    other = text_set(tmp_path / "longer", 70)

    def finite(*folders: Path) -> BlendDataset[Any]:
        parts = [
            load_factory(root, name=f"source{i}", worker_config=CONFIG).build(repeat=False)
            for i, root in enumerate(folders)
        ]
        return BlendDataset((parts[0], 1), (parts[1], 2), until=until)

    def count(dataset: BlendDataset[Any], stream: Stream) -> int:
        return sum(1 for _ in StreamRun(dataset, stream))

    dataset, streams = finite(folder, other), [Stream(0, 1), Stream(0, 2), Stream(1, 2)]
    expected = [count(dataset, stream) for stream in streams]
    assert [dataset.num_items(stream) for stream in streams * 2] == expected * 2
    changed = dataset.with_children(finite(other, folder).children)
    assert changed.num_items(streams[-1]) == count(changed, streams[-1])
    assert changed.num_items(streams[-1]) != expected[-1]


@pytest.mark.parametrize("kind", [BlendDataset, TokenBlendDataset])
@pytest.mark.parametrize("points", [((0, 1), (5, 0), (90, 0), (99, 1)), ((0, 0),)])
def test_what_is_left_without_a_share_is_read_to_its_end(
    tmp_path: Path, kind: Any, points: Any
) -> None:
    folder = text_set(tmp_path, 8)
    sources = [load_factory(folder, name=f"s{i}", worker_config=CONFIG).build() for i in range(3)]
    weights = [1.0, *[Schedule("linear", points)] * 2]
    dataset: Any = kind(*zip(sources, weights, strict=True))
    if kind is TokenBlendDataset:
        length = UserFunction(three_tokens, name="sample_length", config=CONFIG, is_stateless=True)
        dataset = MeasureDataset(dataset, length)
    check_dataset(dataset, num_streams=(2,))
    found = [sample.__restore_key__[::2] for sample in StreamRun(dataset, Stream(0, 1))]
    assert len(set(found)) == len(found) == 3 * 8


FADING = Schedule("linear", ((0, 1), (5, 0)))


@pytest.mark.parametrize(("until", "repeat"), [("all_once", False), ("first", True)])
def test_a_blend_that_never_reaches_its_end_is_refused(
    folder: Path, until: str, repeat: bool
) -> None:
    first, second = (load_factory(folder, name=name, worker_config=CONFIG) for name in "ab")
    pairs = ((first.build(repeat=repeat), 1.0), (second.build(repeat=False), FADING))
    blend = BlendDataset(*pairs, until=until)
    text = f"until='{until}': the weight of b stays 0 before it has ended once"
    for dataset in (blend, RepeatDataset(blend), ConcatDataset(blend, blend)):
        with pytest.raises(ValueError, match=text):
            get_savable_loader(dataset)
    with pytest.raises(ValueError, match=text):
        blend.cursor(Stream(1, 2))


def test_a_blend_by_tokens_whose_weight_ends_at_0_cannot_wait_for_all(folder: Path) -> None:
    sources = [load_factory(folder, name=name, worker_config=CONFIG).build() for name in "ab"]
    lengths = {name: np.full(NUM, 3) for name in "ab"}
    with pytest.raises(ValueError, match="until='all_once': the weight of b stays 0 before"):
        TokenBlendDataset(
            *zip(sources, (1.0, FADING), strict=True), until="all_once", lengths=lengths
        )


@pytest.mark.parametrize("until", ["first", "all_once"])
def test_a_blend_whose_weights_come_back_ends(folder: Path, until: str) -> None:
    sources = [load_factory(folder, name=name, worker_config=CONFIG).build() for name in "ab"]
    schedule = Schedule("linear", ((0, 1), (5, 0), (2_000, 0), (2_001, 1)))
    blend = BlendDataset((sources[0], 1.0), (sources[1], schedule), until=until)
    assert len(blend) == len(list(get_savable_loader(blend)))


def test_blends_that_wait_for_all_nest_for_pass_after_pass(folder: Path) -> None:
    sources = [load_factory(folder, name=name, worker_config=CONFIG).build() for name in "abcd"]
    blend: Any = sources[0]
    for source in sources[1:]:
        blend = BlendDataset((blend, 1.0), (source, 1.0), until="all_once")
    orders = set[Any]()
    for number in (0, 1, 2, 70_000):
        rounds = defaultdict[Any, list[int]](list)
        for stream in range(2):
            for sample in StreamRun(blend, Stream(stream, 2, number)):
                source, epoch, index, _ = sample.__restore_key__
                rounds[source, epoch].append(index)
        whole = [
            (source, tuple(found)) for (source, _), found in rounds.items() if len(found) == NUM
        ]
        assert {source for source, _ in whole} == set("abcd")
        assert all(sorted(found) == [*range(NUM)] for _, found in whole)
        assert not orders & set(whole)
        orders |= set(whole)


def test_a_blend_whose_weights_end_is_read_nearly_up_to_there(folder: Path) -> None:
    sources = [load_factory(folder, name=name).build(repeat=True) for name in "ab"]
    ending = Schedule("step", ((0, 1), (600, 0)))
    run, keys = StreamRun(BlendDataset(*[(s, ending) for s in sources]), Stream(0, 1)), []
    with pytest.raises(ValueError, match="all weights of the blend are 0 at draw 60"):
        keys.extend(run.key for _ in run)
    assert 500 < len(keys) <= 600
