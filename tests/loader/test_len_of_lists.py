"""`len` of packs, buckets and groups: nothing is read, and no pass has more batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    BlendDataset,
    Buckets,
    DefaultTaskEncoder,
    ModalitySplit,
    Packing,
    SavableDataLoader,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.balance import CostModel

from ..conftest import examples, write_tar
from ..helpers import assert_same, prepared

SIZES = (1, 9, 50, 130)


class Lists(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Counts the samples that are encoded; packs are lists of keys."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.calls = 0
        self.__dict__.update(settings)

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        self.calls += 1
        return sample

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[str]:
        return [sample.__key__ for sample in samples]

    @stateless
    def batch(self, samples: list[Any]) -> Any:
        return samples if isinstance(samples[0], list) else [s.__key__ for s in samples]


class Skipping(Lists):
    packing = Packing(capacity=256, buffer_size=16)

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        if int(sample.__key__) % 3 == 0:
            raise SkipSample
        return sample


class Selecting(Lists):
    @stateless
    def select_samples_to_pack(self, samples: list[TextSample]) -> list[list[TextSample]]:
        return [samples[i : i + 7] for i in range(0, len(samples), 7)]


def length_of(sample: TextSample) -> int:
    return len(sample.text) % 5


class Groups(Lists):
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return length_of(sample), None


class SizedGroups(Lists):
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, int]:
        return length_of(sample), 2 + length_of(sample)


def balanced() -> Packing:
    cost = CostModel(token=1, token_squared=0.01)
    return Packing(capacity=256, buffer_size=16, balance="quantile_sync", cost=cost)


def modality(end: Any) -> ModalitySplit:
    # The shares are those of the data.
    shares = dict.fromkeys(range(5), 1.0)
    return ModalitySplit(length_of, shares=shares, window=2, end=end, max_surplus=1)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packs": (lambda: Lists(packing=Packing(capacity=256, buffer_size=16)), {}),
    "best fit": (lambda: Lists(packing=Packing(capacity=256, algorithm="best")), {}),
    "packs of groups": (lambda: Lists(packing=Packing(capacity=256, group_by=length_of)), {}),
    "balanced": (lambda: Lists(packing=balanced()), {}),
    "selected": (Selecting, {"packing_buffer_size": 20}),
    "skipping": (Skipping, {}),
    "buckets": (lambda: Lists(batching=Buckets(window=20)), {"batch_size": 4}),
    "buckets by source": (
        lambda: Lists(batching=Buckets(window=20, group_by="source")), {"batch_size": 4}
    ),
    "buckets of groups": (
        lambda: Lists(batching=Buckets(window=20, group_by=length_of)), {"batch_size": 4}
    ),
    "budget": (lambda: Lists(batching=Buckets(max_tokens=600, window=20)), {"batch_size": None}),
    "groups": (Groups, {"batch_size": 4}),
    "groups without rest": (Groups, {"batch_size": 4, "batch_drop_last": True}),
    "groups with sizes": (SizedGroups, {"batch_size": None}),
    "modality": (lambda: Lists(batching=modality("keep")), {"batch_size": 4}),
    "modality, padded": (lambda: Lists(batching=modality("pad")), {"batch_size": 4}),
    "modality without rest": (lambda: Lists(batching=modality("drop")), {"batch_size": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders by their number of samples."""
    found, rng = {}, random.Random(1)
    for number in SIZES:
        folder = tmp_path_factory.mktemp("texts") / str(number)
        write_tar(
            folder / "a.tar", [(f"{i:03d}.txt", b"x" * rng.randint(20, 150)) for i in range(number)]
        )
        found[number] = prepared(folder, "TextSample", {"text": "txt"})
    return found


def make(
    root: Path, encoder: Any, *, validation: bool = False, num_streams: int = 2, **settings: Any
) -> SavableDataLoader[Any]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
    settings = {"batch_size": 2, "task_encoder": encoder, "worker_config": config, **settings}
    if validation:
        dataset = get_val_dataset(root, split_part="train", **settings)
    else:
        dataset = get_train_dataset(root, **{"repeat": False, **settings})
    return get_savable_loader(dataset, max_skip_rate=1)


@pytest.mark.parametrize("kind", KINDS)
@examples(6)
@given(num_samples=st.sampled_from(SIZES), num_streams=st.integers(1, 12), validation=st.booleans())
def test_no_pass_has_more_batches_and_nothing_is_read(
    folders, kind, num_samples, num_streams, validation
) -> None:
    encoder, settings = KINDS[kind]
    loader = make(
        folders[num_samples], encoder(), validation=validation, num_streams=num_streams, **settings
    )
    promised = len(loader)
    number = sum(1 for _ in loader)
    assert number <= promised <= num_samples + num_streams
    assert len(loader) == number or not validation


@pytest.mark.parametrize(
    ("kind", "num_batches"),
    [
        ("packs", 25),
        ("selected", 25),
        ("balanced", 25),
        ("buckets", 13),
        ("buckets by source", 13),
        ("budget", 50),
        ("groups", 50),
        ("groups without rest", 12),
        ("groups with sizes", 50),
        ("modality", 16),
        ("modality without rest", 12),
    ],
)
def test_length_before_the_first_pass(folders, kind, num_batches) -> None:
    make_encoder, settings = KINDS[kind]
    encoder = make_encoder()
    loader = make(folders[50], encoder, num_streams=1, **settings)
    assert (len(loader), encoder.calls) == (num_batches, 0)


@pytest.mark.parametrize("kind", ["buckets", "plain", "groups"])
@pytest.mark.parametrize("num_streams", [1, 3, 7])
def test_endless_lists_of_one_size_are_rounded_up_once(folders, kind, num_streams) -> None:
    """Where no stream ends, none has a list that is not full."""
    encoder, _ = KINDS[kind] if kind != "plain" else (Lists, {})
    loader = make(folders[50], encoder(), num_streams=num_streams, batch_size=4, repeat=True)
    assert len(loader) == 13


def test_endless_packs_of_a_blend_count_each_sample(folders) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    both = [get_train_dataset(folders[n], batch_size=None, worker_config=config) for n in (9, 50)]
    blend = BlendDataset(*zip(both, (1.0, 4.0), strict=True))
    dataset = KINDS["packs"][0]().build_batch(blend, batch_size=2, worker_config=config)
    assert len(get_savable_loader(dataset)) in (29, 30)


def test_consumer_that_stops_at_the_length_loses_nothing(folders) -> None:
    encoder, settings = KINDS["groups"]
    whole = list(make(folders[130], encoder(), num_streams=8, **settings))
    loader = make(folders[130], encoder(), num_streams=8, **settings)
    batches = [batch for _, batch in zip(range(len(loader)), loader, strict=False)]
    assert_same(batches, whole)
