"""Buffers of endless data that have an epoch at most: each sample once before any comes again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    Packing,
    SavableDataset,
    ShuffleBufferDataset,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.keys import leaves

from ..conftest import examples
from ..helpers import assert_same, blend_maker, number_of, text_set


class Lists(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Samples of 10 to 49 tokens; lists are their leaves: source, epoch, index."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.__dict__.update(settings)

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample

    def sample_length(self, sample: TextSample) -> int:
        return 10 + number_of(sample) * 17 % 40

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[Any]:
        return [leaf[:3] for sample in samples for leaf in leaves(sample.__restore_key__)]

    @stateless
    def batch(self, items: list[Any]) -> list[Any]:
        if not isinstance(items[0], list):
            return self.pack_selected_samples(items)
        return [leaf for pack in items for leaf in pack]

    def slice_sample(self, sample: TextSample, start: int, stop: int) -> TextSample:
        return sample


class Shuffled(Lists):
    def build_encode_sample(self, dataset: Any, **settings: Any) -> SavableDataset[Any]:
        below = super().build_encode_sample(dataset, **settings)
        return ShuffleBufferDataset(below, 1000)


KINDS: dict[str, Callable[[], Any]] = {
    "packs": lambda: Lists(packing=Packing(capacity=256)),
    "packs without a last one": lambda: Lists(packing=Packing(capacity=256, drop_last=True)),
    "best fit": lambda: Lists(packing=Packing(capacity=256, algorithm="best")),
    "long packs": lambda: Lists(packing=Packing(capacity=4000, buffer_size=Packing(1).buffer_size)),
    "packs of parts": lambda: Lists(packing=Packing(capacity=30, overlong="split")),
    "buckets": lambda: Lists(batching=Buckets()),
    "shuffled": lambda: Shuffled(),
}
SIZES = (37, 100, 160)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("small")
    return {number: text_set(folder / str(number), number) for number in SIZES}


def maker(root: Path, kind: str, batch_size: int = 4, **settings: Any) -> Any:
    encoder, settings = KINDS[kind](), {"shuffle_buffer_size": 8, **settings}

    def make(config: WorkerConfig) -> Any:
        settings.update(worker_config=config, batch_size=batch_size, task_encoder=encoder)
        return get_train_dataset(root, **settings)

    return make


def batches(make: Any, num_streams: int, number: int) -> list[Any]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
    return list(islice(get_savable_loader(make(config)), number))


@pytest.mark.parametrize("kind", ["packs", "packs without a last one", "best fit", "buckets"])
@pytest.mark.parametrize(("number", "num_streams"), [(100, 8), (37, 2)])
def test_texts_come_once_in_an_epoch_and_in_a_batch(roots, kind, number, num_streams) -> None:
    found = batches(maker(roots[number], kind), num_streams, 60)
    seen = [leaf[2] for batch in found for leaf in batch]
    assert len(seen) > 1.2 * number
    # With whole batches an epoch of a stream takes part of the next turn.
    assert len(set(seen[:number])) >= (0.95 if kind == "buckets" else 0.97) * number
    for batch in found:
        indices = [leaf[2] for leaf in batch]
        assert len(indices) == len(set(indices))


@pytest.mark.parametrize("kind", KINDS)
@examples(4)
@given(number=st.sampled_from(SIZES), num_streams=st.integers(1, 9), batch_size=st.integers(1, 3))
def test_epochs_of_a_stream_follow_each_other(roots, kind, number, num_streams, batch_size) -> None:
    """Nothing of an epoch comes before all of the last one, and none is lost."""
    assume(number // num_streams >= 2 * batch_size)  # else packs would be nearly empty
    found = batches(maker(roots[number], kind, batch_size), num_streams, 12 * num_streams)
    for index in range(num_streams):
        own = [leaf for batch in found[index::num_streams] for leaf in batch]
        epochs = [leaf[1] for leaf in own]
        assert all(a <= b for a, b in pairwise(epochs))
        for epoch in range(epochs[-1]):
            once = {leaf for leaf in own if leaf[1] == epoch}
            assert len(once) in (number // num_streams, -(-number // num_streams))


def test_buffer_of_a_size_that_was_asked_for_joins_epochs(roots) -> None:
    KINDS["asked"] = lambda: Lists(packing=Packing(capacity=256, buffer_size=256))
    try:
        asked = batches(maker(roots[100], "asked"), 4, 8)
        assert any(len({leaf[1] for leaf in batch}) > 3 for batch in asked)
        # Finite passes are the same with and without.
        finite = {"repeat": False}
        make = (maker(roots[100], kind, **finite) for kind in ("asked", "packs"))
        assert_same(*(batches(own, 4, 100) for own in make))
    finally:
        del KINDS["asked"]


def test_blend_of_small_sources_comes_in_parts_of_an_epoch(tmp_path) -> None:
    for name, number in (("a", 60), ("b", 40)):
        text_set(tmp_path / name, number)
    split = "blend: [{path: a, weight: 60}, {path: b, weight: 40}]"
    make = blend_maker(tmp_path, split, KINDS["packs"], shuffle_buffer_size=8, batch_size=4)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=4)
    found = list(islice(get_savable_loader(make(config)), 60))
    seen = [(leaf[0], leaf[2]) for batch in found for leaf in batch]
    assert len(set(seen[:100])) >= 85
    again = sum(len(b) - len({(leaf[0], leaf[2]) for leaf in b}) for b in found)
    assert again < 0.02 * len(seen)
