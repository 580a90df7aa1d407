"""Batches of one group planned by a length index: pure steps, like lengths, nothing lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    DefaultTaskEncoder,
    ModalitySplit,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.topology import Stream
from energon_lite.extras.lengths.length_index import measure_lengths

from ..helpers import metadataset, number_of, text_set

NUM_SAMPLES = 700
STREAMS, BATCH = 4, 3


def length_of(number: int) -> int:
    return 1 + number * 7919 % 211


def has_image(number: int) -> bool:
    return number % 11 > 0


class Encoder(DefaultTaskEncoder):
    """Batches are lists of numbers; every eleventh sample is text only."""

    def __init__(self, **split: Any) -> None:
        super().__init__()
        given = {"group_by": "modality", "lengths": "index", "window": 8, **split}
        self.batching = ModalitySplit(**given)

    def sample_length(self, sample: TextSample) -> dict[str, int]:
        number = number_of(sample)
        return {"tokens": length_of(number), "images": int(has_image(number))}

    @stateless
    def batch(self, samples: list[TextSample]) -> list[int]:
        return [number_of(sample) for sample in samples]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = text_set(tmp_path_factory.mktemp("planned") / "texts", NUM_SAMPLES)
    measure_lengths(root, Encoder(), name="index", num_workers=0)
    return root


def batched(
    path: Any, encoder: Encoder, rank: int = 0, world_size: int = 1, **more: Any
) -> SavableDataset[Any]:
    where = {"num_workers": 0, "num_streams": STREAMS, **more.pop("where", {})}
    config = WorkerConfig(rank=rank, world_size=world_size, **where)
    given = {"batch_size": BATCH, "repeat": False, "shuffle_buffer_size": 50, **more}
    return get_train_dataset(path, task_encoder=encoder, worker_config=config, **given)


def streams_of(dataset: SavableDataset[Any]) -> list[list[list[int]]]:
    return [list(StreamRun(dataset, Stream(index, STREAMS))) for index in range(STREAMS)]


def steps_of(dataset: SavableDataset[Any]) -> list[tuple[list[int], ...]]:
    return list(zip(*streams_of(dataset), strict=False))


def useful(steps: list[Any]) -> float:
    """Tokens in the room of all ranks until the fullest is done."""
    areas = [[len(b) * max(map(length_of, b)) for b in step] for step in steps]
    tokens = sum(length_of(number) for step in steps for b in step for number in b)
    return tokens / (STREAMS * sum(map(max, areas)))


def test_ranks_have_like_lengths(root: Path) -> None:
    endless = batched(root, Encoder(end="drop", window=16))
    assert useful(steps_of(endless)) > 0.85
    assert useful(steps_of(batched(root, Encoder(end="drop", window=1)))) < 0.6


def test_first_plan_may_begin_with_the_longest(root: Path) -> None:
    steps = steps_of(batched(root, Encoder(longest_first=True)))
    longest = [max(length_of(n) for batch in step for n in batch) for step in steps]
    assert longest[0] == max(longest)
    # The last ones have what fills no step of each group.
    assert longest[:-2] == sorted(longest[:-2], reverse=True)


@pytest.mark.parametrize("sizes", [(0, 30), (5, 3), (13, 40)])
@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
def test_any_group_may_be_empty_and_any_size_indivisible(
    tmp_path: Path, sizes: tuple[int, int], end: Any
) -> None:
    """prismatic's sampler fails with no multimodal samples, and with less than half a batch."""
    num_texts, num_images = sizes

    class Sized(Encoder):
        def sample_length(self, sample: TextSample) -> dict[str, int]:
            return {"tokens": 5, "images": int(number_of(sample) >= num_texts)}

    root = text_set(tmp_path / "texts", num_texts + num_images, num_shards=1)
    measure_lengths(root, Sized(), name="index", num_workers=0)
    streams = streams_of(batched(root, Sized(end=end)))
    found = Counter(n for own in streams for batch in own for n in batch)
    for first, size in ((0, num_texts), (num_texts, num_images)):
        given = [found[n] for n in range(first, first + size)]
        rest = size % (STREAMS * BATCH)
        if end == "keep":
            assert given == [1] * size
        elif end == "drop":
            assert sorted(given) == [0] * rest + [1] * (size - rest)
        else:
            assert sum(given) == -(-size // (STREAMS * BATCH)) * STREAMS * BATCH
            assert min(given, default=1) >= 1
    assert all(len({n >= num_texts for n in batch}) == 1 for own in streams for batch in own)


def test_regression_batch_that_fails_whole_is_passed_over(root: Path) -> None:
    """`batch` was called with no samples."""

    class NoTexts(Encoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> TextSample:
            if not has_image(number_of(sample)):
                raise SkipSample
            return sample

    expected = [number for number in range(NUM_SAMPLES) if has_image(number)]
    streams = streams_of(batched(root, NoTexts()))
    assert all(batch for own in streams for batch in own)
    assert sorted(n for own in streams for batch in own for n in batch) == expected


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_batch_that_fails_whole_keeps_its_slot(root: Path, batch_size: int) -> None:
    """Else ranks have batches of different groups at a step from then on."""
    broken = {7, 8, 22, 55, 300, 301}  # of both groups

    class Breaks(Encoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> TextSample:
            if number_of(sample) in broken:
                raise ValueError("broken")
            return sample

    dataset = batched(root, Breaks(), batch_size=batch_size)
    whole = streams_of(batched(root, Encoder(), batch_size=batch_size))
    runs = [StreamRun(dataset, Stream(index, STREAMS), max_skip_rate=1) for index in range(STREAMS)]
    found = [[(batch, run.key) for batch in run] for run in runs]
    assert [*map(len, found)] == [*map(len, whole)]
    num_lost = 0
    for own, expected in zip(found, whole, strict=True):
        for (batch, key), other in zip(own, expected, strict=True):
            assert {*map(has_image, batch)} == {*map(has_image, other)}
            left = [number for number in other if number not in broken]
            assert batch == left or (not left and all(k[0] == "repeated" for k in key[2:]))
            num_lost += not left
    assert num_lost or batch_size > 1
    lost = [record.restore_key[2] for run in runs for record in run.context.take_records()]
    assert sorted(lost) == sorted(broken)
    for key in [key for own in found for _, key in own if key[2][0] == "repeated"]:
        assert len(dataset.restore_sample(key)) == batch_size

    resumed = StreamRun(dataset, Stream(1, STREAMS), max_skip_rate=1)
    for number, (batch, key) in enumerate(found[1]):
        if number % 25 == 0:
            again = StreamRun(dataset, Stream(1, STREAMS), max_skip_rate=1)
            again.restore(resumed.snapshot())
            resumed = again
        assert (next(resumed), resumed.key) == (batch, key)


def test_a_group_of_which_nothing_can_be_read_ends_the_run(root: Path) -> None:
    class Breaks(Encoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> TextSample:
            if not has_image(number_of(sample)):
                raise ValueError("broken")
            return sample

    with pytest.raises(FatalSampleError, match="ranks would come out of step"):
        list(StreamRun(batched(root, Breaks()), Stream(0, STREAMS), max_skip_rate=1))


def test_sources_and_dicts_are_groups(root: Path) -> None:
    entries = [{"path": str(root), "name": n, "weight": w} for n, w in (("a", 1), ("b", 5))]
    blend = metadataset({"blend": entries})

    class Named(Encoder):
        @stateless
        def batch(self, samples: list[TextSample]) -> Any:
            return [sample.__restore_key__[0] for sample in samples]

    for group_by, num_kinds in (("source", {1}), ({"a": "x", "b": "x"}, {1, 2})):
        items = iter(get_savable_loader(batched(blend, Named(group_by=group_by), repeat=True)))
        steps = [[next(items) for _ in range(STREAMS)] for _ in range(60)]
        assert {len({n for batch in step for n in batch}) for step in steps} == num_kinds
        counts = Counter(n for step in steps for batch in step for n in batch)
        assert np.isclose(counts["b"] / counts["a"], 5, rtol=0.5)
    with pytest.raises(ValueError, match="no group for source 'b'"):
        batched(blend, Named(group_by={"a": 1}), repeat=True)
