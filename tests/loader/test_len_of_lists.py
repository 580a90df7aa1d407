"""`len` of packs, buckets and groups: nothing is read, and no pass has more batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
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
from ..helpers import prepared

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
    root: Path,
    encoder: Any,
    *,
    validation: bool = False,
    num_streams: int = 2,
    end: Any = None,
    **settings: Any,
) -> SavableDataLoader[Any]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
    settings = {"batch_size": 2, "task_encoder": encoder, "worker_config": config, **settings}
    if validation:
        dataset = get_val_dataset(root, split_part="train", **settings)
    else:
        dataset = get_train_dataset(root, **{"repeat": False, **settings})
    return get_savable_loader(dataset, max_skip_rate=1, end=end)


@pytest.mark.parametrize("kind", KINDS)
@examples(3)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_streams", [1, 7])
def test_dataset_of_a_loader_counts_samples(folders, kind, num_streams) -> None:
    make_encoder, settings = KINDS[kind]
    for repeat in (False, True):
        loader = make(
            folders[50], make_encoder(), num_streams=num_streams, repeat=repeat, **settings
        )
        assert len(loader.dataset) == 50
    assert len(get_savable_loader(loader.dataset)) == len(loader)


BLENDS = {
    "until all have ended": ("until: all_once\nblend: [{path: 9}, {path: 50}]", None),
    "until the first end": ("until: first\nblend: [{path: 9}, {path: 50, weight: 2}]", None),
    "epochs": ("blend_epochized: [{path: 9, repetitions: 3}, {path: 50}]", 77),
    "parts": ("concat: [{path: 9}, {path: 50, subset: {range: [0, 10]}}]", 19),
}


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("num_streams", [1, 5])
def test_dataset_of_a_loader_counts_what_all_ranks_get(
    folders, tmp_path, blend, batch_size, num_streams
) -> None:
    text, expected = BLENDS[blend]
    for number in (9, 50):
        text = text.replace(f"path: {number}", f"path: {folders[number]}")
    split = text.replace("\n", "\n    ")
    file = tmp_path / "meta.yaml"
    file.write_text(f"__class__: MetadatasetV2\nsplits:\n  train:\n    {split}\n")
    counts, lengths = [], set()
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0, num_streams=num_streams)
        settings = {"batch_size": batch_size, "worker_config": config, "repeat": False}
        with get_savable_loader(
            get_train_dataset(file, task_encoder=Lists(), **settings)
        ) as loader:
            counts.append(sum(len(batch) if batch_size else 1 for batch in loader))
            lengths.add(len(loader.dataset))
    assert lengths == {sum(counts)}
    assert expected in (None, sum(counts))


def test_samples_of_so_many_batches_are_not_known(folders) -> None:
    for settings in ({"validation": True, "limit": 3}, {"repeat": True, "virtual_epoch_length": 3}):
        loader = make(folders[50], Lists(), **settings)
        with pytest.raises(TypeError, match=r"end after 3 batches .*; count len"):
            len(loader.dataset)


# Samples, batch size, ranks, streams, settings of the dataset.
EMPTY: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (50, 16, 4, 4, {"batch_drop_last": True}),
    (50, 40, 1, 2, {"batch_drop_last": True}),
    (9, 9, 1, 1, {"task_encoder": Groups(), "batch_drop_last": True}),
]


@pytest.mark.parametrize("case", EMPTY)
def test_pass_without_a_batch_is_told_once(folders, caplog, case) -> None:
    num_samples, batch_size, world_size, num_streams, settings = case
    for rank in range(world_size):
        caplog.clear()
        place = {"rank": rank, "world_size": world_size, "num_workers": 0}
        config = WorkerConfig(**place, num_streams=num_streams)
        loader = make(
            folders[num_samples], Lists(),
            **{"worker_config": config, "batch_size": batch_size, **settings},
        )  # fmt: skip
        assert [*loader] == [*loader] == []
        (told,) = [r.getMessage() for r in caplog.records if "has no batch" in r.getMessage()]
        for word in (f"{num_samples} samples", f"batch_size={batch_size}", f"{world_size} ranks"):
            assert word in told
        assert f"{num_streams} streams" in told


def test_pass_that_was_resumed_at_its_end_is_not_told(folders, caplog) -> None:
    loader = make(folders[9], Lists(), batch_size=4, num_streams=1)
    for _ in range(3):
        batches = iter(loader)
        [next(batches) for _ in range(3)]
        resumed = make(folders[9], Lists(), batch_size=4, num_streams=1)
        resumed.load_state_dict(loader.state_dict())
        assert [*resumed] != [*batches]
    assert "has no batch" not in caplog.text
