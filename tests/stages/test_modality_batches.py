"""Batches of one modality: what a stream and the ranks do besides the laws of all lists."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BatchDataset,
    BlendDataset,
    DefaultTaskEncoder,
    FatalSampleError,
    ModalitySplit,
    SkipSample,
    SplitModalityBatchDataset,
    StateError,
    TextSample,
    WorkerConfig,
    stateless,
)
from energon_lite.batching.modality import GroupSchedule
from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.order.schedules import Schedule
from energon_lite.stages.blend import TokenBlendDataset

from ..helpers import Ranks, blend_maker, ignore, number_of, source_of, text_set

NUM_TEXTS = 997
QUIET = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
ONE_STREAM = Stream(0, 1)


@stateless
def as_list(samples: list[TextSample]) -> list[int]:
    return [number_of(sample) for sample in samples]


def group_of(sample: TextSample, every: int = 4) -> str:
    """Of which one in `every` is text."""
    return "text" if number_of(sample) % every == 1 else "images"


def kind_of(number: int) -> str:
    return "text" if number % 4 == 1 else "images"


def length_of(number: int) -> int:
    """Lengths without an order."""
    return 1 + (37 * number) % 101


def batches_of(
    root: Path, batch_size: int = 4, endless: bool = False, batcher: Any = as_list, **made: Any
) -> SplitModalityBatchDataset[Any]:
    """Batches in file order; by default groups have the shares that they have in the data."""
    shares = {"images": 3, "text": 1}
    split = ModalitySplit(**{"group_by": group_of, "shares": shares, "window": 4, **made})
    source = source_of(root, repeat=endless, config=QUIET, shuffle_over_epochs=None)
    return SplitModalityBatchDataset(
        source, split, batch_size, batcher, sample_length=lambda s: length_of(number_of(s))
    )


@stateless
def picky(samples: list[TextSample]) -> list[int]:
    """Fails on every batch with a sample whose number is divisible by 7."""
    if any(number_of(sample) % 7 == 0 for sample in samples):
        raise ValueError("no batch with that one")
    return as_list(samples)


@stateless
def group_or_none(sample: TextSample) -> str:
    if number_of(sample) % 5 == 3:
        raise SkipSample
    if number_of(sample) % 11 == 4:
        raise ValueError("cannot tell")
    return group_of(sample)


def test_failing_samples_and_batches_leave_ranks_in_step(texts) -> None:
    dataset = batches_of(
        texts, 2, endless=True, batcher=picky, group_by=group_or_none, max_surplus=1
    )
    schedule = GroupSchedule([3, 1], seed=0)
    runs = [StreamRun(dataset, Stream(index, 3), max_skip_rate=1) for index in range(3)]
    num_failed = 0
    for cycle in range(100):
        wanted = ("images", "text")[schedule.group(cycle)]
        assert {kind_of(number) for run in runs for number in next(run)} == {wanted}
        num_failed += sum(r.stage == "map" for run in runs for r in run.context.take_records())
    assert num_failed > 10


# ------------------------------------------------------------- shares that the data do not have


def test_shares_far_from_those_of_the_data_stop_the_run_and_are_named(texts) -> None:
    dataset = batches_of(texts, endless=True, shares={"images": 1, "text": 1})
    with pytest.raises(FatalSampleError) as caught:
        StreamRun(dataset, ONE_STREAM).skip(10_000)
    for words in (
        "stream 0 buffers", "of group 'images' that its share does not take", "'images': 0.75",
        "'images': 0.5, 'text': 0.5", "max_surplus above 0.05",
    ):  # fmt: skip
        assert words in str(caught.value)


def test_state_before_that_resumes_with_a_higher_max_surplus(texts) -> None:
    shares = {"images": 1, "text": 1}
    strict, loose = (
        batches_of(texts, endless=True, shares=shares, max_surplus=most) for most in (0, 1)
    )
    assert strict.config() == loose.config()
    run = StreamRun(strict, ONE_STREAM)
    state: Any = None
    with suppress(FatalSampleError):
        while True:
            state = run.snapshot().to_json()
            next(run)
    assert state["items"] > 50
    expected, resumed = StreamRun(loose, ONE_STREAM), StreamRun(loose, ONE_STREAM)
    expected.skip(state["items"])
    resumed.restore(Snapshot.from_json(state))
    for _ in range(100):
        assert next(resumed) == next(expected)
    records = resumed.context.take_records()
    assert len(records) > 50
    assert {(r.stage, r.on_purpose) for r in records} == {("modality_batch", True)}
    assert "more of its group than the share of the group takes" in records[0].error


def test_group_without_a_share_is_refused_by_the_name_of_its_sample(text_sets) -> None:
    dataset = batches_of(text_sets(37), shares={"images": 3})
    with pytest.raises(FatalSampleError, match=r"'00001': group_by returned 'text', which"):
        next(StreamRun(dataset, ONE_STREAM))


# --------------------------------------------------------------------- through the whole pipeline

BLEND = """
blend:
  - {path: ./pictures, weight: 6}
  - {path: ./stories, weight: 3}
  - {path: ./chats, weight: 1}
