"""Batches of one modality: the same on all ranks, nothing lost, resumed anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    BatchDataset,
    BlendDataset,
    DefaultTaskEncoder,
    FatalSampleError,
    ModalitySplit,
    SavableDataset,
    SkipSample,
    SplitModalityBatchDataset,
    StateError,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    sample_rng,
    stateless,
)
from energon_lite.batching.modality import GroupSchedule
from energon_lite.core.dataset import Cursor, StreamRun, Traits
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction
from energon_lite.order.schedules import Schedule
from energon_lite.stages.blend import TokenBlendDataset
from energon_lite.stages.token_lengths import MeasureDataset

from ..helpers import Ranks, ignore, number_of, text_set

AGAIN = "repeated"


class Pool(SavableDataset[Any]):
    """Samples (group, length, number), dealt to the streams in turn; for ever, if so wanted."""

    def __init__(self, rows: list[tuple[Any, int]], endless: bool = False) -> None:
        self.rows = rows
        self._endless = endless
        self.worker_config = WorkerConfig(
            rank=0, world_size=1, num_workers=0, global_error_handler=ignore
        )

    def cursor(self, stream: Stream) -> Cursor[Any]:
        return PoolCursor(self, stream)

    def config(self) -> dict[str, JSON]:
        return {"stage": "pool"}

    def restore_sample(self, restore_key: RestoreKey) -> Any:
        if restore_key[0] != "pool":
            raise ValueError(f"{restore_key} is not of this dataset")
        number = restore_key[2]
        return (*self.rows[number % len(self.rows)], number)

    def num_items(self, stream: Stream) -> int:
        return len(range(stream.index, len(self.rows), stream.num_streams))

    def own_traits(self, below: Traits) -> Traits:
        return dataclasses.replace(below, training=True, endless=self._endless)


class PoolCursor(Cursor[Any]):
    def __init__(self, pool: Pool, stream: Stream) -> None:
        self.pool, self.stream, self.place = pool, stream, 0

    def __next__(self) -> Any:
        number = self.place * self.stream.num_streams + self.stream.index
        if number >= len(self.pool.rows) and not self.pool.endless:
            raise StopIteration
        self.place += 1
        self.key = ("pool", 0, number, number)
        return self.pool.restore_sample(self.key)

    def snapshot(self) -> Snapshot:
        return Snapshot("pool", {"place": self.place})

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("pool", 0)
        self.place = snapshot.count("place")


@stateless
def as_list(samples: list[Any]) -> list[Any]:
    return samples


def group_of(sample: Any) -> Any:
    return sample[0]


def length_of(sample: Any) -> int:
    return int(sample[1])


def batches_of(
    rows: list[tuple[Any, int]],
    batch_size: int = 4,
    endless: bool = False,
    batcher: Any = as_list,
    **made: Any,
) -> SplitModalityBatchDataset[Any]:
    """Batches of a pool; by default groups have the shares that they have in it."""
    counts = Counter(group for group, _ in rows)
    made = {"group_by": group_of, "shares": counts, "window": 4, **made}
    return SplitModalityBatchDataset(
        Pool(rows, endless), ModalitySplit(**made), batch_size, batcher, sample_length=length_of
    )


def mixed(num_samples: int, every: int = 4) -> list[tuple[str, int]]:
    """Samples of which one in `every` is text, of lengths without an order."""
    return [
        ("text" if i % every == 1 else "images", 1 + (37 * i) % 101) for i in range(num_samples)
    ]


def passes(
    dataset: SplitModalityBatchDataset[Any], num_streams: int = 1
) -> tuple[list[list[list[Any]]], int]:
    """The batches of each stream of a finite pass, and how many samples were left out."""
    found, num_left_out = [], 0
    for index in range(num_streams):
        run = StreamRun(dataset, Stream(index, num_streams))
        batches: list[list[Any]] = []
        while (batch := next(run, None)) is not None:
            batches.append(batch)
            num_left_out += sum(r.num_samples for r in run.context.take_records())
        num_left_out += sum(r.num_samples for r in run.context.take_records())
        assert next(run, None) is None
        found.append(batches)
    return found, num_left_out


def groups_in(batch: list[Any]) -> set[Any]:
    return {sample[0] for sample in batch}


# ------------------------------------------------------------- the same group at the same step


@pytest.mark.parametrize("shares", [{"images": 3, "text": 1}, {"images": 0.2, "text": 0.8}])
def test_all_streams_have_the_group_of_the_cycle_and_shares_hold(shares: Any) -> None:
    dataset = batches_of(mixed(997), endless=True, shares=shares, max_surplus=1)
    schedule = GroupSchedule([shares["images"], shares["text"]], seed=0)
    runs = [StreamRun(dataset, Stream(index, 5)) for index in range(5)]
    num_texts = 0
    for cycle in range(120):
        wanted = ("images", "text")[schedule.group(cycle)]
        assert [groups_in(next(run)) for run in runs] == [{wanted}] * 5
        num_texts += wanted == "text"
        assert abs(num_texts - (cycle + 1) * shares["text"] / sum(shares.values())) < 5
    assert 0 < num_texts < 120


class Picky:
    """Fails on every batch with a sample whose number is divisible by 7."""

    __stateless__ = True

    def __call__(self, samples: list[Any]) -> list[Any]:
        if any(sample[2] % 7 == 0 for sample in samples):
            raise ValueError("no batch with that one")
        return samples


@stateless
def group_or_none(sample: Any) -> Any:
    if sample[2] % 5 == 3:
        raise SkipSample
    if sample[2] % 11 == 4:
        raise ValueError("cannot tell")
    return sample[0]


def test_failing_samples_and_batches_leave_ranks_in_step() -> None:
    dataset = batches_of(
        mixed(997), 2, endless=True, batcher=Picky(), group_by=group_or_none, max_surplus=1
    )
    schedule = GroupSchedule([3, 1], seed=0)
    runs = [StreamRun(dataset, Stream(index, 3), max_skip_rate=1) for index in range(3)]
    num_failed = 0
    for cycle in range(100):
        wanted = ("images", "text")[schedule.group(cycle)]
        assert [groups_in(next(run)) for run in runs] == [{wanted}] * 3
        num_failed += sum(r.stage == "map" for run in runs for r in run.context.take_records())
    assert num_failed > 10


def test_sample_whose_group_function_fails_is_skipped_and_counted() -> None:
    rows = mixed(110)
    (batches,), num_left_out = passes(batches_of(rows, group_by=group_or_none))
    given = [sample[2] for batch in batches for sample in batch]
    assert len(given) == len(set(given))
    assert len(given) + num_left_out == len(rows)
    assert num_left_out == sum(i % 5 == 3 or i % 11 == 4 for i in range(110))


# --------------------------------------------------------------------- the end of finite data


def test_dropping_ends_each_stream_with_the_cycle_that_has_no_full_batch() -> None:
    rows = mixed(400)
    streams, num_left_out = passes(batches_of(rows, end="drop"), 3)
    schedule = GroupSchedule([3, 1], seed=0)
    for batches in streams:
        assert len(batches) > 15
        for cycle, batch in enumerate(batches):
            assert groups_in(batch) == {("images", "text")[schedule.group(cycle)]}
    assert num_left_out == len(rows) - sum(len(b) for batches in streams for b in batches)


def test_samples_that_fill_batches_up_are_marked_in_their_keys() -> None:
    rows = mixed(37)
    dataset = batches_of(rows, 4, end="pad")
    run = StreamRun(dataset, Stream(0, 1))
    again, first = [], []
    while (batch := next(run, None)) is not None:
        assert dataset.restore_sample(run.key) == batch
        for key, sample in zip(run.key[2:], batch, strict=True):
            (again if key[0] == AGAIN else first).append((key, sample))
    assert sorted(sample[2] for _, sample in first) == list(range(37))
    num_images, num_texts = 28, 9
    assert len(again) == -num_images % 4 + -num_texts % 4
    assert [key[1] for key, _ in again] == list(range(len(again)))
    assert all(key[2] == ("pool", 0, sample[2], sample[2]) for key, sample in again)


# ------------------------------------- what the samplers that are known for it do wrong


def test_no_multimodal_sample_is_no_error() -> None:
    (batches,), _ = passes(batches_of([("text", 3)] * 10, shares={"images": 9, "text": 1}))
    assert [len(batch) for batch in batches] == [4, 4, 2]


def test_no_sample_at_all_ends_at_once() -> None:
    for end in ("keep", "drop", "pad"):
        assert passes(batches_of([], shares={"images": 1}, end=end), 2) == ([[], []], 0)


@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
def test_modality_smaller_than_half_a_batch_is_no_error(end: Any) -> None:
    rows = [("images", i) for i in range(1, 31)] + [("text", 1)] * 3
    (batches,), num_left_out = passes(batches_of(rows, 8, end=end))
    texts = [sample for batch in batches for sample in batch if sample[0] == "text"]
    assert len(texts) == {"keep": 3, "drop": 0, "pad": 8}[end]
    assert sum(map(len, batches)) + num_left_out == {"keep": 33, "drop": 33, "pad": 40}[end]


def test_samples_of_length_0_are_no_error() -> None:
    rows = [("text", i % 2) for i in range(20)]
    (batches,), _ = passes(batches_of(rows))
    assert sum(map(len, batches)) == 20


# ----------------------------------------------------------------- lengths, and reading ahead


def test_ranks_have_like_lengths_at_the_same_step() -> None:
    rows = [
        ("text" if word % 8 == 0 else "images", 1 + word % 997)
        for word in ((2_654_435_761 * i) % 2**32 >> 8 for i in range(40_000))
    ]

    def useful(**made: Any) -> float:
        dataset = batches_of(rows, 8, endless=True, **made)
        runs = [StreamRun(dataset, Stream(index, 4)) for index in range(4)]
        tokens = room = 0
        for _ in range(200):
            step = [[sample[1] for sample in next(run)] for run in runs]
            tokens += sum(map(sum, step))
            room += 4 * max(max(lengths) * len(lengths) for lengths in step)
        return tokens / room

    alone, short, long = useful(window=1), useful(window=8), useful(window=64)
    assert alone < 0.6
    assert short > 0.75
    assert long > 0.9


def test_longest_first_begins_each_group_with_its_longest() -> None:
    dataset = batches_of(mixed(64, every=2), 4, window=4, longest_first=True, endless=True)
    run = StreamRun(dataset, Stream(0, 1))
    longest: dict[str, list[int]] = {"images": [], "text": []}
    for _ in range(8):
        batch = next(run)
        longest[batch[0][0]].append(max(sample[1] for sample in batch))
    for found in longest.values():
        assert found[:3] == sorted(found[:3], reverse=True)


def test_reading_is_even_from_the_first_batch_on() -> None:
    dataset = batches_of(mixed(999, every=2), 4, window=32, endless=True)
    run = StreamRun(dataset, Stream(0, 1))
    read = []
    for _ in range(300):
        next(run)
        pool = run.snapshot().inner[0].inner[0]
        read.append(pool.count("place"))
    # The first window has 8 batches of each group. While windows grow twice as much is read.
    assert read[0] <= 2 * 9 * 4
    steps = [after - before for before, after in itertools.pairwise(read)]
    assert max(steps) <= 2 * 4 * 8
    assert read[-1] - 300 * 4 <= 2 * 33 * 4


def test_buffered_samples_stay_near_the_window() -> None:
    dataset = batches_of(mixed(997, every=5), 4, window=16, endless=True)
    run = StreamRun(dataset, Stream(0, 1))
    for _ in range(400):
        next(run)
        assert len(run.snapshot().inner[0].field("keys")) <= 2.5 * 16 * 4


# ------------------------------------------------------------- shares that the data do not have


def test_shares_far_from_those_of_the_data_stop_the_run_and_are_named() -> None:
    dataset = batches_of(mixed(997), endless=True, shares={"images": 1, "text": 1})
    run = StreamRun(dataset, Stream(0, 1))
    with pytest.raises(FatalSampleError) as caught:
        run.skip(10_000)
    text = str(caught.value)
    assert "stream 0 buffers" in text
    assert "of group 'images' that its share does not take" in text
    assert "'images': 0.5, 'text': 0.5" in text
    assert "'images': 0.75" in text
    assert "max_surplus above 0.05" in text


def test_state_before_that_resumes_with_a_higher_max_surplus() -> None:
    shares = {"images": 1, "text": 1}
    strict = batches_of(mixed(997), endless=True, shares=shares, max_surplus=0)
    loose = batches_of(mixed(997), endless=True, shares=shares, max_surplus=1)
    assert strict.config() == loose.config()
    run = StreamRun(strict, Stream(0, 1))
    state: Any = None
    with suppress(FatalSampleError):
        while True:
            state = run.snapshot().to_json()
            next(run)
    assert state["items"] > 50
    expected = StreamRun(loose, Stream(0, 1))
    expected.skip(state["items"])
    resumed = StreamRun(loose, Stream(0, 1))
    resumed.restore(Snapshot.from_json(state))
    for _ in range(100):
        assert next(resumed) == next(expected)
    records = resumed.context.take_records()
    assert len(records) > 50
    assert {(r.stage, r.on_purpose) for r in records} == {("modality_batch", True)}
    assert "more of its group than the share of the group takes" in records[0].error


def test_group_of_share_0_is_buffered_until_it_is_too_large() -> None:
    dataset = batches_of(mixed(997, every=2), endless=True, shares={"images": 1, "text": 0})
    with pytest.raises(FatalSampleError, match="group 'text' that its share does not take"):
        StreamRun(dataset, Stream(0, 1)).skip(1_000)


def test_group_without_a_share_is_refused_by_the_name_of_its_sample() -> None:
    rows = [*mixed(8), ("video", 3)]
    with pytest.raises(FatalSampleError, match=r"'pool\[8\]': group_by returned 'video', which"):
        passes(batches_of(rows, shares={"images": 3, "text": 1}))


# --------------------------------------------------------------------- through the whole pipeline

SIZES = {"pictures": 60, "stories": 40, "chats": 20}
BLEND = """
blend:
  - path: ./pictures
    weight: 6
  - path: ./stories
    weight: 3
  - path: ./chats
    weight: 1
"""
ONCE = """
blend_epochized:
  - path: ./pictures
    repetitions: 1
  - path: ./stories
    repetitions: 1
  - path: ./chats
    repetitions: 1
"""
KINDS = {"pictures/train": "images", "stories/train": "text", "chats/train": "text"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modalities")
    for name, size in SIZES.items():
        text_set(folder / name, size)
    return folder


class Splitting(DefaultTaskEncoder):
    """Batches of one modality, of samples that say where they are from."""

    batching = ModalitySplit(KINDS, window=3)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        number = number_of(sample)
        if number % 13 == 5:
            raise SkipSample
        source = sample.__restore_key__[0]
        made = {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "source": source,
            "input_ids": torch.full((1 + number % 9,), number),
            "noise": sample_rng().random(),
        }
        return {**made, "images": [number]} if KINDS[source] == "images" else made

    def sample_length(self, sample: dict[str, Any]) -> dict[str, int]:
        return {"tokens": len(sample["input_ids"]), "tiles": 3}

    @stateless
    def batch(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "keys": [sample["__key__"] for sample in samples],
            "sources": [sample["source"] for sample in samples],
            "noise": [sample["noise"] for sample in samples],
        }


class BySource(Splitting):
    batching = ModalitySplit("source", window=2)


def pipeline(root: Path, encoder: Any = Splitting, blend: str = BLEND, **made: Any) -> Any:
    path = root / f"{encoder.__name__}.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    path.write_text(head + textwrap.indent(blend.strip("\n"), "    ") + "\n")
    made = {"batch_size": 2, "shuffle_buffer_size": 4, "max_samples_per_sequence": 3, **made}

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return get_train_dataset(path, worker_config=config, task_encoder=encoder(), **made)

    return make


def kinds_in(batch: dict[str, Any]) -> set[str]:
    return {KINDS[source] for source in batch["sources"]}


def assert_pure(found: dict[int, Any], num_streams: int) -> None:
    """All batches of a cycle are of one modality, and the same."""
    assert found
    by_cycle: dict[int, set[str]] = {}
    for slot, batch in found.items():
        by_cycle.setdefault(slot // num_streams, set()).update(kinds_in(batch))
    assert all(len(kinds) == 1 for kinds in by_cycle.values())


def test_shares_of_the_blend_hold_in_every_stretch(root: Path) -> None:
    (loader,) = Ranks(pipeline(root), 1, num_streams=2).loaders
    num_images = 0
    for number, batch in enumerate(itertools.islice(loader, 400), 1):
        num_images += kinds_in(batch) == {"images"}
        # Two streams, each within 5 batches.
        assert abs(num_images - 0.6 * number) < 10


def test_each_source_has_its_weight_where_groups_are_sources(root: Path) -> None:
    (loader,) = Ranks(pipeline(root, BySource), 1, num_streams=1).loaders
    batches = list(itertools.islice(loader, 300))
    assert all(len(set(batch["sources"])) == 1 for batch in batches)
    found = Counter(batch["sources"][0] for batch in batches)
    for name, share in (("pictures", 0.6), ("stories", 0.3), ("chats", 0.1)):
        assert abs(found[f"{name}/train"] - 300 * share) < 5


def test_loader_refuses_a_world_size_that_does_not_divide_the_streams(root: Path) -> None:
    make = pipeline(root)
    with pytest.raises(ValueError, match=r"world_size=3 does not divide num_streams=4") as caught:
        Ranks(make, 3, num_streams=4)
    assert "resume with 1, 2 or 4 ranks" in str(caught.value)
    run = Ranks(make, 2, num_streams=4)
    run.steps(6)
    states = run.save()
    for world_size in (3, 8):
        with pytest.raises(StateError, match=rf"world_size={world_size} does not divide"):
            Ranks(make, world_size, states=states)


def test_loader_refuses_to_resume_inside_a_step(root: Path) -> None:
    make = pipeline(root)
    run = Ranks(make, 2, num_streams=4)
    run.steps(3)
    states = run.save()
    with pytest.raises(StateError, match=r"6 batches, which are no whole steps") as caught:
        Ranks(make, 4, states=states)
    assert "resume with 1 or 2 ranks" in str(caught.value)
    assert_pure(Ranks(make, 2, states=states).steps(5), 4)
    assert_pure(Ranks(make, 1, states=states).steps(5), 4)


def test_other_pipelines_run_on_any_world_size(root: Path) -> None:
    make = pipeline(root, DefaultTaskEncoder)
    assert not make(WorkerConfig(rank=0, world_size=1, num_workers=0)).traits.lockstep
    Ranks(make, 3, num_streams=4).steps(1)


def test_batch_drop_last_drops_what_fills_no_batch(root: Path) -> None:
    make = pipeline(root, Splitting, ONCE, batch_size=4, batch_drop_last=True, repeat=False)
    found = Ranks(make, 2, num_streams=2).rest()
    assert {len(batch["keys"]) for batch in found.values()} == {4}
    assert_pure(found, 2)


def test_weights_edited_in_the_run_change_the_shares_of_what_follows(root: Path) -> None:
    run = Ranks(pipeline(root), 2, num_streams=2)
    run.steps(9)
    states = run.save()
    edited = BLEND.replace("weight: 6", "weight: 36")
    with pytest.raises(StateError, match="migrate=True"):
        Ranks(pipeline(root, blend=edited), 2, states=states)
    new = Ranks(pipeline(root, blend=edited), 2)
    for loader in new.loaders:
        loader.restore_state_global(states, migrate=True)
    new.iterators = [iter(loader) for loader in new.loaders]
    found = new.steps(100)
    assert_pure(found, 2)
    assert abs(sum(kinds_in(batch) == {"images"} for batch in found.values()) - 180) < 12
    with pytest.raises(StateError, match="groups"):
        Ranks(pipeline(root, BySource), 2, states=states)


# ------------------------------------------------------------------------------ refused settings


def source(root: Path, name: str = "pictures", **order: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_train_dataset(root / name, worker_config=config, batch_size=None, **order)


def tokens(sample: Any) -> int:
    return len(sample.text)


def split_of(dataset: Any, split: Any, batcher: Any = as_list, **made: Any) -> Any:
    made = {"sample_length": tokens, **made}
    return SplitModalityBatchDataset(dataset, split, 2, batcher, **made)


def expanding(samples: list[Any]) -> Iterator[list[Any]]:
    yield samples


def test_settings_that_do_not_fit_are_refused(root: Path) -> None:
    pictures, stories = source(root), source(root, "stories")
    pair = BlendDataset((pictures, 1), (stories, 1))
    by_source = ModalitySplit("source")
    with pytest.raises(TypeError, match="must be a ModalitySplit"):
        split_of(pair, "source")
    with pytest.raises(TypeError, match="pass sample_length"):
        split_of(pair, by_source, sample_length=None)
    with pytest.raises(ValueError, match="is a generator; a batch of one group must stay one"):
        split_of(pair, by_source, expanding)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        SplitModalityBatchDataset(pair, by_source, 0, as_list, sample_length=tokens)
    with pytest.raises(ValueError, match=r"no group for source 'stories/train'.* Add"):
        split_of(pair, ModalitySplit({"pictures/train": "images"}))
    with pytest.raises(ValueError, match=r"group_by\['stories/train'\]=1.5 is no group"):
        split_of(pair, ModalitySplit({"pictures/train": "images", "stories/train": 1.5}))
    with pytest.raises(ValueError, match="shares has no entry for group 'stories/train'"):
        split_of(pair, ModalitySplit("source", {"pictures/train": 1}))


def test_weights_that_are_no_share_of_batches_are_refused(root: Path) -> None:
    pictures, stories = source(root), source(root, "stories")
    by_source = ModalitySplit("source")
    rising = BlendDataset((pictures, Schedule("linear", ((0, 0.5), (9, 1.0)))), (stories, 1))
    with pytest.raises(ValueError, match=r"follows a schedule.* Give ModalitySplit the parts"):
        split_of(rising, by_source)
    by_tokens = TokenBlendDataset((pictures, 1), (stories, 1))
    with pytest.raises(ValueError, match=r"shares of tokens.* Give ModalitySplit the parts"):
        split_of(by_tokens, by_source)
    actual_shares = ModalitySplit("source", {"pictures/train": 1, "stories/train": 1})
    assert split_of(rising, actual_shares).endless
    assert split_of(by_tokens, actual_shares).endless


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ({"batch_size": None}, "has no batch_size"),
        ({"batch_size": 2, "packing_buffer_size": 4}, "has no select_samples_to_pack"),
    ],
)
def test_pipeline_without_what_it_needs_is_refused(root: Path, made: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pipeline(root, **made)(WorkerConfig(rank=0, world_size=1, num_workers=0))


def test_batches_that_a_hook_takes_apart_are_refused(root: Path) -> None:
    class Halving(Splitting):
        @stateless
        def encode_batch(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield batch

    with pytest.raises(ValueError, match=r"Halving.encode_batch is a generator; .* out of step"):
        pipeline(root, Halving)(WorkerConfig(rank=0, world_size=1, num_workers=0))


def test_padding_and_dropping_at_once_are_refused(root: Path) -> None:
    class Padding(Splitting):
        batching = ModalitySplit(KINDS, end="pad")

    with pytest.raises(ValueError, match='batch_drop_last=True contradicts end="pad"'):
        pipeline(root, Padding, batch_drop_last=True)(
            WorkerConfig(rank=0, world_size=1, num_workers=0)
        )


def test_measured_samples_are_taken_as_they_are() -> None:
    pool = Pool(mixed(40))
    measured = MeasureDataset(pool, UserFunction(length_of, name="sample_length"))
    split = ModalitySplit(group_of, {"images": 3, "text": 1}, window=2)
    dataset = SplitModalityBatchDataset(measured, split, 4, as_list)
    assert dataset.traits.lockstep
    assert BatchDataset(dataset, 2, as_list).traits.lockstep
    assert len(dataset) == 10
    assert sum(len(batch) for batch in dataset) == 40


def test_loader_of_a_pool_counts_its_samples() -> None:
    loader = get_savable_loader(batches_of(mixed(40)))
    assert sum(len(batch) for batch in loader) == 40