"""
ONCE = "concat: [{path: ./pictures}, {path: ./stories}, {path: ./chats}]"
KINDS = {"pictures/train": "images", "stories/train": "text", "chats/train": "text"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modalities")
    for name, size in {"pictures": 60, "stories": 40, "chats": 20}.items():
        text_set(folder / name, size)
    return folder


class Splitting(DefaultTaskEncoder):
    """Batches of one modality, which say where their samples are from."""

    batching = ModalitySplit(KINDS, window=3)

    def sample_length(self, sample: TextSample) -> dict[str, int]:
        return {"tokens": 1 + number_of(sample) % 9, "tiles": 3}

    @stateless
    def batch(self, samples: list[TextSample]) -> list[str]:
        return [sample.__restore_key__[0] for sample in samples]


class BySource(Splitting):
    batching = ModalitySplit("source", window=2)


def pipeline(root: Path, encoder: Any = Splitting, blend: str = BLEND, **made: Any) -> Any:
    made = {"batch_size": 2, "shuffle_buffer_size": 4, "max_samples_per_sequence": 3, **made}
    return blend_maker(root, blend, encoder, **made)


def assert_pure(found: dict[int, Any], num_streams: int) -> None:
    """All batches of a cycle are of one modality, and the same."""
    assert found
    by_cycle: dict[int, set[str]] = {}
    for slot, sources in found.items():
        by_cycle.setdefault(slot // num_streams, set()).update(KINDS[name] for name in sources)
    assert all(len(kinds) == 1 for kinds in by_cycle.values())


def test_shares_of_the_blend_hold_in_every_stretch(root) -> None:
    (loader,) = Ranks(pipeline(root), 1, num_streams=2).loaders
    num_images = 0
    for number, sources in enumerate(itertools.islice(loader, 400), 1):
        num_images += sources[0] == "pictures/train"
        assert abs(num_images - 0.6 * number) < 10  # two streams, each within 5 batches


def test_loader_refuses_a_world_size_that_does_not_divide_the_streams(root) -> None:
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
    assert BatchDataset(make(QUIET), 2, as_list).traits.lockstep
    Ranks(pipeline(root, DefaultTaskEncoder), 3, num_streams=4).steps(1)  # others run on any


def test_loader_refuses_to_resume_inside_a_step(root) -> None:
    make = pipeline(root)
    run = Ranks(make, 2, num_streams=4)
    run.steps(3)
    states = run.save()
    with pytest.raises(StateError, match=r"6 batches, which are no whole steps") as caught:
        Ranks(make, 4, states=states)
    assert "resume with 1 or 2 ranks" in str(caught.value)
    for world_size in (2, 1):
        assert_pure(Ranks(make, world_size, states=states).steps(5), 4)


def test_batch_drop_last_drops_what_fills_no_batch(root) -> None:
    make = pipeline(root, Splitting, ONCE, batch_size=7, batch_drop_last=True, repeat=False)
    make_with_shares = ModalitySplit(KINDS, {"images": 1, "text": 1}, window=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Splitting, "batching", make_with_shares)
        found = Ranks(make, 2, num_streams=2).rest()
    assert {len(sources) for sources in found.values()} == {7}
    assert_pure(found, 2)


def test_weights_edited_in_the_run_change_the_shares_of_what_follows(root) -> None:
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
    num_images = sum(sources[0] == "pictures/train" for sources in found.values())
    assert abs(num_images - 180) < 12
    with pytest.raises(StateError, match="groups"):
        Ranks(pipeline(root, BySource), 2, states=states)


def test_weights_that_are_no_share_of_batches_need_shares(text_sets) -> None:
    pictures, stories = (source_of(text_sets(37), name=n, repeat=True) for n in "ab")
    split = ModalitySplit("source", {"a": 1, "b": 1})
    rising = BlendDataset((pictures, Schedule("linear", ((0, 0.5), (9, 1.0)))), (stories, 1))
    for blend in (rising, TokenBlendDataset((pictures, 1), (stories, 1))):
        assert SplitModalityBatchDataset(blend, split, 2, as_list, sample_length=len).endless
